"""Where two texts of one prompt part, and how close the call was."""

from collections.abc import Sequence
from dataclasses import dataclass

from server.bench.asking import Question
from server.bench.client import BenchClient, TokenChoice
from server.bench.paired import Pair

MOST_LOOKUPS = 10

_CONTEXT = 24


@dataclass(frozen=True, slots=True)
class Divergence:
    """Two texts that differ.

    Attributes:
        prompt: The prompt's name.
        place: The first character that differs.
        candidate: The candidate's text from there on, a few characters of it.
        baseline: The baseline's.
        token: The baseline's token there, its rival, and by how many nats it leads; None where its server
            gives no logprobs, the token was drawn at random, or many texts differ.
    """

    prompt: str
    place: int
    candidate: str
    baseline: str
    token: tuple[str, str, float] | None


async def explain(
    baseline: BenchClient, questions: Sequence[Question], pairs: Sequence[Pair]
) -> tuple[Divergence, ...]:
    """The pairs whose texts differ; the first few greedy ones are looked up in the baseline's logprobs.

    Floating-point sums depend on how many rows a matrix product has, so two ways of computing one model
    may part where the best two tokens nearly tie. A wide lead there means that one of the two is wrong.
    """
    found: list[Divergence] = []
    for question, pair in zip(questions, pairs, strict=True):
        place = pair.divergence
        if place is None or not pair.is_whole:
            continue
        # A look-up costs a whole answer, and two models that have nothing in common differ everywhere.
        worth_it = question.body["temperature"] == 0 and len(found) < MOST_LOOKUPS
        choices = await baseline.token_choices(question) if worth_it else []
        found.append(
            Divergence(
                prompt=pair.prompt,
                place=place,
                candidate=pair.candidate.text[place : place + _CONTEXT],
                baseline=pair.baseline.text[place : place + _CONTEXT],
                token=_token_at(place, choices, pair.baseline.text),
            )
        )
    return tuple(found)


def _token_at(place: int, choices: Sequence[TokenChoice], text: str) -> tuple[str, str, float] | None:
    """The choice at a character, if the choices spell the text up to there."""
    end = 0
    for choice in choices:
        start, end = end, end + len(choice.token)
        if not text[start:].startswith(choice.token):
            return None
        if end > place and len(choice.best) == 2:
            (first, lead), (second, rest) = choice.best
            return first, second, lead - rest
    return None
