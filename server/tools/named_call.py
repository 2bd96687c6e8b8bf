"""NamedCallReader: a call with the function's name in front of its arguments, read character by character."""

from collections.abc import Collection

from server.tools.call_reader import CallPiece

_MAX_ID = 64


class NamedCallReader:
    """Reads `name[ARGS]{...}`, and `name[CALL_ID]id[ARGS]{...}`, whose id is left out.

    Args:
        names: The functions that there are.
        arguments_mark: What stands in front of the arguments.
        id_mark: What stands in front of an id.

    Attributes:
        has_begun: The name is known, and arguments follow: from here on it is a call, whatever comes.
        num_read: Characters read so far.
    """

    def __init__(self, names: Collection[str], arguments_mark: str, id_mark: str) -> None:
        self.has_begun = False
        self.num_read = 0
        self._names = names
        self._arguments_mark = arguments_mark
        self._id_mark = id_mark
        self._head = ""  # What stands in front of the arguments.
        self._name = ""  # The function, once the mark behind it has come.
        self._depth = 0
        self._is_in_string = False
        self._is_escaped = False

    def read(self, text: str) -> CallPiece:
        """Takes the next characters, up to the end of the arguments."""
        piece = CallPiece()
        for char in text:
            piece.num_read += 1
            self.num_read += 1
            if self.has_begun:
                self._in_arguments(char, piece)
            elif self._name:
                self._behind_mark(char, piece)
            else:
                self._in_head(char, piece)
            if piece.is_broken or piece.is_complete:
                break
        return piece

    def _in_head(self, char: str, piece: CallPiece) -> None:
        self._head += char
        head = self._head.removesuffix(self._arguments_mark)
        if len(head) < len(self._head):
            name, _, _ = head.partition(self._id_mark)
            if name in self._names:
                self._name = name
                return
        piece.is_broken = not any(self._may_call(name) for name in self._names)

    def _may_call(self, name: str) -> bool:
        """Whether what has come may be the beginning of a call of a function."""
        if len(self._head) <= len(name):
            return name.startswith(self._head)
        if not self._head.startswith(name):
            return False
        rest = self._head[len(name) :]
        if rest.startswith(self._id_mark):
            return len(rest) <= len(self._id_mark) + _MAX_ID + len(self._arguments_mark)
        return self._arguments_mark.startswith(rest) or self._id_mark.startswith(rest)

    def _behind_mark(self, char: str, piece: CallPiece) -> None:
        if char == "{":
            self.has_begun = True
            piece.name = self._name
            self._in_arguments(char, piece)
        else:
            piece.is_broken = not char.isspace()

    def _in_arguments(self, char: str, piece: CallPiece) -> None:
        piece.arguments += char
        if self._is_escaped:
            self._is_escaped = False
        elif self._is_in_string:
            self._is_escaped = char == "\\"
            self._is_in_string = char != '"'
        elif char == '"':
            self._is_in_string = True
        elif char in "{[":
            self._depth += 1
        elif char in "}]":
            self._depth -= 1
            piece.is_complete = not self._depth
