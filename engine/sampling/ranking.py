"""The highest entries of rows and their noise, by launches that are the same whichever rows have some."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from engine.sampling.noise import gumbel_rows


class RowIds(Protocol):
    """What the entries of a row stand for: a part of the target's tokens."""

    @property
    def to_target(self) -> torch.Tensor:
        """int64 [row length], the token of each."""

    @property
    def vocab_size(self) -> int:
        """Tokens of the target."""


@dataclass(frozen=True, slots=True)
class Ranking:
    """The highest entries of some rows, on the host.

    Attributes:
        tokens: int64 [num_rows, count], the highest first and the lowest place among equals.
        scores: float64 [num_rows, count], theirs; -inf where no more can be chosen.
        totals: Per row the logarithm of all entries' exponentials together.
    """

    tokens: torch.Tensor
    scores: torch.Tensor
    totals: list[float]

    @classmethod
    def fetch(cls, tokens: torch.Tensor, scores: torch.Tensor, totals: torch.Tensor) -> "Ranking":
        """What `rank` gives, in one copy from a device; float64 holds every id exactly."""
        count = tokens.shape[1]
        numbers = torch.cat([totals, tokens.double(), scores], dim=1).cpu()
        there, found, own = torch.split(numbers, [1, count, count], dim=1)
        return cls(found.long(), own, there[:, 0].tolist())


@dataclass(frozen=True, slots=True)
class Ranks:
    """What `rank` looks for.

    Attributes:
        count: Entries of a row.
        has_noise: Whether there is noise.
        ids: What the entries stand for; None where they are tokens by their places.
    """

    count: int
    has_noise: bool
    ids: RowIds | None


def rank(
    wanted: Ranks, rows: torch.Tensor, noise: Sequence[torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The highest entries of rows.

    Args:
        wanted: Which.
        rows: float32 [num_rows, row length].
        noise: Where that of each row begins, int64 [num_rows], and whether a row has any, bool [num_rows].

    Returns:
        Tokens, scores and totals as in Ranking, the totals [num_rows, 1].
    """
    left, ids = rows, wanted.ids
    if wanted.has_noise:
        starts, is_drawn = noise
        added = gumbel_rows(starts, rows.shape[1] if ids is None else ids.vocab_size)
        if ids is not None:
            added = added[:, ids.to_target]
        left = torch.where(is_drawn[:, None], added.add_(rows), rows)
    total = left.logsumexp(dim=-1, keepdim=True)
    if wanted.count > 1:
        left = left.clone()
    places: list[torch.Tensor] = []
    scores: list[torch.Tensor] = []
    while len(places) < wanted.count:
        if places:
            left.scatter_(1, places[-1], -torch.inf)
        places.append(left.argmax(dim=-1, keepdim=True))
        scores.append(left.gather(1, places[-1]))
    tokens = torch.cat(places, dim=1)
    if ids is not None:
        tokens = ids.to_target[tokens]
    return tokens, torch.cat(scores, dim=1).double(), total.double()
