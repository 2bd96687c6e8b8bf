"""Two answers, where they part, and what that means."""

from dataclasses import replace

import pytest

from engine.sampling_params import SamplingParams
from server.verify.comparing import find_divergence, judge_unclear, logprob_difference
from server.verify.results import Bounds, Divergence, Verdict
from server.verify.subject import Answer, Ask
from tests.server.verify.subjects import PROMPT, ScriptedSubject, entry, spelled

BOUNDS = Bounds(near_tie=1e-4, tolerance=1e-5, false_alarm=0.001, alarm_each=0.0001)
ASK = Ask(PROMPT, SamplingParams(temperature=0.0))


def parted(expected: Answer, got: Answer, gap: float | None = None) -> Divergence | None:
    subject = ScriptedSubject(lambda ask, choice: expected, gaps=gap)
    return find_divergence(subject, ASK, (expected, got), 0, BOUNDS)


def test_equal_answers_have_none() -> None:
    assert parted(spelled("abc"), spelled("abc")) is None
    assert parted(spelled("abc"), spelled("abc", drafted=9, logprob=None)) is None


@pytest.mark.parametrize(
    ("gap", "verdict"),
    [(5e-5, Verdict.NEAR_TIE), (-5e-5, Verdict.NEAR_TIE), (2e-4, Verdict.FAULT), (None, Verdict.FAULT)],
)
def test_the_gap_decides(gap: float | None, verdict: Verdict) -> None:
    found = parted(spelled("one two"), spelled("one too"), gap)
    assert found is not None
    assert (found.token, found.character, found.expected, found.got) == (5, 5, "wo", "oo")
    assert (found.gap, found.verdict) == (gap, verdict)


@pytest.mark.parametrize(("expected", "got"), [("abc", "abcd"), ("abcd", "abc")])
def test_one_that_goes_on_is_a_fault_whatever_the_gap(expected: str, got: str) -> None:
    found = parted(spelled(expected), spelled(got), 0.0)
    assert found is not None
    assert (found.token, found.verdict) == (3, Verdict.FAULT)
    assert "(length)" in (found.expected, found.got)


def test_another_ending_is_a_fault() -> None:
    found = parted(spelled("abc", ending="stop"), spelled("abc", ending="length"), 0.0)
    assert found is not None
    assert (found.token, found.character, found.verdict) == (None, None, Verdict.FAULT)
    assert (found.expected, found.got) == ("(stop)", "(length)")


def test_the_same_tokens_with_another_text_are_a_fault() -> None:
    found = parted(spelled("abc"), replace(spelled("abc"), text="ab"))
    assert found is not None
    assert (found.token, found.character, found.verdict) == (None, 2, Verdict.FAULT)


def test_texts_alone_that_part_for_an_unknown_reason_are_unclear() -> None:
    expected, got = (replace(spelled(text, logprob=None), tokens=()) for text in ("abc", "abd"))
    found = parted(expected, got)
    assert found is not None
    assert found.verdict is Verdict.UNCLEAR
    # In a hundred tokens one near-tie of 1e-4 nats is rare but possible; two are not.
    assert judge_unclear([found], 100, BOUNDS) is Verdict.UNCLEAR
    assert judge_unclear([found, found], 100, BOUNDS) is Verdict.FAULT


def test_logprobs_are_compared_entry_by_entry() -> None:
    ours = spelled("abc").entries
    assert logprob_difference(ours, ours) == 0.0
    moved = (*ours[:2], entry("c", -0.5, -1.5003))
    assert logprob_difference(ours, moved) == pytest.approx(0.0003)
    assert logprob_difference(ours, (*ours[:2], entry("c", -0.501))) == pytest.approx(0.001)
    assert logprob_difference(ours, ()) is None


def test_logprobs_behind_the_first_other_token_do_not_count() -> None:
    ours = spelled("abc").entries
    theirs = (ours[0], replace(ours[1], token=120, logprob=-9.0), entry("c", -7.0))
    assert logprob_difference(ours, theirs) == 0.0


def test_an_alternative_that_one_lists_is_held_against_the_others_least() -> None:
    ours = replace(entry("a"), top=((1, -1.0), (2, -2.0)))
    theirs = replace(entry("a"), top=((1, -1.0), (3, -2.000001)))
    assert logprob_difference([ours], [theirs]) == pytest.approx(1e-6)
    assert logprob_difference([ours], [replace(ours, top=((1, -1.0), (3, -2.5)))]) == pytest.approx(0.5)
