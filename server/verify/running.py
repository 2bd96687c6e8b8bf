"""Runs a plan: plain decoding first, then every method under every rule."""

import sys
import time
from collections.abc import Iterable
from dataclasses import replace

from engine.errors import StartupError
from engine.sampling_params import Acceptance, SamplingParams
from server.bench.progress import Progress
from server.bench.prompts import Prompt
from server.config import ConfigError
from server.verify.cases import law_cases
from server.verify.draws import (
    NUM_TOKENS,
    Spot,
    by_repetition,
    choose_spots,
    draw,
    exact_law,
    hold_against,
    sampled_law,
    with_tokens,
)
from server.verify.law import CellLaw
from server.verify.plan import Plan
from server.verify.results import Bounds, LawRow, Outcome, TextRow
from server.verify.subject import Ask, OnDone, Subject
from server.verify.texts import PLAIN, Baseline, compare_texts, speculating, take_baseline

# By precision: nats that rounding may decide about, and what logprobs may differ by. A server that does not
# tell its precision is held to that of float32. Keys and values in float8_e4m3fn step 16 times as far as in
# bfloat16 where the batch moves them at all, and a 16th as often: 4 times the deviation, by reckoning alone.
_BOUNDS = {
    "": (1e-4, 1e-5),
    "float32": (1e-4, 1e-5),
    "float16": (0.02, 0.02),
    "bfloat16": (0.15, 0.15),
    "float8_e4m3fn": (0.6, 0.6),
}
_EXACT = "every row of the target, all sampling options applied"
_SAMPLED = "20 logprobs per token of plain answers; all other tokens count as one"


def verify_all(subjects: Iterable[Subject], plan: Plan, name: str) -> Outcome:
    """Runs a plan.

    Args:
        subjects: One per method; each is used until the next is taken.
        plan: What to do.
        name: What is verified, in words.

    Raises:
        StartupError: A subject cannot be made.
        ConfigError: No rule fits any of the methods, so that nothing was verified.
    """
    run: _Run | None = None
    for subject in subjects:
        run = run or _Run(subject, plan)
        run.verify(subject)
    assert run is not None, "a plan has a method"
    outcome = run.outcome(name)
    if not any(row.rule for row in outcome.texts):
        reasons = "; ".join(dict.fromkeys(reason for *_, reason in outcome.refused))
        raise ConfigError(f"nothing is verified, since no rule of --rules fits: {reasons}")
    return outcome


class _Run:
    """What is known from the first subject on, and the rows so far."""

    def __init__(self, subject: Subject, plan: Plan) -> None:
        self._plan = plan
        self._base = SamplingParams(max_tokens=plan.max_tokens, seed=plan.seed)
        self._bars: list[_Bar] = []
        self._baseline: Baseline = take_baseline(subject, plan.prompts, self._base, self._bar)
        self._laws: list[tuple[Spot, CellLaw]] = []
        self._texts: list[TextRow] = []
        self._law_rows: list[LawRow] = []
        self._refused = self._not_served()
        spots, self._is_exact = self._spots(subject)
        self._bounds = self._make_bounds(subject, len(spots))
        self._texts += compare_texts(subject, None, self._baseline, self._bounds, self._bar)
        self._make_laws(subject, spots)

    def verify(self, subject: Subject) -> None:
        """Everything of one method."""
        for rule in self._plan.rules:
            reason = self._refusal(subject, rule)
            if reason is not None:
                self._refused.append((subject.method, f"the rule {rule}", reason))
                continue
            self._texts += compare_texts(subject, rule, self._baseline, self._bounds, self._bar)
            self._law_rows += self._hold(subject, rule)
        self._bar("", 0)

    def outcome(self, name: str) -> Outcome:
        """All rows."""
        return Outcome(
            subject=name,
            law_source=_EXACT if self._is_exact else _SAMPLED,
            bounds=self._bounds,
            texts=tuple(self._texts),
            laws=tuple(self._law_rows),
            refused=tuple(self._refused),
        )

    def _not_served(self) -> list[tuple[str, str, str]]:
        """Cases that plain decoding is refused.

        Raises:
            StartupError: No prompt is answered at all.
        """
        errors = [answer.error for answer in self._baseline.greedy.values()]
        if None not in errors:
            raise StartupError(f"no prompt is answered: {errors[0]}")
        found = {
            (item.case.name, item.ask.prompt.name): str(item.answers[0].error)
            for item in self._baseline.expected
            if item.is_refused
        }
        return [("plain decoding", f"{case} ({prompt})", error) for (case, prompt), error in found.items()]

    def _spots(self, subject: Subject) -> tuple[list[Spot], bool]:
        prompts = self._law_prompts()
        is_exact = subject.laws(Ask(prompts[0], self._base), [], 1.0) is not None
        cases = law_cases(all_options=is_exact)[: 1 if self._plan.quick else None]
        baseline = self._baseline
        return choose_spots(cases, prompts, baseline.greedy, baseline.hints), is_exact

    def _law_prompts(self) -> list[Prompt]:
        """Those that repeat themselves most, of those that are answered."""
        answered = [prompt for prompt in self._plan.prompts if not self._baseline.greedy[prompt.name].error]
        return by_repetition(answered, self._baseline.hints)[: 1 if self._plan.quick else 2]

    def _make_bounds(self, subject: Subject, num_spots: int) -> Bounds:
        plan = self._plan
        near_tie, tolerance = _BOUNDS.get(subject.precision, _BOUNDS["bfloat16"])
        # Plain draws are tested as well where the law is made of them.
        num_tests = num_spots * (len(plan.rules) * plan.num_methods + (not self._is_exact))
        return Bounds(
            near_tie=near_tie if plan.near_tie is None else plan.near_tie,
            tolerance=tolerance if plan.tolerance is None else plan.tolerance,
            false_alarm=plan.false_alarm,
            alarm_each=plan.false_alarm / max(1, num_tests),
        )

    def _make_laws(self, subject: Subject, spots: list[Spot]) -> None:
        """The exact laws; where they are made of plain answers, these are drawn twice as many and tested."""
        if self._is_exact:
            self._laws = [(spot, exact_law(subject, spot, self._plan.num_seeds)) for spot in spots]
            return
        on_done = self._bar("plain, laws", self._plan.num_seeds * len(spots))
        for spot in spots:
            params = with_tokens(replace(spot.ask.params, speculation=PLAIN))
            answers = draw(subject, spot, params, self._plan.num_seeds, on_done)
            self._laws.append((spot, sampled_law(spot, answers, self._plan.num_seeds)))
        self._law_rows += self._hold(subject, None)

    def _hold(self, subject: Subject, rule: Acceptance | None) -> list[LawRow]:
        return hold_against(subject, rule, self._laws, self._plan.num_seeds, self._bounds, self._bar)

    def _refusal(self, subject: Subject, rule: Acceptance) -> str | None:
        """Why a rule is not served; None if it is."""
        params = SamplingParams(max_tokens=NUM_TOKENS, seed=0, speculation=speculating(rule))
        [[answer]] = subject.answer([Ask(self._plan.prompts[0], params)], 1, lambda answer: None)
        return answer.error if answer.is_refused else None

    def _bar(self, title: str, total: int) -> OnDone:
        """A new progress bar; the one before is left as it is."""
        for bar in self._bars:
            bar.close()
        self._bars = [] if self._plan.quiet or not total else [_Bar(title, total)]
        return self._bars[0].add if self._bars else lambda answer: None


class _Bar:
    """A progress bar of answers."""

    def __init__(self, title: str, total: int) -> None:
        self._progress = Progress(f"{title:<32}", total, sys.stderr, time.perf_counter)
        self.add: OnDone = self._progress.add
        self.close = self._progress.close
