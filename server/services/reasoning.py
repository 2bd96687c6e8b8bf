"""Thoughts apart from the answer: <think> ... </think> of models that reason, piece by piece."""

from collections.abc import Iterable
from dataclasses import dataclass

from server.marks import num_begun

OPENING, CLOSING = "<think>", "</think>"


def has_thoughts(chat_template: str) -> bool:
    """Whether a model's template speaks of thoughts."""
    return CLOSING in chat_template


def num_thought_tokens(spelling: Iterable[bytes]) -> int:
    """How many of an answer's tokens are its thoughts, the closing tag included.

    Args:
        spelling: The bytes of each token of an answer that begins with thoughts; all count if they never end.
    """
    closing, end = CLOSING.encode(), b""
    count = 0
    for token in spelling:
        end += token
        count += 1
        if closing in end:
            break
        end = end[-len(closing) :]
    return count


@dataclass(frozen=True, slots=True)
class Split:
    """What a piece of text is.

    Attributes:
        reasoning: The thoughts in it.
        content: What is said.
    """

    reasoning: str = ""
    content: str = ""


class ReasoningSplitter:
    """Splits an answer that may begin with thoughts.

    Thoughts stand at the very beginning, between tags, or begin there if the prompt has opened the tag. White
    space behind either tag belongs to neither part. What may become a tag is held back.

    Args:
        is_open: The prompt ends with the opening tag.
    """

    def __init__(self, *, is_open: bool) -> None:
        self._is_thinking = is_open
        self._may_open = not is_open
        self._strips = is_open
        self._held = ""

    def feed(self, text: str) -> Split:
        """Takes the next piece."""
        text, self._held = self._held + text, ""
        if self._may_open:
            begin = text.lstrip()
            if OPENING.startswith(begin[: len(OPENING)]) and len(begin) < len(OPENING):
                self._held = text
                return Split()
            self._may_open = False
            if begin.startswith(OPENING):
                self._is_thinking = self._strips = True
                text = begin.removeprefix(OPENING)
        if not self._is_thinking:
            return Split(content=self._stripped(text))
        thought, closing, rest = text.partition(CLOSING)
        if closing:
            thought = self._stripped(thought)
            self._is_thinking, self._strips = False, True
            return Split(thought, self._stripped(rest))
        end = len(thought) - num_begun(thought, CLOSING)
        self._held = thought[end:]
        return Split(reasoning=self._stripped(thought[:end]))

    def finish(self) -> Split:
        """What was held back, when the answer ends."""
        held, self._held = self._held, ""
        return Split(reasoning=held) if self._is_thinking else Split(content=held)

    def _stripped(self, text: str) -> str:
        if self._strips:
            text = text.lstrip()
            self._strips = not text
        return text
