"""AnswerReader: from the engine's outputs to what an answer says: thoughts, text and calls, in order."""

from dataclasses import dataclass

from engine.outputs import RequestOutput
from server.services.generation import Choice
from server.services.reasoning import ReasoningSplitter
from server.tools.parser import CallDelta
from server.tools.plan import ToolPlan


@dataclass(frozen=True, slots=True)
class Thought:
    """Text of a thought."""

    text: str


@dataclass(frozen=True, slots=True)
class Content:
    """Text of what is said."""

    text: str


Piece = Thought | Content | CallDelta


class AnswerReader:
    """Reads the outputs of one choice; the pieces, joined, do not depend on how many tokens come at once.

    Args:
        choice: Which.
        plan: How calls in it are read; None takes all of the text as content.
        reasoning: Takes thoughts apart; None leaves them in the content.
    """

    def __init__(
        self, choice: Choice, plan: ToolPlan | None = None, reasoning: ReasoningSplitter | None = None
    ) -> None:
        self.choice = choice
        self._plan = plan
        self._reasoning = reasoning
        self._parser = plan.parser() if plan is not None else None

    @property
    def reads_calls(self) -> bool:
        """Whether there may be calls in the answer."""
        return self._parser is not None

    @property
    def num_calls(self) -> int:
        """Calls that have begun."""
        return 0 if self._parser is None else self._parser.num_calls

    @property
    def is_in_call(self) -> bool:
        """Whether what was read ends within a call."""
        return self._parser is not None and self._parser.is_in_call

    def call_id(self, number: int) -> str:
        """The id of one of its calls."""
        assert self._plan is not None, "there are no calls without tools"
        return self._plan.call_id(self.choice, number)

    def read(self, output: RequestOutput) -> list[Piece]:
        """What an output adds."""
        is_last = output.finish_reason is not None
        thoughts, text = self._split(output.text, is_last=is_last)
        pieces: list[Piece] = [Thought(thoughts)] if thoughts else []
        if self._parser is None:
            return [*pieces, Content(text)] if text else pieces
        parsed = self._parser.feed(text).pieces
        if is_last:
            parsed += self._parser.finish().pieces
        return pieces + [Content(piece) if isinstance(piece, str) else piece for piece in parsed]

    def _split(self, text: str, *, is_last: bool) -> tuple[str, str]:
        """The thoughts of a text, and the rest; thoughts come first in an answer, so first in a text, too."""
        if self._reasoning is None:
            return "", text
        parts = [self._reasoning.feed(text)]
        if is_last:
            parts.append(self._reasoning.finish())
        return "".join(part.reasoning for part in parts), "".join(part.content for part in parts)
