"""What is verified: something that answers prompts, with speculation or without."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from engine.sampling_params import SamplingParams
from server.bench.prompts import Prompt
from server.bench.records import DraftCounts

Token = int | str
"""An id in process; over HTTP, where ids are not told, a token's text or bytes."""

History = tuple[Token, ...]
"""The first tokens of an answer."""

Law = Mapping[Token, float]
"""Probabilities of the likeliest tokens; what is missing to 1 is that of all others together."""


NO_DRAFTS = DraftCounts(drafted=0, accepted=0, steps=None)


@dataclass(frozen=True, slots=True)
class Entry:
    """What is reported for one token of an answer.

    Attributes:
        token: The token.
        text: Its text.
        logprob: Natural logarithm of its probability, as the model has it before any option acts.
        top: The likeliest tokens and their logprobs, the likeliest first.
    """

    token: Token
    text: str
    logprob: float
    top: tuple[tuple[Token, float], ...]


@dataclass(frozen=True, slots=True)
class Answer:
    """One answer, or why there is none.

    Attributes:
        text: Its text.
        tokens: Its tokens; empty where they are not told.
        entries: One per token, if logprobs were asked for.
        ending: The finish reason and what stopped it, in words.
        drafts: What speculation did for it.
        num_tokens: Its length.
        error: Why there is none; None if there is one.
        is_refused: The error is a refusal of the request as it stands, not a failure.
    """

    text: str = ""
    tokens: History = ()
    entries: tuple[Entry, ...] = ()
    ending: str = ""
    drafts: DraftCounts = NO_DRAFTS
    num_tokens: int = 0
    error: str | None = None
    is_refused: bool = False


@dataclass(frozen=True, slots=True)
class Ask:
    """One request.

    Attributes:
        prompt: What is asked.
        params: How, its speculation included.
        n: Answers wanted.
        begun: Tokens of an answer that follow the prompt as a part of it; in process only.
    """

    prompt: Prompt
    params: SamplingParams
    n: int = 1
    begun: History = ()


OnDone = Callable[[Answer], None]


class Subject(Protocol):
    """An engine or a server with one speculation method."""

    @property
    def method(self) -> str:
        """The method's name."""

    @property
    def precision(self) -> str:
        """Type whose rounding decides how far a batch may lead, such as float32; empty where it is not told.

        That of the activations, or of keys and values where these are rounded further.
        """

    @property
    def at_once(self) -> int:
        """Requests that are answered together in a batch."""

    def answer(self, asks: Sequence[Ask], at_once: int, on_done: OnDone) -> list[tuple[Answer, ...]]:
        """Answers all, so many at once; per request its n answers. What goes wrong is in the answers."""

    def gap(self, ask: Ask, expected: Answer, got: Answer, choice: int) -> float | None:
        """How close the call was at the first token in which two answers differ.

        Returns:
            By how many nats the expected token leads the other; None where that cannot be told.
        """

    def laws(self, ask: Ask, histories: Sequence[History], least: float) -> list[Law] | None:
        """The exact law of the token behind each history; None where only samples can tell.

        Args:
            ask: Of which request.
            histories: Beginnings of its answer.
            least: Tokens less likely than that may be left out.
        """


def first_difference(expected: History, got: History) -> int | None:
    """The first place in which two rows of tokens differ; None if they are equal."""
    if expected == got:
        return None
    shorter = min(len(expected), len(got))
    return next((place for place in range(shorter) if expected[place] != got[place]), shorter)
