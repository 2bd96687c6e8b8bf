"""ToolCallParser: an answer's text, as it comes, into content and calls."""

from collections.abc import Collection
from dataclasses import dataclass, field

from server.marks import num_begun
from server.tools.call_reader import CallPiece, CallReader
from server.tools.formats import ToolFormat
from server.tools.named_call import NamedCallReader

_SPACE = " \t\r\n"


@dataclass(slots=True)
class CallDelta:
    """What is new of one call.

    Attributes:
        index: Which call of the answer.
        name: Its function, at its beginning.
        arguments: Text to append to its arguments.
    """

    index: int
    name: str | None = None
    arguments: str = ""


@dataclass(slots=True)
class Parsed:
    """What a piece of text brought.

    Attributes:
        pieces: Content and what is new of calls, in the order of the text.
    """

    pieces: list[str | CallDelta] = field(default_factory=list)

    @property
    def content(self) -> str:
        """All content."""
        return "".join(piece for piece in self.pieces if isinstance(piece, str))

    @property
    def calls(self) -> list[CallDelta]:
        """All that is new of calls."""
        return [piece for piece in self.pieces if isinstance(piece, CallDelta)]

    def say(self, content: str) -> None:
        """Adds content."""
        if content:
            self.pieces.append(content)


class ToolCallParser:
    """Reads one answer, in pieces of any length; the pieces' deltas joined do not depend on where they end.

    What looks like a call and is none (broken JSON, a function that does not exist) is content, as the model
    wrote it. White space around calls belongs to nobody. A call that the answer's end cuts has the arguments
    that were written.

    Args:
        tool_format: How calls are written.
        names: The functions that there are.
        max_calls: Calls of an answer at most; what comes behind them is dropped. None is no limit.
    """

    def __init__(self, tool_format: ToolFormat, names: Collection[str], max_calls: int | None = None) -> None:
        self._format = tool_format
        self._names = names
        self._max_calls = max_calls
        self._text = ""  # What is not understood yet.
        self._raw = ""  # The text of a call in the making, from its mark on, while it could prove to be none.
        self._reader: CallReader | NamedCallReader | None = None
        self._is_in_list = False
        self._is_plain = False  # Nothing but content comes.
        self._is_behind_call = False  # Nothing has come since a call but space.
        self._num_calls = 0

    @property
    def num_calls(self) -> int:
        """Calls that have begun."""
        return self._num_calls

    @property
    def is_in_call(self) -> bool:
        """Whether the text ends within a call."""
        return self._reader is not None

    def feed(self, text: str) -> Parsed:
        """Takes the next piece of the answer."""
        self._text += text
        return self._read(is_last=False)

    def finish(self) -> Parsed:
        """What the answer's end settles."""
        return self._read(is_last=True)

    def _read(self, *, is_last: bool) -> Parsed:
        parsed = Parsed()
        while self._step(parsed, is_last):
            pass
        if is_last and self._reader is not None and not self._reader.has_begun:
            self._give_up(parsed)
        return parsed

    def _step(self, parsed: Parsed, is_last: bool) -> bool:
        """Understands one more thing; False if there is nothing to understand yet."""
        if self._reader is not None:
            return self._read_call(self._reader, parsed)
        if self._max_calls is not None and self._num_calls >= self._max_calls:
            self._text = ""
            return False
        if self._is_in_list or (self._num_calls and not self._is_plain):
            return self._read_between(parsed, is_last)
        if self._is_plain or self._format.opening:
            return self._read_content(parsed, is_last)
        return self._read_beginning(parsed, is_last)

    def _read_content(self, parsed: Parsed, is_last: bool) -> bool:
        """Content up to a mark, or to what may be the beginning of one and the space before it."""
        if self._is_behind_call:
            self._text = self._text.lstrip(_SPACE)
        mark = self._format.opening
        place = self._text.find(mark) if mark else -1
        if place >= 0:
            content = self._text[:place].rstrip(_SPACE)
            parsed.say(content)
            self._raw = self._text[len(content) : place + len(mark)]
            self._text = self._text[place + len(mark) :]
            self._reader = CallReader(self._names)
            return True
        end = len(self._text)
        if mark and not is_last:
            end -= num_begun(self._text, mark)
            end = len(self._text[:end].rstrip(_SPACE))
        parsed.say(self._text[:end])
        self._text = self._text[end:]
        self._is_behind_call = self._is_behind_call and not end
        return False

    def _read_beginning(self, parsed: Parsed, is_last: bool) -> bool:
        """Without marks, the first character that is no space says whether the answer is calls."""
        start = self._text.lstrip(_SPACE)
        if not start:
            if is_last:
                parsed.say(self._text)
                self._text = ""
            return False
        if start[0] in "{[":
            self._raw, self._text = self._text[: -len(start)], start
            self._reader = CallReader(self._names)
        else:
            self._is_plain = True
        return True

    def _read_between(self, parsed: Parsed, is_last: bool) -> bool:
        """Behind a call: what ends it, what separates it from the next one, or content again."""
        rest = self._text.lstrip(_SPACE)
        closing = "]" if self._is_in_list else self._format.closing
        if closing.startswith(rest) and rest != closing:
            # Nothing, or a part of the closing mark.
            self._text = "" if is_last else self._text
            return False
        if closing and rest.startswith(closing):
            self._text, self._is_in_list = rest[len(closing) :], False
            self._is_plain = bool(self._format.opening)
            return True
        following = rest.lstrip(",;" + _SPACE)
        if not self._format.closing and (following[:1] == "{" or not following):
            if following:
                self._raw, self._text = rest[: -len(following)], following
                self._reader = CallReader(self._names)
            elif is_last:
                self._text = ""
            return bool(following)
        self._text, self._is_plain, self._is_in_list = rest, True, False
        return True

    def _read_call(self, reader: CallReader | NamedCallReader, parsed: Parsed) -> bool:
        if not reader.num_read:
            self._read_list_opening()
        if not self._text:
            return False
        mark = self._format.arguments_mark
        if mark and not reader.num_read and not self._is_in_list and self._text[0] != "{":
            reader = self._reader = NamedCallReader(self._names, mark, self._format.id_mark)
        piece = reader.read(self._text)
        self._raw += self._text[: piece.num_read]
        self._text = self._text[piece.num_read :]
        if piece.is_broken:
            self._give_up(parsed)
            return True
        self._add(piece, parsed)
        if piece.is_complete:
            self._reader, self._raw = None, ""
            self._is_behind_call, self._is_plain = True, False
            return True
        return False

    def _read_list_opening(self) -> None:
        """The space in front of a call, and the bracket where calls stand in a list."""
        start = self._text.lstrip(_SPACE)
        if start[:1] == "[" and not self._is_in_list:
            self._is_in_list, start = True, start[1:]
        self._raw += self._text[: len(self._text) - len(start)]
        self._text = start

    def _add(self, piece: CallPiece, parsed: Parsed) -> None:
        if piece.name is not None:
            self._num_calls += 1
            parsed.pieces.append(CallDelta(self._num_calls - 1, piece.name, piece.arguments))
        elif piece.arguments:
            parsed.pieces.append(CallDelta(self._num_calls - 1, arguments=piece.arguments))

    def _give_up(self, parsed: Parsed) -> None:
        """What was taken for a call is content."""
        parsed.say(self._raw)
        self._raw, self._reader, self._is_in_list, self._is_plain = "", None, False, True
