"""The planner inside an engine: texts do not depend on it, and nothing is drafted where it grants nothing."""

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest

from engine.llm import LLM
from engine.planning import PlanOutcome
from engine.sampling_params import Acceptance, SamplingParams, SpeculationParams
from engine.speculation.base import Requirements
from engine.speculation.evidence import MeasuredFloor, RowPrice
from engine.speculation.planner import Allotment, Grant, Load, Offer, Wish
from engine.step_timer import StepTimer
from engine.token_tree import Proposal
from tests.drawn import drawing
from tests.engine.answers import PROMPT, assert_clean, essence, run
from tests.engine.small_law import excess
from tests.engine.test_lossless import OPTIONS, PROMPTS, plain_answer
from tests.engine.test_rejection_law import FORK, WISHES, sampled
from tests.engines import build_llm, load_tiny
from tests.scripted import ScriptedSpeculator

GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)


class Whimsical:
    """A planner that changes its mind in every step, and means nobody well."""

    name = "whimsical"

    def __init__(self, seed: int) -> None:
        self._rng = random.Random(seed)

    def price(self, load: Load) -> RowPrice:
        return MeasuredFloor(self._rng.random() ** 3)

    def listens(self, request_id: str) -> bool:
        return self._rng.random() < 0.8

    def asks(self, method: int, load: Load) -> bool:
        return self._rng.random() < 0.8

    def allot(self, load: Load, offers: Sequence[Offer], wishes: Sequence[Sequence[Wish]]) -> Allotment:
        rng = self._rng
        kept = tuple(rng.randint(0, len(offer.probabilities)) for offer in offers)
        free = set(range(100))
        grants = []
        for own in wishes:
            mine = [wish for wish in own if wish.place in free and rng.random() < 0.7]
            free -= {wish.place for wish in mine}
            grants.append(
                tuple(
                    Grant(
                        wish.place,
                        rng.randint(1, wish.num_nodes),
                        rng.randint(1, wish.max_depth),
                        rng.random() if wish.ends_early else 0.0,
                    )
                    for wish in mine
                )
            )
        return Allotment(kept, tuple(grants), PlanOutcome.SPECULATED)

    def follows_prompts(self, method: int) -> bool:
        return self._rng.random() < 0.5

    def follows_texts(self, method: int, num_requests: int) -> bool:
        return self._rng.random() < 0.8

    def note_verdict(self, method: int, request_id: str, stood: bool) -> None:
        pass


def with_planner(llm: LLM, planner: object) -> LLM:
    assert llm.core._drafting is not None
    llm.core._drafting._planner = planner  # type: ignore[assignment]
    llm.core._drafting._following._planner = planner  # type: ignore[assignment]
    return llm


def accepted(answers: Sequence[object]) -> int:
    return sum(answer.speculation.num_accepted_tokens for answer in answers)  # type: ignore[attr-defined]


SETUPS: dict[str, tuple[str, dict[str, Any]]] = {
    "ngram": ("ngram", {}),
    "suffix": ("suffix", {}),
    "chain": ("draft_model", {}),
    "tree": ("draft_model 3,2,1,1", {}),
    "dynamic": ("draft_model dynamic", {}),
    "head": ("eagle3", {}),
    "head's tree": ("eagle 2,2,1", {}),
    "two drafts": ("draft_models 2,1,1", {}),
    "lookup first": ("draft_model", {"lookup": "ngram"}),
    "suffixes first": ("draft_model sequoia", {"lookup": "suffix"}),
}


@pytest.mark.parametrize("setup", SETUPS)
def test_a_planner_that_changes_its_mind_changes_no_text(setup: str) -> None:
    method, more = SETUPS[setup]
    llm = with_planner(build_llm(method, num_kv_blocks=45, **more), Whimsical(3))
    mixed = list(zip(PROMPTS * 2, OPTIONS, strict=False))
    expected = [essence(plain_answer(prompt, option)) for prompt, option in mixed]
    answers = llm.generate([prompt for prompt, _ in mixed], [OPTIONS[option] for _, option in mixed])
    assert [essence(answer) for answer in answers] == expected
    assert accepted(answers) > 10
    assert_clean(llm)


@pytest.mark.parametrize("setup", ["ngram", "chain", "tree", "head", "lookup first"])
def test_the_automatic_planner_changes_no_text(setup: str) -> None:
    method, more = SETUPS[setup]
    llm = build_llm(method, planner="auto", **more)
    for prompts in (PROMPTS, PROMPTS[:1], PROMPTS[2:5]):
        answers = llm.generate(prompts, OPTIONS["seeded, everything"])
        expected = [plain_answer(prompt, "seeded, everything") for prompt in prompts]
        assert list(map(essence, answers)) == list(map(essence, expected))
    assert_clean(llm)


@pytest.mark.parametrize("rule", [Acceptance.REJECTION, Acceptance.BLOCK])
def test_a_planner_that_changes_its_mind_keeps_the_law(
    rule: Acceptance, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_whims(monkeypatch)
    wishes = replace(WISHES, speculation=SpeculationParams(acceptance=rule))
    counts, rate = sampled(wishes, num_seeds=2000)
    assert excess(counts) < 1
    assert rate > 0.2


def test_drawn_trees_cut_at_random_keep_the_law(monkeypatch: pytest.MonkeyPatch) -> None:
    use_whims(monkeypatch)
    script = drawing(FORK, Proposal.SAMPLED_DISTINCT)
    counts, _ = sampled(
        WISHES,
        lambda inner: ScriptedSpeculator(script, Requirements(branches=True)),
        num_draft_tokens=4,
        num_seeds=2000,
    )
    assert excess(counts) < 1


def use_whims(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines that tests/engine/test_rejection_law.py builds are planned by whims."""
    build: Callable[..., LLM] = build_llm
    monkeypatch.setattr(
        "tests.engine.test_rejection_law.build_llm",
        lambda *args, **settings: with_planner(build(*args, **settings), Whimsical(5)),
    )


class Nothing(Whimsical):
    """Grants nothing at all."""

    def price(self, load: Load) -> RowPrice:
        return MeasuredFloor(1.0)

    def allot(self, load: Load, offers: Sequence[Offer], wishes: Sequence[Sequence[Wish]]) -> Allotment:
        return Allotment((0,) * len(offers), ((),) * len(wishes), PlanOutcome.LOAD)

    def follows_prompts(self, method: int) -> bool:
        return False


def test_where_nothing_is_granted_no_draft_is_computed_and_the_cache_catches_up_later() -> None:
    llm = build_llm("draft_model")
    core = llm.core
    drafting = core._drafting
    assert drafting is not None
    speculator = drafting._drafters[-1].speculator
    calls: list[int] = []
    propose = speculator.propose
    speculator.propose = lambda context: calls.append(len(context.requests)) or propose(context)  # type: ignore
    usual = drafting._planner
    drafting._planner = Nothing(0)
    core.add_request("a", PROMPT, GREEDY)
    outputs = [output for _ in range(10) for output in core.step()]
    assert calls == []
    assert core.take_stats().plan is not None
    drafting._planner = usual
    while core.has_work:
        outputs += core.step()
    assert calls
    answer = [token for output in outputs for token in output.token_ids]
    assert answer == plain_answer(bytes(PROMPT).decode(), "greedy").token_ids
    assert outputs[-1].speculation.num_accepted_tokens > 0
    assert_clean(llm)


def clocked(llm: LLM, seconds_per_row: float) -> LLM:
    """An engine whose passes take as long as its rows say, and whose everything else takes nothing."""
    now = [0.0]
    core = llm.core

    def clock() -> float:
        return now[0]

    core.timer = StepTimer(clock)
    assert core._drafting is not None
    core._drafting._clock = clock
    for name in ("forward", "forward_tapped"):
        setattr(core._runner, name, timed(getattr(core._runner, name), now, seconds_per_row))
    return llm


def timed(forward: Callable[..., Any], now: list[float], seconds_per_row: float) -> Callable[..., Any]:
    """A pass that takes its time on a clock of ours."""

    def run_it(batch: Any, *more: Any) -> Any:
        now[0] += 0.01 + seconds_per_row * len(batch.input_ids)
        return forward(batch, *more)

    return run_it


@pytest.mark.parametrize(("seconds_per_row", "noise", "drafts"), [(0.00001, 0.02, True), (0.05, 0.1, False)])
def test_it_learns_from_steps_whether_drafts_pay(seconds_per_row: float, noise: float, drafts: bool) -> None:
    """With rows for nothing drafts are long; where each costs like a step there are next to none."""
    llm = clocked(build_llm("draft_model", planner="auto", draft=load_tiny(noise=noise)), seconds_per_row)
    outcomes: list[PlanOutcome] = []
    wishes = replace(GREEDY, max_tokens=90)
    run(
        llm,
        {"a": (PROMPT, wishes), "b": (PROMPT[:9], wishes)},
        lambda stats: outcomes.append(stats.plan.outcome) if stats.plan else None,
    )
    late = outcomes[len(outcomes) // 2 :]
    share = late.count(PlanOutcome.SPECULATED) / len(late)
    assert share > 0.7 if drafts else share < 0.1, outcomes


def test_steps_are_predicted_and_reported() -> None:
    llm = clocked(build_llm("draft_model", planner="auto"), 0.001)
    errors: list[float] = []

    def note(stats: object) -> None:
        plan = stats.plan  # type: ignore[attr-defined]
        if plan is not None and plan.predicted_seconds is not None:
            errors.append(abs(plan.predicted_seconds - plan.measured_seconds) / plan.measured_seconds)

    wishes = replace(GREEDY, max_tokens=90)
    run(llm, {"a": (PROMPT, wishes)}, note)
    assert sum(errors[-20:]) / 20 < 0.1
    report = llm.core.planner_report()
    assert report.planner == "auto"
    assert [method.method for method in report.methods] == ["prediction", "grammar", "draft_model"]
    assert sum(count.num_steps for count in report.outcomes) > 20
    assert report.prediction_error is not None
    assert report.forward


@pytest.mark.parametrize(
    ("speculation", "max_tokens", "outcome"),
    [
        (SpeculationParams(enabled=False), 9, PlanOutcome.DISABLED),
        (SpeculationParams(), 2, PlanOutcome.ROOM),
    ],
)
def test_it_says_why_there_is_nothing_to_plan(
    speculation: SpeculationParams, max_tokens: int, outcome: PlanOutcome
) -> None:
    llm = build_llm("draft_model", planner="auto")
    seen: list[PlanOutcome] = []
    wishes = replace(GREEDY, max_tokens=max_tokens, speculation=speculation)
    run(llm, {"a": (PROMPT, wishes)}, lambda stats: seen.append(stats.plan.outcome) if stats.plan else None)
    assert set(seen) <= {outcome, PlanOutcome.READING, PlanOutcome.SPECULATED}
    assert outcome in seen or max_tokens == 2


def test_a_request_never_gets_more_than_it_asked_for() -> None:
    llm = clocked(build_llm("draft_model", planner="auto", num_draft_tokens=8), 0.0)
    wishes = replace(GREEDY, max_tokens=60, speculation=SpeculationParams(num_draft_tokens=2))
    most: list[int] = []
    run(llm, {"a": (PROMPT, wishes)}, lambda stats: most.append(stats.num_draft_tokens))
    assert max(most) == 2
