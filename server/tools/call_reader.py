"""CallReader: one JSON object that calls a function, read character by character."""

import json
from collections.abc import Collection
from dataclasses import dataclass

_NAME = "name"
_ARGUMENTS = ("arguments", "parameters")


@dataclass(slots=True)
class CallPiece:
    """What a piece of text brought.

    Attributes:
        num_read: Characters taken of it.
        name: The function, once it is known.
        arguments: New text of its arguments.
        is_complete: The object has ended.
        is_broken: It is no call.
    """

    num_read: int = 0
    name: str | None = None
    arguments: str = ""
    is_complete: bool = False
    is_broken: bool = False


class CallReader:
    """Reads `{"name": ..., "arguments": {...}}`, in any order and with other keys beside.

    Arguments come as they are written, and only once the name is known. Arguments that are a string with JSON
    in it, as the API itself has them, are unpacked.

    Args:
        names: The functions that there are.

    Attributes:
        has_begun: The name is known: from here on it is a call, whatever follows.
        num_read: Characters read so far.
    """

    def __init__(self, names: Collection[str]) -> None:
        self.has_begun = False
        self.num_read = 0
        self._names = names
        self._depth = 0
        self._is_in_string = False
        self._is_escaped = False
        self._token = ""  # The key or value of the object itself that is being read.
        self._key: str | None = None
        self._held = ""  # Arguments that came before the name.
        self._has_arguments = False

    def read(self, text: str) -> CallPiece:
        """Takes the next characters, up to the end of the object."""
        piece = CallPiece()
        for char in text:
            piece.num_read += 1
            self.num_read += 1
            self._take(char, piece)
            if piece.is_broken or piece.is_complete:
                break
        return piece

    def _take(self, char: str, piece: CallPiece) -> None:
        if self._is_in_string:
            self._in_string(char)
            self._append(char, piece)
        elif char == '"' and self._depth:
            self._is_in_string = True
            self._append(char, piece)
        elif self._depth == 0:
            self._open(char, piece)
        elif char in "{[":
            self._depth += 1
            self._append(char, piece)
        elif char in "}]" and self._depth > 1:
            self._depth -= 1
            self._append(char, piece)
        elif self._depth > 1:
            self._append(char, piece)
        else:
            self._between(char, piece)

    def _in_string(self, char: str) -> None:
        if self._is_escaped:
            self._is_escaped = False
        elif char == "\\":
            self._is_escaped = True
        elif char == '"':
            self._is_in_string = False

    def _open(self, char: str, piece: CallPiece) -> None:
        if char == "{":
            self._depth = 1
        elif not char.isspace():
            piece.is_broken = True

    def _between(self, char: str, piece: CallPiece) -> None:
        """A character of the object itself."""
        if char == ":" and self._key is None:
            key = _value(self._token)
            self._token = ""
            if isinstance(key, str):
                self._key = key
            else:
                piece.is_broken = not self.has_begun
        elif char == ",":
            self._end_value(piece)
        elif char == "}":
            self._end_value(piece)
            self._end_object(piece)
        else:
            self._append(char, piece)

    def _append(self, char: str, piece: CallPiece) -> None:
        if self._key in _ARGUMENTS and self._streams(char):
            self._give(char, piece)
        else:
            self._token += char

    def _streams(self, char: str) -> bool:
        """Whether the value is passed on as it comes: an object is, a string of JSON is not."""
        if self._has_arguments:
            return not self._token and (self._depth > 1 or char in "}]")
        if self._token.strip() or char != "{":
            return False
        self._has_arguments = True
        self._token = ""
        return True

    def _give(self, char: str, piece: CallPiece) -> None:
        if self.has_begun:
            piece.arguments += char
        else:
            self._held += char

    def _end_value(self, piece: CallPiece) -> None:
        key, text = self._key, self._token
        self._key, self._token = None, ""
        if key is None:
            # Behind the comma that never came, or an empty object.
            piece.is_broken = not self.has_begun and bool(text.strip())
        elif key == _NAME and not self.has_begun:
            self._begin(_value(text), piece)
        elif key in _ARGUMENTS and not self._has_arguments:
            value = _value(text)
            if isinstance(value, str):
                self._has_arguments = True
                self._give(value, piece)

    def _begin(self, name: object, piece: CallPiece) -> None:
        if not isinstance(name, str) or name not in self._names:
            piece.is_broken = True
            return
        self.has_begun = True
        piece.name = name
        piece.arguments, self._held = self._held, ""

    def _end_object(self, piece: CallPiece) -> None:
        if not self.has_begun:
            piece.is_broken = True
            return
        piece.is_complete = True
        if not self._has_arguments:
            piece.arguments += "{}"


def _value(text: str) -> object:
    """A JSON value; None for what is none."""
    try:
        found: object = json.loads(text)
    except ValueError:
        return None
    return found
