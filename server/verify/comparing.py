"""Two answers to one request, held against each other."""

from collections.abc import Sequence

from server.verify.chi_square import poisson_tail
from server.verify.results import Bounds, Divergence, Verdict
from server.verify.subject import Answer, Ask, Entry, Subject, Token, first_difference

_CONTEXT = 20
# Two texts that part for an unknown reason are a fault when near-ties alone would be as frequent more rarely.
_RARELY = 1e-4


def find_divergence(
    subject: Subject, ask: Ask, pair: tuple[Answer, Answer], choice: int, bounds: Bounds
) -> Divergence | None:
    """Where the second answer of a pair leaves the first; None if they are equal.

    Args:
        subject: Who said both.
        ask: What was asked for the second.
        pair: The plain answer, and the other.
        choice: Which of the request's answers.
        bounds: What is a near-tie.
    """
    expected, got = pair
    token = first_difference(expected.tokens, got.tokens) if expected.tokens and got.tokens else None
    if token is None and (expected.text, expected.ending) == (got.text, got.ending):
        return None
    character = first_difference(tuple(expected.text), tuple(got.text))
    gap = None
    if token is not None or character is not None:
        gap = subject.gap(ask, expected, got, choice)
    return Divergence(
        prompt=ask.prompt.name,
        choice=choice,
        batched=False,
        token=token,
        character=character,
        expected=_from(expected, character),
        got=_from(got, character),
        gap=gap,
        verdict=_verdict(expected, got, token, gap, bounds),
    )


def judge_unclear(divergences: Sequence[Divergence], num_tokens: int, bounds: Bounds) -> Verdict:
    """Whether so many divergences of unknown cause can be near-ties.

    The two best scores of a sampled token lie within b nats of each other with a probability of at most b, so
    over T tokens that happens b T times on average, and about as often as a Poisson variable says.
    """
    count = sum(item.verdict is Verdict.UNCLEAR for item in divergences)
    return Verdict.FAULT if poisson_tail(count, bounds.near_tie * num_tokens) < _RARELY else Verdict.UNCLEAR


def logprob_difference(expected: Sequence[Entry], got: Sequence[Entry]) -> float | None:
    """The largest difference between two rows of logprobs, up to the first token that differs.

    There the alternatives are still compared, since both come from the same row. An alternative that only
    one of the two lists is held against the least likely one of the other, which it must not exceed.
    """
    largest: float | None = None
    for ours, theirs in zip(expected, got, strict=False):
        differences = [_top_difference(ours.top, theirs.top), _top_difference(theirs.top, ours.top)]
        if ours.token == theirs.token:
            differences.append(abs(ours.logprob - theirs.logprob))
        largest = max(largest or 0.0, *differences)
        if ours.token != theirs.token:
            break
    return largest


def _top_difference(ours: Sequence[tuple[Token, float]], theirs: Sequence[tuple[Token, float]]) -> float:
    known = dict(theirs)
    if not known:
        return 0.0
    least = min(known.values())
    return max(
        (abs(value - known[token]) if token in known else max(0.0, value - least) for token, value in ours),
        default=0.0,
    )


def _verdict(expected: Answer, got: Answer, token: int | None, gap: float | None, bounds: Bounds) -> Verdict:
    if token is not None and token == min(len(expected.tokens), len(got.tokens)):
        # One goes on where the other ends, behind the same tokens: no choice between two tokens does that.
        return Verdict.FAULT
    if gap is not None:
        return Verdict.NEAR_TIE if abs(gap) <= bounds.near_tie else Verdict.FAULT
    is_same_text = expected.text == got.text
    return Verdict.FAULT if is_same_text or expected.tokens else Verdict.UNCLEAR


def _from(answer: Answer, character: int | None) -> str:
    if character is None:
        return f"({answer.ending})"
    return answer.text[character : character + _CONTEXT] or f"({answer.ending})"
