import pytest

from engine.outputs import FinishedRequest, FinishReason, SpeculationStats, StepPart, StepStats
from engine.step_recorder import RequestRecord, StepRecorder


def test_a_step_without_events() -> None:
    assert StepRecorder().build(0, 0, 0.0) == StepStats()


def test_own_counters_and_the_engines_state_are_passed_on() -> None:
    recorder = StepRecorder()
    recorder.num_preemptions = 1
    recorder.prefix_cache_queries, recorder.prefix_cache_hits = 30, 16
    recorder.num_prompt_tokens, recorder.num_target_forwards, recorder.num_outgrown = 20, 1, 2
    recorder.part_seconds = {StepPart.FORWARD: 0.2, StepPart.SAMPLE: 0.3}
    assert recorder.build(3, 4, 0.25) == StepStats(
        num_running=3,
        num_waiting=4,
        kv_cache_usage=0.25,
        prefix_cache_queries=30,
        prefix_cache_hits=16,
        num_preemptions=1,
        num_prompt_tokens=20,
        num_target_forwards=1,
        num_outgrown=2,
        part_seconds={StepPart.FORWARD: 0.2, StepPart.SAMPLE: 0.3},
    )


def test_time_in_the_queue_counts_once() -> None:
    record, recorder = RequestRecord(arrival=10.0), StepRecorder()
    recorder.scheduled(record, 12.5)
    recorder.scheduled(record, 13.0)
    assert recorder.build(1, 0, 0.0).queue_seconds == (2.5,)
    later = StepRecorder()
    later.scheduled(record, 20.0)
    assert later.build(1, 0, 0.0).queue_seconds == ()


def test_first_token_and_time_between_tokens() -> None:
    record = RequestRecord(arrival=10.0)
    first, second = StepRecorder(), StepRecorder()
    first.committed(record, 1, 0, 0, 11.0)
    second.committed(record, 4, 5, 3, 13.0)
    stats = first.build(1, 0, 0.0)
    assert (stats.ttft_seconds, stats.inter_token_seconds) == ((1.0,), ())
    stats = second.build(1, 0, 0.0)
    assert stats.ttft_seconds == ()
    assert stats.inter_token_seconds == (0.5, 0.5, 0.5, 0.5)  # per token: four in two seconds


def test_every_token_but_the_first_has_a_time_between() -> None:
    record, recorder = RequestRecord(arrival=0.0), StepRecorder()
    recorder.committed(record, 3, 2, 2, 1.0)
    recorder.committed(record, 2, 4, 1, 2.0)
    stats = recorder.build(1, 0, 0.0)
    assert len(stats.ttft_seconds) + len(stats.inter_token_seconds) == stats.num_generation_tokens == 5
    assert stats.inter_token_seconds == (0.0, 0.0, 0.5, 0.5)


def test_drafts_are_counted_for_step_and_request() -> None:
    one, other, recorder = RequestRecord(0.0), RequestRecord(0.0), StepRecorder()
    recorder.committed(one, 4, 5, 3, 1.0)
    recorder.committed(other, 1, 5, 0, 1.0)
    recorder.committed(one, 1, 0, 0, 2.0)  # no draft in this step
    stats = recorder.build(2, 0, 0.0)
    assert (stats.num_drafts, stats.num_draft_tokens, stats.num_accepted_tokens) == (2, 10, 3)
    assert stats.accepted_lengths == (3, 0)
    assert stats.num_generation_tokens == 6
    assert one.stats() == SpeculationStats(2, 1, 5, 3, 5)
    assert other.stats() == SpeculationStats(1, 1, 5, 0, 1)


def test_a_verdict_without_tokens_starts_no_clock() -> None:
    record, recorder = RequestRecord(arrival=0.0), StepRecorder()
    recorder.committed(record, 0, 0, 0, 1.0)
    recorder.committed(record, 1, 0, 0, 3.0)
    stats = recorder.build(1, 0, 0.0)
    assert (stats.ttft_seconds, stats.inter_token_seconds) == ((3.0,), ())
    assert record.stats() == SpeculationStats(num_steps=2, num_committed_tokens=1)


@pytest.mark.parametrize("reason", list(FinishReason))
def test_ends(reason: FinishReason) -> None:
    record, recorder = RequestRecord(arrival=1.0), StepRecorder()
    recorder.finished(record, reason, (7, 3), 5.0)
    assert recorder.build(0, 0, 0.0).finished == (FinishedRequest(reason, 7, 3, 4.0),)
