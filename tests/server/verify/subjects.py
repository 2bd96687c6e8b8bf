"""Stand-ins for what is verified: answers written down, with speculation and without."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from server.bench.prompts import Prompt
from server.bench.records import DraftCounts
from server.verify.subject import Answer, Ask, Entry, History, Law, OnDone

PROMPT = Prompt("a", "text", None, "say it")

Say = Callable[[Ask, int], Answer]


@dataclass
class ScriptedSubject:
    """Says what a script says.

    Attributes:
        say: The answer to a request's choice.
        gaps: What `gap` finds.
        asked: Everything that was asked, and how many at once.
    """

    say: Say
    gaps: float | None = None
    method: str = "scripted"
    precision: str = "float32"
    at_once: int = 4
    asked: list[tuple[Ask, int]] = field(default_factory=list)

    def answer(self, asks: Sequence[Ask], at_once: int, on_done: OnDone) -> list[tuple[Answer, ...]]:
        self.asked += [(ask, at_once) for ask in asks]
        said = [tuple(self.say(ask, choice) for choice in range(ask.n)) for ask in asks]
        for answers in said:
            for answer in answers:
                on_done(answer)
        return said

    def gap(self, ask: Ask, expected: Answer, got: Answer, choice: int) -> float | None:
        return self.gaps

    def laws(self, ask: Ask, histories: Sequence[History], least: float) -> list[Law] | None:
        return [{0: 0.5, 1: 0.5} for _ in histories]


def spelled(text: str, *, drafted: int = 0, ending: str = "length", logprob: float | None = -0.5) -> Answer:
    """An answer of a token per letter."""
    entries = () if logprob is None else tuple(entry(letter, logprob) for letter in text)
    return Answer(
        text=text,
        tokens=tuple(text.encode()),
        entries=entries,
        ending=ending,
        drafts=DraftCounts(drafted, drafted // 2, None),
        num_tokens=len(text),
    )


def entry(letter: str, logprob: float = -0.5, second: float = -1.5) -> Entry:
    return Entry(ord(letter), letter, logprob, ((ord(letter), logprob), (ord("!"), second)))
