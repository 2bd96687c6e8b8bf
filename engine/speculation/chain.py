"""What a chain of drafts is drawn by, for those who draft it in one go."""

from collections.abc import Sequence
from dataclasses import dataclass

from engine.sampling.noise import NoiseKey, Stream

GREEDY = (0.0, 0.0, 1.0, 0.0)
"""The truncation of rows whose likeliest tokens are taken."""

_NO_KEY = NoiseKey(0, 0, 0, Stream.DRAFT)


@dataclass(frozen=True, slots=True)
class ChainWish:
    """A chain.

    Attributes:
        length: Tokens.
        truncation: temperature, top_k, top_p and min_p that its rows are processed with; at temperature 0 the
            likeliest tokens are taken.
        keys: Per token the noise that it is drawn with; empty where there is none.
        needs_rows: Whether the rows that the tokens were drawn from are wanted.
    """

    length: int
    truncation: Sequence[float]
    keys: tuple[NoiseKey, ...] = ()
    needs_rows: bool = False

    def padded_keys(self, length: int) -> tuple[NoiseKey, ...]:
        """The keys, filled up to a length that others have."""
        return self.keys + (_NO_KEY,) * (length - len(self.keys))
