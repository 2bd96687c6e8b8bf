"""Prompts that share a beginning and arrive together: it is computed once, and the texts are the same."""

from collections.abc import Sequence
from dataclasses import replace

import pytest

from engine.llm import LLM
from engine.outputs import FinishReason, RequestOutput, StepStats
from engine.sampling_params import SamplingParams, SpeculationParams
from engine.speculation.head_progress import MAX_PENDING
from tests.engine.answers import assert_clean, essence, plain_answer, run
from tests.engines import HEADS, METHODS, build_llm

SHARED = tuple(b"one two three one two three, " * 3)  # 87 tokens, 21 blocks and 3 tokens
SEEDED = SamplingParams(temperature=0.8, seed=7, max_tokens=10, ignore_eos=True)
CHOICES = [replace(SEEDED, choice=choice) for choice in range(4)]


def watch(llm: LLM) -> list[int]:
    """Prompt tokens that the target computes, step by step: those of items that are not a last token."""
    computed: list[int] = []
    schedule = llm.core.scheduler.schedule

    def watched():  # type: ignore[no-untyped-def]
        plan = schedule()
        computed.append(sum(item.num_tokens for item in plan.scheduled if not item.request.num_output_tokens))
        return plan

    llm.core.scheduler.schedule = watched  # type: ignore[method-assign]
    return computed


def plain(prompts: Sequence[tuple[int, ...]], wishes: Sequence[SamplingParams]) -> list[object]:
    """Each alone, without a cache to meet in."""
    return [essence(plain_answer(wish, prompt)) for prompt, wish in zip(prompts, wishes, strict=True)]


@pytest.mark.parametrize("method", ["none", *METHODS, "draft_model 3,2,1,1", *HEADS])
def test_the_choices_of_a_prompt_read_it_once(method: str) -> None:
    llm = build_llm(method)
    computed = watch(llm)
    answers = llm.generate([SHARED] * 4, CHOICES)
    assert [essence(answer) for answer in answers] == plain([SHARED] * 4, CHOICES)
    assert computed[:2] == [87, 3 * 3]
    assert sum(computed) == 96
    assert [answer.num_cached_tokens for answer in answers] == [0, 84, 84, 84]
    assert (llm.stats.prefix_cache_queries, llm.stats.prefix_cache_hits) == (4 * 87, 3 * 84)
    assert_clean(llm)


@pytest.mark.parametrize("method", ["none", *METHODS, "eagle3", "medusa"])
def test_prompts_behind_a_shared_beginning(method: str) -> None:
    prompts = [SHARED + tuple(tail) for tail in (b"a", b"bc", b"four five six", b"")]
    llm = build_llm(method)
    computed = watch(llm)
    answers = llm.generate([*prompts, tuple(b"another")], SEEDED)
    assert [essence(answer) for answer in answers] == plain([*prompts, tuple(b"another")], [SEEDED] * 5)
    assert computed[:2] == [88 + 7, 5 + 16 + 3]
    assert [answer.num_cached_tokens for answer in answers] == [0, 84, 84, 84, 0]
    assert_clean(llm)


@pytest.mark.parametrize("method", ["none", "draft_model", "eagle3", "medusa"])
@pytest.mark.parametrize("budget", [96, 90, 40, 17, 9])
def test_in_chunks(method: str, budget: int) -> None:
    llm = build_llm(method, max_num_batched_tokens=budget)
    computed = watch(llm)
    answers = llm.generate([SHARED] * 4, CHOICES)
    assert [essence(answer) for answer in answers] == plain([SHARED] * 4, CHOICES)
    # The last chunk may be less than is worth a step; and a head reads its features when they are many.
    most = 96 + 3 * (MAX_PENDING if method == "eagle3" else budget)
    assert 96 <= sum(computed) <= most
    assert_clean(llm)


@pytest.mark.parametrize("method", ["draft_model", "eagle3", "medusa"])
def test_a_leader_without_speculation_and_followers_with_it(method: str) -> None:
    """Those whose speculator reads hidden states need a leader of their own kind: the first of them."""
    off = SpeculationParams(enabled=False)
    wishes = [replace(CHOICES[0], speculation=off), *CHOICES[1:], replace(SEEDED, choice=4, speculation=off)]
    llm = build_llm(method)
    computed = watch(llm)
    answers = llm.generate([SHARED] * 5, wishes)
    assert [essence(answer) for answer in answers] == plain([SHARED] * 5, wishes)
    assert computed[:2] == ([2 * 87, 3 * 3] if method == "eagle3" else [87, 4 * 3])
    assert sum(answer.speculation.num_draft_tokens for answer in answers[1:4]) > 0
    assert_clean(llm)


def test_one_that_wants_every_prompt_token_s_logprobs_reads_all_of_it() -> None:
    wishes = [CHOICES[0], replace(CHOICES[1], prompt_logprobs=1), CHOICES[2]]
    llm = build_llm("none")
    computed = watch(llm)
    answers = llm.generate([SHARED] * 3, wishes)
    assert computed[:2] == [2 * 87, 3]
    assert [len(answer.prompt_logprobs or ()) for answer in answers] == [0, 87, 0]
    assert [essence(answer) for answer in answers] == plain([SHARED] * 3, wishes)
    assert_clean(llm)


@pytest.mark.parametrize("method", ["none", "draft_model", "eagle3"])
@pytest.mark.parametrize("num_kv_blocks", [32, 40, 50])
def test_in_a_full_pool(method: str, num_kv_blocks: int) -> None:
    prompts = [SHARED + tuple(tail) for tail in (b"", b"bc", b"four five six", b"a")] * 2
    wishes = [replace(SEEDED, choice=choice, max_tokens=16) for choice in range(8)]
    llm = build_llm(method, num_kv_blocks=num_kv_blocks)
    answers = llm.generate(prompts, wishes)
    assert [essence(answer) for answer in answers] == plain(prompts, wishes)
    assert_clean(llm)


@pytest.mark.parametrize("method", ["none", "draft_model", "eagle3"])
def test_preempted_together(method: str) -> None:
    """Someone older outgrows the pool while the shared prompt is answered."""
    prompts = [tuple(b"the oldest"), *[SHARED] * 4]
    wishes = [replace(SEEDED, max_tokens=100), *CHOICES]
    llm = build_llm(method, num_kv_blocks=36)
    taken: list[StepStats] = []
    asked = {f"r{index}": pair for index, pair in enumerate(zip(prompts, wishes, strict=True))}
    answers = run(llm, asked, taken.append)
    assert sum(stats.num_preemptions for stats in taken) > 0
    assert [essence(answer) for answer in answers.values()] == plain(prompts, wishes)


@pytest.mark.parametrize("method", ["none", "draft_model", "eagle3"])
@pytest.mark.parametrize("num_steps", [0, 1, 2])
def test_the_leader_is_aborted(method: str, num_steps: int) -> None:
    llm = build_llm(method)
    core = llm.core
    computed = watch(llm)
    for choice, wishes in enumerate(CHOICES):
        core.add_request(f"c{choice}", SHARED, wishes)
    outputs: list[RequestOutput] = []
    for _ in range(num_steps):
        outputs += core.step()
    output = core.abort("c0")
    assert output is not None
    assert output.finish_reason is FinishReason.ABORT
    while core.has_work:
        outputs += core.step()
        core.scheduler.check_integrity()
    assert sum(computed) == (96 if num_steps else 93)
    for choice, expected in enumerate(plain([SHARED] * 4, CHOICES)):
        tokens = [t for output in outputs if output.request_id == f"c{choice}" for t in output.token_ids]
        assert choice == 0 or (tokens, "length") == (expected[0], str(expected[2])), choice  # type: ignore[index]
    assert_clean(llm)


def test_a_step_that_fails_ends_the_leader_and_nobody_else() -> None:
    llm = build_llm("none")
    core = llm.core
    for choice, wishes in enumerate(CHOICES):
        core.add_request(f"c{choice}", SHARED, wishes)
    forward = core._runner.forward

    def failing(batch: object) -> object:
        core._runner.forward = forward  # type: ignore[method-assign]
        raise RuntimeError("planted")

    core._runner.forward = failing  # type: ignore[method-assign, assignment]
    with pytest.raises(RuntimeError, match="planted"):
        core.step()
    assert core.take_stats().num_waiting == 3
    assert core.abandon_step() == ["c0"]
    answers: dict[str, list[int]] = {}
    while core.has_work:
        for output in core.step():
            answers.setdefault(output.request_id, []).extend(output.token_ids)
    expected = plain([SHARED] * 4, CHOICES)
    assert answers == {f"c{choice}": expected[choice][0] for choice in (1, 2, 3)}  # type: ignore[index]
    assert_clean(llm)


def test_those_that_are_held_count_as_waiting() -> None:
    llm = build_llm("none")
    taken: list[StepStats] = []
    run(llm, {f"c{choice}": (SHARED, wishes) for choice, wishes in enumerate(CHOICES)}, taken.append)
    assert [(stats.num_running, stats.num_waiting) for stats in taken[:2]] == [(1, 3), (4, 0)]
    assert [len(stats.queue_seconds) for stats in taken[:2]] == [1, 3]
