"""TextIndex: where the end of a text occurred before, in that text or in others.

A suffix tree's nodes are the sets of places where their paths occur. Built as objects they cost Python some
kilobytes per token; here they are never built. Each n-gram of a few sizes leads to its latest place and each
place to the one before, so that the places of a path can be listed, latest first, and a node's children and
their counts are read off the tokens behind its places (`engine.speculation.continuation`).
"""

from array import array
from collections.abc import Sequence
from typing import NamedTuple

BORDER = -1  # Behind every finished text; no token has this id, so nothing matches across it.


class Occurrence(NamedTuple):
    """A place where the end of a sequence stands as well. A tuple, because thousands are made per second.

    Attributes:
        tokens: The text it lies in.
        end: Index of the token behind it.
        length: How many tokens in front of `end` equal the sequence's last ones.
    """

    tokens: Sequence[int]
    end: int
    length: int


def token_behind(place: Occurrence, path: Sequence[int]) -> int:
    """The token that stood behind `path` at a place; BORDER where that text ended.

    A text that grows is its own continuation: where the place runs into its end, `path` goes on.
    """
    index = place.end + len(path)
    overrun = index - len(place.tokens)
    return place.tokens[index] if overrun < 0 else path[overrun]


class TextIndex:
    """One text that grows at its end, or a queue of finished ones that shrinks at its front.

    Args:
        sizes: Sizes of the n-grams that are looked up; the smallest is the shortest match found.
    """

    def __init__(self, sizes: Sequence[int]) -> None:
        self._sizes = tuple(sorted(set(sizes), reverse=True))
        self._tokens = array("i")
        # By size: the absolute end of each n-gram's latest occurrence, and of the one before each place.
        self._tables: tuple[tuple[dict[int, int], array[int], int], ...] = tuple(
            ({}, array("q"), size) for size in self._sizes
        )
        # Absolute positions count from the first token ever entered; this many are gone.
        self._num_dropped = 0

    def __len__(self) -> int:
        """Tokens held, borders included."""
        return len(self._tokens)

    def extend(self, tokens: Sequence[int]) -> None:
        """Appends to the last text.

        The n-grams that end with the very last token are left out until something follows it: they would be
        found as their own earlier occurrence.
        """
        held, begin = self._tokens, len(self._tokens)
        held.extend(tokens)
        longest = self._sizes[0]
        for end in range(begin, len(held)):
            grams = tuple(held[max(end - longest, 0) : end])
            for latest, earlier, size in self._tables:
                before = -1
                if end >= size and BORDER not in (gram := grams[-size:]):
                    key = hash(gram)
                    before = latest.get(key, -1)
                    latest[key] = self._num_dropped + end
                earlier.append(before)

    def close(self) -> None:
        """Ends the last text."""
        self.extend((BORDER,))

    def drop(self, count: int) -> None:
        """Forgets the first `count` tokens; whole texts, their borders included."""
        held = self._tokens
        for latest, earlier, size in self._tables:
            for end in range(size, count):
                key = hash(tuple(held[end - size : end]))
                if latest.get(key) == self._num_dropped + end:
                    del latest[key]
            del earlier[:count]
        del held[:count]
        self._num_dropped += count

    def tail(self, count: int) -> Sequence[int]:
        """The last `count` tokens."""
        return self._tokens[-count:]

    def find(self, tail: Sequence[int], limit: int) -> list[Occurrence]:
        """Places where a sequence's end occurred, longest match first, of equal ones the latest.

        Args:
            tail: The sequence's last tokens, as many as may count.
            limit: Places looked at, at most: the latest ones with the longest n-gram, then with shorter ones.
        """
        found: dict[int, int] = {}
        for latest, earlier, size in self._tables:
            if size > len(tail):
                continue
            place = latest.get(hash(tuple(tail[-size:])), -1)
            while place >= self._num_dropped and len(found) < limit:
                end = place - self._num_dropped
                if end not in found and (length := self._match(tail, end)) >= size:
                    found[end] = length
                place = earlier[end]
        order = sorted(found, key=lambda end: (found[end], end), reverse=True)
        return [Occurrence(self._tokens, end, found[end]) for end in order]

    def _match(self, tail: Sequence[int], end: int) -> int:
        held = self._tokens
        most = min(len(tail), end)
        length = 0
        while length < most and held[end - 1 - length] == tail[-1 - length]:
            length += 1
        return length
