"""What a chain of drafts is drawn by, for those who draft it in one go."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from engine.sampling.noise import NoiseKey, Stream
from engine.speculation.confidence import NUM_BINS

GREEDY = (0.0, 0.0, 1.0, 0.0)
"""The truncation of rows whose likeliest tokens are taken."""

_NO_KEY = NoiseKey(0, 0, 0, Stream.DRAFT)


@dataclass(frozen=True, slots=True)
class ChainPlan:
    """What is settled of a chain before it is drafted.

    Attributes:
        length: Tokens at most.
        least: Behind the first token with which the chance that all stand is below that, it ends.
        chances: Per bin of confidence, the share of a row's likeliest token, the chance that a token stands.
    """

    length: int
    least: float = 0.0
    chances: tuple[float, ...] = (1.0,) * NUM_BINS


@dataclass(frozen=True, slots=True)
class ChainWish:
    """A chain.

    Attributes:
        plan: How long it may become.
        truncation: temperature, top_k, top_p and min_p that its rows are processed with; at temperature 0 the
            likeliest tokens are taken.
        keys: Per token the noise that it is drawn with; empty where there is none.
        needs_rows: Whether the rows that the tokens were drawn from are wanted.
    """

    plan: ChainPlan
    truncation: Sequence[float]
    keys: tuple[NoiseKey, ...] = ()
    needs_rows: bool = False

    def padded_keys(self, length: int) -> tuple[NoiseKey, ...]:
        """The keys, filled up to a length that others have."""
        return self.keys + (_NO_KEY,) * (length - len(self.keys))


@dataclass(frozen=True, slots=True)
class DraftedChain:
    """A chain of drafts.

    Attributes:
        tokens: Ids of the target.
        confidences: The share of the likeliest token in the row that each was drawn from.
        distributions: Per token what it was drawn from, float32 [vocab_size]; None where that was not wanted.
    """

    tokens: Sequence[int]
    confidences: Sequence[float]
    distributions: Sequence[torch.Tensor | None]
