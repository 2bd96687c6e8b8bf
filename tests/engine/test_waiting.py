"""Who waits for a first token does not wait for others' drafts, nor a token for the next draft."""

import cProfile
import pstats
from dataclasses import replace

import pytest

from engine.llm import LLM
from engine.planning import PlanOutcome
from engine.sampling_params import SamplingParams
from tests.engine.answers import PROMPT, assert_clean
from tests.engine.test_lossless import PROMPTS, plain_answers
from tests.engine.test_planning import clocked
from tests.engines import build_llm, load_tiny

GREEDY = SamplingParams(temperature=0.0, max_tokens=90, ignore_eos=True)
NEWCOMER = tuple(range(97, 117))


def calibrated(llm: LLM, by_rows: dict[int, float]) -> None:
    """Tells the planner what passes take."""
    assert llm.core._drafting is not None
    llm.core._drafting._measurements.cost.calibrate(by_rows, 0.0, 0.0)


def drafted_beside_a_prompt(llm: LLM, num_before: int) -> tuple[int, PlanOutcome]:
    """Nodes of the step that reads a newcomer's prompt, and what was planned for it."""
    core = llm.core
    core.add_request("a", PROMPT, GREEDY)
    for _ in range(num_before):
        core.step()
    core.take_stats()
    core.add_request("b", NEWCOMER, replace(GREEDY, max_tokens=3))
    core.step()
    beside = core.take_stats()
    assert beside.plan is not None
    assert len(beside.ttft_seconds) == 1
    while core.has_work:
        core.step()
    assert_clean(llm)
    return beside.num_draft_tokens, beside.plan.outcome


@pytest.mark.parametrize(
    ("seconds_per_row", "expected"),
    [(0.0005, (0, PlanOutcome.WAITING)), (0.0, (2, PlanOutcome.SPECULATED))],
)
def test_a_lookup_beside_a_newcomer_s_prompt_has_rows_where_they_are_free(
    seconds_per_row: float, expected: tuple[int, PlanOutcome]
) -> None:
    """The prompt came after the step before had ended, and still is known when drafts are granted."""
    llm = clocked(build_llm("ngram", planner="auto", num_draft_tokens=2), seconds_per_row)
    calibrated(llm, {1: 0.01 + seconds_per_row, 64: 0.01 + 64 * seconds_per_row})
    assert drafted_beside_a_prompt(llm, 33) == expected


@pytest.mark.parametrize("method", ["draft_model", "eagle3"])
def test_no_passes_are_made_while_a_newcomer_waits(method: str) -> None:
    noise = {"draft": load_tiny(noise=0.01)} if method == "draft_model" else {}
    llm = clocked(build_llm(method, planner="auto", num_draft_tokens=2, **noise), 0.0005)  # type: ignore[arg-type]
    assert drafted_beside_a_prompt(llm, 20) == (0, PlanOutcome.WAITING)


def test_drafts_return_in_the_step_behind_the_prompt() -> None:
    llm = clocked(
        build_llm("draft_model", planner="auto", num_draft_tokens=2, draft=load_tiny(noise=0.01)), 0.0005
    )
    core = llm.core
    core.add_request("a", PROMPT, GREEDY)
    for _ in range(20):
        core.step()
    drafted: list[int] = []
    core.add_request("b", NEWCOMER, GREEDY)
    for _ in range(6):
        core.take_stats()
        core.step()
        drafted.append(core.take_stats().num_draft_tokens)
    assert drafted[0] == 0
    assert sum(drafted[1:]) > 0


def test_tokens_go_out_before_the_next_draft_is_made() -> None:
    """Indexing a prompt takes as long as many tokens, and nobody's first token waits for it."""
    llm = build_llm("ngram")
    core = llm.core
    assert core._drafting is not None
    speculator = core._drafting._drafters[-1].speculator
    calls: list[int] = []
    propose = speculator.propose
    speculator.propose = lambda context: calls.append(len(context.requests)) or propose(context)  # type: ignore
    core.add_request("a", PROMPT, GREEDY)
    assert len(core.step()[0].token_ids) == 1
    assert calls == []
    core.step()
    assert calls == [1]


def test_a_plan_that_fails_ends_those_that_run_and_nobody_else() -> None:
    llm = build_llm("ngram", max_num_seqs=1)
    core = llm.core
    assert core._drafting is not None
    plan = core._drafting._plan
    core.add_request("a", PROMPT, GREEDY)
    core.add_request("b", PROMPT, GREEDY)
    core.step()

    def failing(*_: object) -> None:
        raise RuntimeError("planted")

    core._drafting._plan = failing  # type: ignore[method-assign, assignment]
    with pytest.raises(RuntimeError, match="planted"):
        core.step()
    assert core.abandon_step() == ["a"]
    core._drafting._plan = plan  # type: ignore[method-assign]
    said: list[int] = []
    while core.has_work:
        said += [token for output in core.step() for token in output.token_ids]
    expected = plain_answers("greedy")[PROMPTS.index(bytes(PROMPT).decode())].token_ids
    assert said[: len(expected)] == expected
    assert_clean(llm)


def num_calls(llm: LLM, num_requests: int) -> float:
    """Functions called to plan a step of so many requests, on average."""
    core = llm.core
    for place in range(num_requests):
        core.add_request(f"{place}", PROMPT[place:], GREEDY)
    for _ in range(20):
        core.step()
    profile = cProfile.Profile()
    prepare = core._prepare

    def watched() -> None:
        profile.enable()
        prepare()
        profile.disable()

    core._prepare = watched  # type: ignore[method-assign]
    for _ in range(16):
        core.step()
    return float(pstats.Stats(profile).total_calls) / 16  # type: ignore[attr-defined]


def test_a_step_in_which_nobody_can_draft_costs_next_to_nothing() -> None:
    """As without a method, where predictions alone may draft and nobody has brought one."""
    assert num_calls(build_llm("none"), 4) < 160


def test_a_step_that_pays_for_nothing_is_decided_with_few_operations() -> None:
    llm = clocked(build_llm("ngram", planner="auto", num_draft_tokens=15), 1.0)
    calibrated(llm, {1: 1.01, 64: 64.01})
    assert num_calls(llm, 4) < 250
