"""What came of it, as rows of the report."""

from dataclasses import dataclass
from enum import StrEnum


class Verdict(StrEnum):
    """What a comparison says.

    EQUAL: the same. NEAR_TIE: texts part where two tokens are as good as equal, which rounding decides.
    UNCLEAR: texts part where it cannot be told how close the call was, no oftener than near-ties would make
    them. HOLDS: the draws fit the law. ONE_OUTCOME: only one thing can come, so nothing was tested. TOO_FLAT:
    they fit, but the draws were too few for the law of a token that can be a draft. NO_DRAFTS: they fit, but
    no draft was checked. FAULT: none of these.
    """

    EQUAL = "equal"
    NEAR_TIE = "near-tie"
    UNCLEAR = "unclear"
    HOLDS = "holds"
    ONE_OUTCOME = "one outcome"
    TOO_FLAT = "too flat"
    NO_DRAFTS = "no drafts"
    FAULT = "FAULT"


@dataclass(frozen=True, slots=True)
class Divergence:
    """Where two answers part.

    Attributes:
        prompt: The prompt's name.
        choice: Which of its answers.
        batched: Whether the other answer was given in a batch.
        token: The first token that differs, counted from 0; None where only texts are known.
        character: The first character that differs; None where the texts are equal.
        expected: The plain answer from there on, a few characters of it, or how it ended.
        got: The other one.
        gap: By how many nats the expected token leads the other; None where that cannot be told.
        verdict: NEAR_TIE, UNCLEAR or FAULT.
    """

    prompt: str
    choice: int
    batched: bool
    token: int | None
    character: int | None
    expected: str
    got: str
    gap: float | None
    verdict: Verdict


@dataclass(frozen=True, slots=True)
class Equality:
    """How many answers equal the plain ones."""

    equal: int
    total: int


@dataclass(frozen=True, slots=True)
class TextRow:
    """One case of one method under one rule, against plain decoding of each prompt alone.

    Attributes:
        method: The method; "plain" for plain decoding in a batch.
        rule: The acceptance rule; empty for plain decoding.
        case: The sampling options.
        alone: Answers that were given alone.
        batched: Answers that were given in a batch.
        divergences: Where they part.
        logprob_difference: The largest between two logprobs of the same place; None where none were compared.
        drafted: Draft tokens checked.
        accepted: Those that stood.
        errors: Requests that failed, in words.
        verdict: What all that says.
    """

    method: str
    rule: str
    case: str
    alone: Equality
    batched: Equality
    divergences: tuple[Divergence, ...]
    logprob_difference: float | None
    drafted: int
    accepted: int
    errors: tuple[str, ...]
    verdict: Verdict


@dataclass(frozen=True, slots=True)
class LawRow:
    """One test of a distribution.

    Attributes:
        method: The method; "plain" for plain decoding.
        rule: The acceptance rule; empty for plain decoding.
        case: The sampling options.
        prompt: The prompt's name.
        position: Tokens of an answer that the prompt was given with.
        num_draws: Answers drawn, one seed each.
        num_cells: Cells of the law.
        p_value: How often chance alone would show as much.
        drafted: Draft tokens checked.
        accepted: Those that stood.
        errors: Requests that failed, in words.
        verdict: What that says.
    """

    method: str
    rule: str
    case: str
    prompt: str
    position: int
    num_draws: int
    num_cells: int
    p_value: float
    drafted: int
    accepted: int
    errors: tuple[str, ...]
    verdict: Verdict


@dataclass(frozen=True, slots=True)
class Bounds:
    """What is a fault.

    Attributes:
        near_tie: Nats that two tokens may be apart where rounding may decide between them.
        tolerance: The largest difference between two logprobs of the same place.
        false_alarm: Chance that one or more of all tests of distributions fail though nothing is wrong.
        alarm_each: The same for each of them (Bonferroni).
    """

    near_tie: float
    tolerance: float
    false_alarm: float
    alarm_each: float


@dataclass(frozen=True, slots=True)
class Outcome:
    """All that was found.

    Attributes:
        subject: What was verified, in words.
        law_source: Where the exact law comes from, in words.
        bounds: What is a fault.
        texts: Comparisons with plain decoding.
        laws: Tests of distributions.
        refused: What is not served: by whom, what, and the reason.
    """

    subject: str
    law_source: str
    bounds: Bounds
    texts: tuple[TextRow, ...]
    laws: tuple[LawRow, ...]
    refused: tuple[tuple[str, str, str], ...]

    @property
    def num_faults(self) -> int:
        """Rows that say FAULT."""
        verdicts = [*(row.verdict for row in self.texts), *(row.verdict for row in self.laws)]
        return verdicts.count(Verdict.FAULT)
