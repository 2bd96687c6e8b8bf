"""JSON read in pieces, for bodies so large that a parser in C would keep every other thread waiting.

Such a parser holds the interpreter's lock from the first byte to the last: for some megabytes of small lists
that is a second, in which the event loop stands still whatever thread it happens on. Here no piece of work
between two chances to hand the lock over is longer than PIECE_CHARACTERS, a single string excepted, which is
copied and not taken apart.
"""

import json
import re
from typing import Any

PIECE_CHARACTERS = 1 << 16
MAX_DEPTH = 200
MAX_CONTAINERS = 100_000

_SPACE = re.compile(r"[ \t\r\n]*")
_STRING = r'"(?:[^"\\]++|\\.)*+"'
# A list or object without others in it.
_FLAT = re.compile(rf'[\[{{](?:[^\[\]{{}}"]++|{_STRING})*+[\]}}]')
# Items of a list or members of an object that are neither, with a comma behind each.
_PLAIN_ITEMS = re.compile(rf'(?:(?:[^\[\]{{}}",]++|{_STRING})*+,)++')
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")
_ESCAPE = re.compile(rb"\\(?:u[dD](?:([89abAB])|[c-fC-F])[0-9a-fA-F]{2}|.)", re.DOTALL)
_ESCAPED_SURROGATE = 6  # Bytes of one.

_DECODER = json.JSONDecoder()


class BrokenJson(ValueError):
    """A body that is no JSON, or more of it than is read; the message says what, and where."""


def read_json(body: bytes) -> object:
    """The value that a body is, as `json.loads` has it, but half of a surrogate pair is no character here.

    Raises:
        BrokenJson: It is none, is nested more than MAX_DEPTH deep, has more than MAX_CONTAINERS lists and
            objects, or a number of too many digits.
    """
    try:
        text = body.decode()
    except UnicodeDecodeError as error:
        raise _no_json("bytes that are no UTF-8", error.start) from None
    if _SURROGATE.search(body):
        _check_surrogates(body)
    return _Reader(text).read()


def _no_json(fault: str, place: int) -> BrokenJson:
    return BrokenJson(f"the body is not valid JSON: {fault} at character {place}")


def _check_surrogates(body: bytes) -> None:
    """Refuses escapes that write one half of a pair without the other."""
    first_end = -1  # Where a first half has ended, and the second must begin.
    for escape in _ESCAPE.finditer(body):
        is_first = escape[1] is not None
        is_second = len(escape[0]) == _ESCAPED_SURROGATE and not is_first
        if is_second != (escape.start() == first_end):
            raise _no_json("half of a surrogate pair", escape.start())
        if first_end >= 0 and not is_second:
            break
        first_end = escape.end() if is_first else -1
    if first_end >= 0:
        raise _no_json("half of a surrogate pair", first_end)


class _Reader:
    """Reads one text, item by item where it must."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._place = 0
        self._num_containers = 0
        self._is_broken = False  # Somewhere ahead; item by item it is found out where.

    def read(self) -> object:
        """The value that the whole text is."""
        value = self._value(0)
        if self._place < len(self._text):
            raise _no_json("more text behind the value", self._place)
        return value

    def _value(self, depth: int) -> object:
        """The next value, and the space around it."""
        self._skip_space()
        first = self._text[self._place : self._place + 1]
        value = self._container(first, depth + 1) if first and first in "[{" else self._scalar()
        self._skip_space()
        return value

    def _scalar(self) -> object:
        try:
            value, self._place = _DECODER.raw_decode(self._text, self._place)
        except json.JSONDecodeError as error:
            raise _no_json(error.msg.lower(), error.pos) from None
        except ValueError:
            raise BrokenJson("the body is JSON with a number of too many digits") from None
        found: object = value
        return found

    def _container(self, opening: str, depth: int) -> object:
        self._num_containers += 1
        if depth > MAX_DEPTH:
            raise BrokenJson(f"the body is JSON nested too deeply: {MAX_DEPTH} levels are the limit")
        if self._num_containers > MAX_CONTAINERS:
            raise BrokenJson(
                f"the body is JSON of more than {MAX_CONTAINERS} lists and objects: send less at once"
            )
        flat = self._piece(_FLAT)
        if flat:
            found = self._loaded(flat)
            if found is not None:
                return found
        self._place += 1
        return self._list(depth) if opening == "[" else self._object(depth)

    def _piece(self, shape: re.Pattern[str]) -> str:
        """What comes next, if it has the shape and is short enough; else nothing."""
        if self._is_broken:
            return ""
        found = shape.match(self._text, self._place, self._place + PIECE_CHARACTERS)
        return found[0] if found is not None else ""

    def _loaded(self, piece: str, opening: str = "", closing: str = "") -> Any:
        """The list or object that a piece is, or is within brackets; None if it is none, which is a fault."""
        try:
            value = json.loads(f"{opening}{piece}{closing}")
        except ValueError:
            self._is_broken = True
            return None
        self._place += len(piece)
        return value

    def _list(self, depth: int) -> list[object]:
        items: list[object] = []
        self._skip_space()
        if self._takes("]"):
            return items
        while True:
            while (piece := self._piece(_PLAIN_ITEMS)) and (several := self._loaded(piece[:-1], "[", "]")):
                items += several
                self._place += 1
            items.append(self._value(depth))
            if self._ends("]"):
                return items

    def _object(self, depth: int) -> dict[str, object]:
        members: dict[str, object] = {}
        self._skip_space()
        if self._takes("}"):
            return members
        while True:
            while (piece := self._piece(_PLAIN_ITEMS)) and (several := self._loaded(piece[:-1], "{", "}")):
                members |= several
                self._place += 1
            self._skip_space()
            if self._text[self._place : self._place + 1] != '"':
                raise _no_json("expecting a key in double quotes", self._place)
            key = str(self._scalar())
            self._skip_space()
            if not self._takes(":"):
                raise _no_json("expecting :", self._place)
            members[key] = self._value(depth)
            if self._ends("}"):
                return members

    def _ends(self, closing: str) -> bool:
        """Whether the container ends here; if not, a comma says that it goes on."""
        if self._takes(closing):
            return True
        if not self._takes(","):
            raise _no_json(f"expecting , or {closing}", self._place)
        return False

    def _takes(self, char: str) -> bool:
        is_there = self._text.startswith(char, self._place)
        self._place += is_there
        return is_there

    def _skip_space(self) -> None:
        found = _SPACE.match(self._text, self._place)
        assert found is not None, "no space is space enough"
        self._place = found.end()
