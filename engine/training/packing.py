"""Batches: sequences laid end to end without padding, and what a head is to say at each place of them.

A *root* is a place from which drafting may start: the target has computed it, and the token after it, which
the head gets, is the answer's. Pass s of a root drafts the token s + 2 places on, so it counts where the
answer goes on as far:

    tokens    p0  p1  a0  a1  a2  a3      p: prompt, a: answer
    roots         0   1   2               p1: pass 0 gets a0, drafts a1; pass 1 gets a1, drafts a2; ...
    reach         3   2   1               passes that count
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace

import torch

from engine.training.features import Features, Stored


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a stored sequence, short enough to be trained on.

    Attributes:
        row: The sequence.
        begin: First place.
        end: Place after the last.
    """

    row: Stored
    begin: int
    end: int

    @property
    def num_roots(self) -> int:
        """Places from which drafting may start."""
        return sum(
            max(0, min(span.end, self.end) - max(span.begin, self.begin + 1) - 1) for span in self.row.answers
        )


@dataclass(frozen=True, slots=True)
class Batch:
    """Sequences end to end.

    Attributes:
        token_ids: int64 [N].
        hidden: float32 [N, width], the target's states; see Captured.
        positions: int64 [N], each token's place in its sequence.
        bounds: First place of each sequence, and N.
        roots: int64 [R], ascending.
        reach: int64 [R], how many passes count.
        targets: int64 [R], the place in `top_ids` of what pass 0 is to say; pass s: s places further on.
        top_ids: int64 [A, K], the target's likeliest tokens in the place of each answer token, best first.
        top_logprobs: float32 [A, K].
    """

    token_ids: torch.Tensor
    hidden: torch.Tensor
    positions: torch.Tensor
    bounds: tuple[int, ...]
    roots: torch.Tensor
    reach: torch.Tensor
    targets: torch.Tensor
    top_ids: torch.Tensor
    top_logprobs: torch.Tensor

    def to(self, device: torch.device) -> "Batch":
        """The batch on a device."""
        tensors = {
            field.name: getattr(self, field.name).to(device)
            for field in fields(self)
            if field.name != "bounds"
        }
        return replace(self, **tensors)


def cut(rows: Sequence[Stored], max_length: int) -> list[Piece]:
    """The rows in pieces of a length at most, without pieces that have no root."""
    pieces = [
        Piece(row, begin, min(begin + max_length, row.num_tokens))
        for row in rows
        for begin in range(0, row.num_tokens, max_length)
    ]
    return [piece for piece in pieces if piece.num_roots]


def packed(pieces: Sequence[Piece], batch_tokens: int) -> list[list[Piece]]:
    """Pieces in their order, in batches of about so many roots."""
    batches: list[list[Piece]] = []
    room = 0
    for piece in pieces:
        if room < piece.num_roots / 2:
            batches.append([])
            room = batch_tokens
        batches[-1].append(piece)
        room -= piece.num_roots
    return batches


def shuffled(pieces: Sequence[Piece], seed: int, epoch: int) -> list[Piece]:
    """The pieces in an order that depends on seed and epoch alone."""
    generator = torch.Generator().manual_seed(seed * 1_000_003 + epoch)
    return [pieces[place] for place in torch.randperm(len(pieces), generator=generator).tolist()]


def load_batch(features: Features, pieces: Sequence[Piece]) -> Batch:
    """Reads a batch."""
    parts = [_load(features, piece) for piece in pieces]
    places = _starts(len(part.token_ids) for part in parts)
    answers = _starts(len(part.top_ids) for part in parts)
    return Batch(
        token_ids=torch.cat([part.token_ids for part in parts]),
        hidden=torch.cat([part.hidden for part in parts]),
        positions=torch.cat([part.positions for part in parts]),
        bounds=tuple(places),
        roots=torch.cat([part.roots + begin for part, begin in zip(parts, places, strict=False)]),
        reach=torch.cat([part.reach for part in parts]),
        targets=torch.cat([part.targets + begin for part, begin in zip(parts, answers, strict=False)]),
        top_ids=torch.cat([part.top_ids for part in parts]),
        top_logprobs=torch.cat([part.top_logprobs for part in parts]),
    )


def _starts(sizes: Iterator[int]) -> list[int]:
    """Where each of some neighbours begins, and where the last ends."""
    starts = [0]
    for size in sizes:
        starts.append(starts[-1] + size)
    return starts


def _load(features: Features, piece: Piece) -> Batch:
    row, begin, end = piece.row, piece.begin, piece.end
    roots, reach, targets = [], [], []
    first = 0
    for span in row.answers:
        # Of the answer's tokens the first is what the target says at once; drafting starts before the second.
        for root in range(max(span.begin - 1, begin), min(span.end, end) - 2):
            roots.append(root - begin)
            reach.append(min(span.end, end) - root - 2)
            targets.append(first + root + 2 - span.begin)
        first += span.end - span.begin
    return Batch(
        token_ids=features.tokens(row)[begin:end],
        hidden=features.hidden(row)[begin:end].float(),
        positions=torch.arange(end - begin),
        bounds=(0, end - begin),
        roots=torch.tensor(roots, dtype=torch.long),
        reach=torch.tensor(reach, dtype=torch.long),
        targets=torch.tensor(targets, dtype=torch.long),
        top_ids=features.top_ids(row),
        top_logprobs=features.top_logprobs(row),
    )
