"""Alignment: where in a predicted text an answer is, though it inserts, deletes and renames.

What the answer changes once it is expected to change again:

    predicted   total = 0 ; return total
    answer      sum   = 0 ; return ▮
                └ the edit total → sum: learned where the texts agree again, expected from there on
"""

from collections.abc import Collection, Iterable, Iterator
from typing import NamedTuple

from engine.speculation.evidence import Rate, RowPrice
from engine.token_tree import TokenTree

# Chance that the next token is the expected one, by the tokens that agreed before it: none (the token that
# differed is taken for a replaced one), 1, 2-3, 4-7, ... 64 and more. What a request starts from.
PRIORS = (0.4, 0.4, 0.75, 0.9, 0.95, 0.97, 0.99, 0.995)

# Before the first token the client's word counts as so many tokens that agreed.
INITIAL_RUN = 16

# So many tokens that agree end a stretch that differed, by how many predicted tokens it passes over: the more
# that are, the likelier it is that some of them agree by chance.
PROVEN_RUNS = ((8, 3), (64, 8), (1 << 32, 16))

# Of a stretch that differs, the tokens that are remembered, and the longest one that is learned from.
MAX_TAIL = 64
MAX_EDIT = 16
MAX_EDITS = 64

# Tokens in front of an edit that say where else to make it, where what it replaces does not.
CONTEXT = 3

# While so few tokens differ they may be as many replaced ones.
MAX_REPLACED = 3

# Lengths of the last tokens that are searched for, and how far ahead; None is to the end.
REACHES = ((16, None), (8, None), (6, None), (4, 1024), (3, 512), (2, 128), (1, 32))

# So many last tokens are searched for everywhere, also in what is passed: text may have been moved.
MOVED = 16


_Key = tuple[str, str]
"""What stands in front of an edit, and what follows."""


class _Cursor(NamedTuple):
    """A place in the prediction. A tuple, because hundreds are made per step.

    Attributes:
        place: Index of the next predicted token.
        pending: Tokens of a replacement that come first.
        edited: Whether an edit has just been made here, so that it is not made again.
    """

    place: int
    pending: str = ""
    edited: bool = False


class _Expected(NamedTuple):
    """The token that comes next at a cursor.

    Attributes:
        token: It.
        behind: The cursor behind it.
        is_original: Whether it is the prediction's own, and not an edit's.
        edit: The edit that begins with it, if one does.
    """

    token: str
    behind: _Cursor
    is_original: bool
    edit: _Key | None = None


class _Edits:
    """Edits that the answer made, by what stands in front of a place and what follows."""

    def __init__(self) -> None:
        # How many of the tokens that follow are replaced, and by what.
        self._changes: dict[_Key, tuple[int, str]] = {}
        self._sizes: list[tuple[int, int]] = []
        self._failed: set[_Key] = set()

    def learn(self, text: str, begin: int, end: int, new: str) -> None:
        """Remembers that text[begin:end] was replaced.

        It is known again by itself, or if that proved wrong by its context, as an insertion always is.
        """
        old = text[begin:end]
        if max(len(old), len(new)) > MAX_EDIT or len(self._changes) >= MAX_EDITS:
            return
        before, behind = text[max(0, begin - CONTEXT) : begin], text[end : end + CONTEXT]
        keys = [("", old)] if old and ("", old) not in self._failed else [("", old + behind), (before, old)]
        for key in keys:
            if (old or sum(map(len, key)) == CONTEXT) and key not in self._failed:
                self._changes[key] = (len(old), new)
        self._sizes = sorted({(len(c), len(o)) for c, o in self._changes}, reverse=True)

    def find(self, text: str, place: int) -> _Key | None:
        """The edit to be made at a place, the one with most in front of it first."""
        for num_before, num_behind in self._sizes:
            key = (text[max(0, place - num_before) : place], text[place : place + num_behind])
            if key in self._changes:
                return key
        return None

    def change(self, key: _Key) -> tuple[int, str]:
        """How many tokens an edit replaces, and by what."""
        return self._changes[key]

    def forget(self, key: _Key) -> None:
        """An edit was not made where it was expected: it is not expected again."""
        self._changes.pop(key, None)
        self._failed.add(key)


class Alignment:
    """Follows an answer through a prediction.

    What it knows is a function of the two texts alone, however many tokens came at a time. While they agree a
    token costs some dictionary look-ups; where they do not, a search in C per entry of REACHES.

    Args:
        prediction: The predicted tokens.
    """

    def __init__(self, prediction: Iterable[int]) -> None:
        # One character per token, so that str.find does the searching.
        self._text = "".join(map(chr, prediction))
        self._rates = [Rate(prior) for prior in PRIORS]
        self._edits = _Edits()
        self._cursor: _Cursor | None = _Cursor(0)
        self._run = INITIAL_RUN
        # The stretch that differs: where in the prediction it began, how many tokens it has, and the last.
        self._differs_from: int | None = None
        self._num_differing = 0
        self._tail = ""
        self._found = bytearray(len(self._text))
        self.num_read = 0
        self.num_found = 0

    def read(self, tokens: Iterable[int]) -> None:
        """Takes in the answer's next tokens."""
        for token in tokens:
            self._read(chr(token))
            self.num_read += 1

    def draft(self, budget: int, price: RowPrice, ends: Collection[int]) -> TokenTree:
        """As many of the expected tokens as pay, in a chain.

        Args:
            budget: Tokens at most.
            price: Whether a token is worth its row.
            ends: Ids behind which nothing is drafted.
        """
        draft: list[int] = []
        survivals: list[float] = []
        survival = expected = 1.0
        for token in self._expected_tokens():
            if len(draft) == budget:
                break
            survival *= self._rate(len(draft)).value
            if not price.pays(survival, expected, len(draft)):
                break
            expected += survival
            survivals.append(survival)
            draft.append(ord(token))
            if draft[-1] in ends:
                break
        return TokenTree(tuple(draft), tuple(range(len(draft))), probabilities=tuple(survivals))

    def _read(self, token: str) -> None:
        expected = None if self._cursor is None else self._expect(self._cursor)
        if self._cursor is not None and expected is not None:
            self._rate(0).note(expected.token == token)
            if expected.token != token and expected.edit is not None:
                self._edits.forget(expected.edit)
                expected = self._expect(self._cursor._replace(edited=True))
            if expected is not None and expected.token == token:
                self._go_on(expected)
                return
        self._differ(token)

    def _go_on(self, expected: _Expected) -> None:
        """Behind a token that was expected."""
        self._cursor = expected.behind
        self._run += 1
        if self._differs_from is None:
            if expected.is_original:
                self._note_found(expected.behind.place - 1, expected.behind.place)
            return
        self._lengthen(expected.token)
        self._settle(self._differs_from, expected.behind.place)

    def _differ(self, token: str) -> None:
        """Behind a token that was not expected: looks for the place to go on."""
        if self._differs_from is None:
            assert self._cursor is not None, "the place is lost only where the texts differ"
            self._differs_from = self._cursor.place
        self._lengthen(token)
        self._cursor, self._run = self._search(self._differs_from)
        if self._cursor is not None:
            self._settle(self._differs_from, self._cursor.place)

    def _lengthen(self, token: str) -> None:
        self._tail = (self._tail + token)[-MAX_TAIL:]
        self._num_differing += 1

    def _search(self, begin: int) -> tuple[_Cursor | None, int]:
        """The likeliest place behind the last tokens, and how many of them agree there."""
        text, tail = self._text, self._tail
        found, run = -1, 0
        for length, reach in REACHES:
            if length <= len(tail):
                end = len(text) if reach is None else begin + reach + length
                found, run = text.find(tail[-length:], begin, end), length
                if found >= 0:
                    break
        if found < 0 and len(tail) >= MOVED:
            found, run = text.find(tail[-MOVED:]), MOVED
        replaced = self._num_differing <= MAX_REPLACED and begin + self._num_differing <= len(text)
        if replaced and (found < 0 or (run == 1 and self._rates[0].value >= self._rates[1].value)):
            return _Cursor(begin + self._num_differing), 0
        return (_Cursor(found + run), run) if found >= 0 else (None, 0)

    def _settle(self, begin: int, place: int) -> None:
        """Ends a stretch that differed if enough agrees in front of `place`, and learns from a short edit."""
        distance = abs(place - self._run - begin)
        if self._run < next(run for reach, run in PROVEN_RUNS if distance <= reach):
            return
        tail = self._tail
        whole = self._num_differing == len(tail)
        most = min(place - begin, len(tail)) if place > begin else self._run
        shared = 0
        while shared < most and self._text[place - 1 - shared] == tail[-1 - shared]:
            shared += 1
        self._note_found(place - shared, place)
        if whole and place - shared >= begin:
            self._edits.learn(self._text, begin, place - shared, tail[: len(tail) - shared])
        self._differs_from, self._num_differing, self._tail = None, 0, ""

    def _note_found(self, begin: int, end: int) -> None:
        """Counts predicted tokens that the answer has, each once."""
        for place in range(begin, end):
            self.num_found += not self._found[place]
            self._found[place] = True

    def _expect(self, cursor: _Cursor) -> _Expected | None:
        """The next token at a cursor; None at the prediction's end."""
        if cursor.pending:
            behind = cursor._replace(pending=cursor.pending[1:])
            return _Expected(cursor.pending[0], behind, is_original=False)
        edit = None if cursor.edited else self._edits.find(self._text, cursor.place)
        if edit is not None:
            num_replaced, new = self._edits.change(edit)
            cursor = _Cursor(cursor.place + num_replaced, new, edited=True)
            if new:
                return _Expected(new[0], cursor._replace(pending=new[1:]), is_original=False, edit=edit)
        if cursor.place >= len(self._text):
            return None
        return _Expected(self._text[cursor.place], _Cursor(cursor.place + 1), is_original=True, edit=edit)

    def _expected_tokens(self) -> Iterator[str]:
        cursor = self._cursor
        while cursor is not None and (expected := self._expect(cursor)) is not None:
            yield expected.token
            cursor = expected.behind

    def _rate(self, depth: int) -> Rate:
        """By the tokens that agree in front of the one `depth` tokens ahead."""
        return self._rates[min((self._run + depth).bit_length(), len(PRIORS) - 1)]
