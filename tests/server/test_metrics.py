"""What is counted, and that nothing a client sends adds a series."""

import math
from collections.abc import Iterable

from prometheus_client import CollectorRegistry, Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

from engine.outputs import FinishedRequest, FinishReason, StepPart, StepStats
from engine.planning import PlanOutcome, PlanStats
from server import __version__
from server.metric_family import STEPS_AT_ONCE, Backlog
from server.metrics import Metrics

Series = dict[tuple[str, frozenset[tuple[str, str]]], float]


def make_metrics(max_draft_tokens: int = 4) -> Metrics:
    metrics = Metrics(model_name="tiny", method="ngram", max_draft_tokens=max_draft_tokens)
    metrics.watch_routes([("/v1/completions", "POST"), ("/health", "GET")])
    return metrics


def series_of(metrics: Metrics) -> Series:
    text, _ = metrics.render()
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text.decode())
        for sample in family.samples
    }


def value(metrics: Metrics, name: str, **labels: str) -> float:
    """The one series of a name that has the labels."""
    matching = [
        number
        for (series, own), number in series_of(metrics).items()
        if series == f"outrider_{name}" and labels.items() <= dict(own).items()
    ]
    assert len(matching) == 1, (name, labels, matching)
    return matching[0]


def test_a_fresh_server_shows_zeros_and_no_nan() -> None:
    fresh = series_of(make_metrics())
    ours = {key: number for key, number in fresh.items() if key[0].startswith("outrider_")}
    assert len(ours) > 100
    assert not [key for key, number in fresh.items() if math.isnan(number)]
    assert {name for (name, _), number in ours.items() if number != 0} == {
        "outrider_build_info",
        "outrider_model_info",
    }


def test_the_names_are_the_ones_readers_know() -> None:
    names = {name for name, _ in series_of(make_metrics())}
    expected = """
        num_requests_running num_requests_waiting kv_cache_usage_perc prefix_cache_queries_total
        prefix_cache_hits_total num_preemptions_total prompt_tokens_total generation_tokens_total
        request_success_total time_to_first_token_seconds_bucket inter_token_latency_seconds_bucket
        e2e_request_latency_seconds_bucket request_queue_time_seconds_bucket request_prompt_tokens_bucket
        request_generation_tokens_bucket spec_decode_num_drafts_total spec_decode_num_draft_tokens_total
        spec_decode_num_accepted_tokens_total spec_decode_num_accepted_tokens_per_pos_total
        target_forwards_total request_forwards_total committed_tokens_total spec_decode_accepted_length_bucket
        propose_seconds_bucket forward_seconds_bucket sample_seconds_bucket
        spec_decode_outgrown_requests_total spec_decode_lossy_requests_total
        http_requests_total http_request_duration_seconds_bucket step_seconds_total build_info
    """
    for name in expected.split():
        assert f"outrider_{name}" in names
    assert {"process_resident_memory_bytes", "process_cpu_seconds_total"} <= names
    assert not [name for name in names if name.endswith(("_created", "_rate"))]


def test_engine_series_carry_the_method_and_the_served_name() -> None:
    for name, labels in series_of(make_metrics()):
        if name.startswith("outrider_") and not name.startswith(
            ("outrider_http_", "outrider_build_", "outrider_model_")
        ):
            assert {("method", "ngram"), ("model_name", "tiny")} <= labels, name


def test_a_step_is_added_where_it_belongs() -> None:
    metrics = make_metrics()
    step = StepStats(
        num_running=3,
        num_waiting=2,
        kv_cache_usage=0.25,
        prefix_cache_queries=64,
        prefix_cache_hits=32,
        num_preemptions=1,
        num_prompt_tokens=32,
        num_generation_tokens=7,
        num_target_forwards=1,
        num_request_forwards=2,
        num_drafts=2,
        num_draft_tokens=8,
        num_accepted_tokens=5,
        accepted_lengths=(4, 1),
        num_outgrown=1,
        plan=PlanStats(PlanOutcome.PROBING, 5, 1, 0.05, 0.04),
        part_seconds={
            StepPart.BUILD: 0.001,
            StepPart.FORWARD: 0.03,
            StepPart.SAMPLE: 0.004,
            StepPart.PROPOSE: 0.002,
        },
        ttft_seconds=(0.1,),
        inter_token_seconds=(0.01, 0.02, 0.03),
        queue_seconds=(0.05,),
        finished=(FinishedRequest(FinishReason.ABORT, 100, 20, 1.5, is_lossless=False),),
    )
    metrics.listener(step)
    metrics.listener(step)
    expected = {
        "num_requests_running": 3,
        "num_requests_waiting": 2,
        "kv_cache_usage_perc": 0.25,
        "prefix_cache_queries_total": 128,
        "prefix_cache_hits_total": 64,
        "num_preemptions_total": 2,
        "prompt_tokens_total": 64,
        "generation_tokens_total": 14,
        "committed_tokens_total": 14,
        "target_forwards_total": 2,
        "request_forwards_total": 4,
        "spec_decode_num_drafts_total": 4,
        "spec_decode_num_draft_tokens_total": 16,
        "spec_decode_num_accepted_tokens_total": 10,
        "spec_decode_accepted_length_count": 4,
        "spec_decode_accepted_length_sum": 10,
        "spec_decode_outgrown_requests_total": 2,
        "spec_decode_lossy_requests_total": 2,
        "planner_granted_nodes_total": 10,
        "planner_probes_total": 2,
        "planner_predicted_step_seconds_sum": 0.1,
        "planner_measured_step_seconds_sum": 0.08,
        "propose_seconds_sum": 0.004,
        "forward_seconds_sum": 0.06,
        "sample_seconds_sum": 0.008,
        "time_to_first_token_seconds_sum": 0.2,
        "inter_token_latency_seconds_count": 6,
        "request_queue_time_seconds_sum": 0.1,
        "request_prompt_tokens_sum": 200,
        "request_generation_tokens_sum": 40,
        "e2e_request_latency_seconds_sum": 3,
    }
    for name, number in expected.items():
        assert math.isclose(value(metrics, name), number), name
    assert value(metrics, "planner_steps_total", outcome="probing") == 2
    assert value(metrics, "planner_steps_total", outcome="load") == 0
    assert value(metrics, "request_success_total", finished_reason="abort") == 2
    assert value(metrics, "request_success_total", finished_reason="stop") == 0
    parts = {part: value(metrics, "step_seconds_total", part=part) for part in StepPart}
    took_time = {"build": 0.002, "forward": 0.06, "sample": 0.008, "propose": 0.004}
    assert parts == dict.fromkeys(StepPart, 0.0) | took_time
    per_position = [
        value(metrics, "spec_decode_num_accepted_tokens_per_pos_total", position=position)
        for position in ("0", "1", "2", "3", "4+")
    ]
    assert per_position == [4, 2, 2, 2, 0]


def test_a_step_without_a_forward_is_no_sample_of_its_times() -> None:
    metrics = make_metrics()
    metrics.listener(StepStats(num_waiting=1))
    assert value(metrics, "forward_seconds_count") == 0
    assert value(metrics, "propose_seconds_count") == 0


def test_drafts_longer_than_the_servers_setting_share_one_position() -> None:
    metrics = make_metrics(max_draft_tokens=2)
    before = series_of(metrics).keys()
    metrics.listener(StepStats(accepted_lengths=(63,)))
    assert value(metrics, "spec_decode_num_accepted_tokens_per_pos_total", position="1") == 1
    assert value(metrics, "spec_decode_num_accepted_tokens_per_pos_total", position="2+") == 61
    assert series_of(metrics).keys() == before


def test_requests_are_counted_by_route_template() -> None:
    metrics = make_metrics()
    metrics.http_request("/v1/completions", "POST", 200, 0.5)
    metrics.http_request("/v1/completions", "POST", 418, 0.5)
    metrics.http_request("/v1/completions", "GET", 405, 0.5)
    assert value(metrics, "http_requests_total", route="/v1/completions", status="200") == 1
    assert value(metrics, "http_requests_total", route="/v1/completions", status="other") == 1
    assert value(metrics, "http_requests_total", route="other", status="405") == 1
    assert value(metrics, "http_request_duration_seconds_sum", route="/v1/completions") == 1


def test_nothing_a_client_sends_adds_a_series() -> None:
    metrics = make_metrics()
    before = series_of(metrics).keys()
    for number in range(1000):
        metrics.http_request(f"/scan/{number}", f"VERB{number}", number, 0.1)
        metrics.http_request("/v1/completions", "POST", 100 + number, 0.1)
        metrics.listener(StepStats(accepted_lengths=(number % 64,)))
    assert series_of(metrics).keys() == before
    assert value(metrics, "http_request_duration_seconds_count", route="other") == 1000


def test_acceptance_never_exceeds_what_was_drafted() -> None:
    metrics = make_metrics()
    for _ in range(10):
        metrics.listener(
            StepStats(
                num_generation_tokens=5,
                num_target_forwards=1,
                num_drafts=1,
                num_draft_tokens=4,
                num_accepted_tokens=4,
                accepted_lengths=(4,),
            )
        )
    accepted = value(metrics, "spec_decode_num_accepted_tokens_total")
    assert accepted / value(metrics, "spec_decode_num_draft_tokens_total") == 1.0
    assert value(metrics, "committed_tokens_total") / value(metrics, "target_forwards_total") == 5.0


def test_two_servers_in_one_process_share_nothing() -> None:
    first, second = make_metrics(), make_metrics()
    first.listener(StepStats(num_preemptions=1))
    assert value(second, "num_preemptions_total") == 0


def test_the_format_follows_the_accept_header() -> None:
    metrics = make_metrics()
    assert metrics.render()[1].startswith("text/plain")
    text, content_type = metrics.render("application/openmetrics-text; version=1.0.0")
    assert content_type.startswith("application/openmetrics-text")
    assert text.endswith(b"# EOF\n")
    assert f'version="{__version__}"'.encode() in text


def test_committed_tokens_tell_both_forwards_they_may_be_divided_by() -> None:
    text = make_metrics().render()[0].decode()
    (told,) = [
        line for line in text.splitlines() if line.startswith("# HELP outrider_committed_tokens_total")
    ]
    assert "over request_forwards_total: one request's tokens per forward" in told
    assert "over target_forwards_total: the whole batch's" in told
    for name in ("request_forwards_total", "target_forwards_total"):
        assert f"# TYPE outrider_{name} counter" in text


def test_steps_are_counted_together_and_none_is_missing_from_a_scrape() -> None:
    registry = CollectorRegistry()
    counted: list[int] = []
    backlog = Backlog(registry, lambda stats: counted.append(stats.num_running))
    seen: list[int] = []

    class Reader(Collector):
        def collect(self) -> Iterable[Metric]:
            seen.append(len(counted))
            return ()

    registry.register(Reader())
    seen.clear()  # To register is to be read once.
    for number in range(STEPS_AT_ONCE - 1):
        backlog.add(StepStats(num_running=number))
    assert counted == []
    list(registry.collect())
    assert counted == list(range(STEPS_AT_ONCE - 1))
    assert seen == [len(counted)], "the metrics themselves were read before the steps were counted"
    for number in range(STEPS_AT_ONCE):
        backlog.add(StepStats(num_running=number))
    assert len(counted) == 2 * STEPS_AT_ONCE - 1
