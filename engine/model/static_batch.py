"""StaticBatch: the tensors of passes of about one size, which stay where they are from pass to pass.

A batch is padded to its bucket. Padding tokens write nowhere, attend to nothing, and nobody reads their rows.
"""

from dataclasses import dataclass

import torch

from engine.model.input_batch import InputBatch

NOWHERE = -1
"""The slot of a padding token."""

_ROWS = (1, 2, 4, 8, 16, 32, 64, 128)
_SEQUENCES = (1, 2, 4, 8, 16, 32)


@dataclass(frozen=True, slots=True)
class Bucket:
    """A size that batches are padded to.

    Attributes:
        num_tokens: Tokens.
        num_sequences: Sequences at most; there are no more of them than tokens.
    """

    num_tokens: int
    num_sequences: int

    @classmethod
    def of(cls, batch: InputBatch) -> "Bucket | None":
        """The smallest that a batch fits into; None beyond the largest, as for long chunks of prompts."""
        num_sequences = next((size for size in _SEQUENCES if size >= len(batch.spans)), None)
        if num_sequences is None:
            return None
        wanted = max(num_sequences, len(batch.input_ids))
        num_tokens = padded(wanted)
        return None if num_tokens is None else cls(num_tokens, num_sequences)


LARGEST = Bucket(_ROWS[-1], _SEQUENCES[-1])


def num_buckets() -> int:
    """How many there are."""
    return sum(size <= num_tokens for num_tokens in _ROWS for size in _SEQUENCES)


def padded(num_rows: int) -> int | None:
    """Rows that so many are padded to; None if they are more than the largest bucket's."""
    return next((size for size in _ROWS if size >= num_rows), None)


def num_row_sizes(num_rows: int) -> int:
    """How many sizes there are up to `num_rows`, which is one."""
    return sum(size <= num_rows for size in _ROWS)


@dataclass(frozen=True, slots=True)
class StaticBatch:
    """The tensors of a bucket's passes. They mean what they mean in InputBatch.

    Attributes:
        bucket: Their size.
        columns: int64 [6, bucket.num_tokens]: the properties below.
        context_slots: int64; the sequences' one after the other. What lies behind is never read.
        context_positions: int64, likewise.
    """

    bucket: Bucket
    columns: torch.Tensor
    context_slots: torch.Tensor
    context_positions: torch.Tensor

    @classmethod
    def allocate(cls, num_context_slots: int, device: torch.device) -> "StaticBatch":
        """The largest.

        Args:
            num_context_slots: Slots of all sequences of a batch at most.
            device: Where passes run.
        """
        columns = torch.zeros(6, LARGEST.num_tokens, dtype=torch.int64, device=device)
        context = torch.zeros(2, num_context_slots, dtype=torch.int64, device=device)
        return cls(LARGEST, columns, context[0], context[1])

    def cut(self, bucket: Bucket) -> "StaticBatch":
        """One of a smaller bucket in the same memory."""
        columns = self.columns.view(-1)[: 6 * bucket.num_tokens].view(6, -1)
        return StaticBatch(bucket, columns, self.context_slots, self.context_positions)

    @property
    def input_ids(self) -> torch.Tensor:
        """int64 [num_tokens]."""
        return self.columns[0]

    @property
    def positions(self) -> torch.Tensor:
        """int64 [num_tokens]."""
        return self.columns[1]

    @property
    def slots(self) -> torch.Tensor:
        """int64 [num_tokens]; NOWHERE for padding."""
        return self.columns[2]

    @property
    def visible(self) -> torch.Tensor:
        """int64 [num_tokens]; 0 for padding."""
        return self.columns[3]

    @property
    def ancestors(self) -> torch.Tensor:
        """int64 [num_tokens]; 0 for padding."""
        return self.columns[4]

    @property
    def logits_rows(self) -> torch.Tensor:
        """int64 [num_tokens]; those that are wanted, then the first token's again and again."""
        return self.columns[5]

    def holds(self, batch: InputBatch) -> bool:
        """Whether there is room for a batch's contexts."""
        return sum(span.num_slots for span in batch.spans) <= len(self.context_slots)

    def fill(self, batch: InputBatch) -> None:
        """Takes the next batch in, which is on the host."""
        columns = torch.zeros(self.columns.shape, dtype=torch.int64)
        columns[2] = NOWHERE
        of_batch = (batch.input_ids, batch.positions, batch.slots, batch.visible, batch.ancestors)
        for column, values in zip(columns, (*of_batch, batch.logits_rows), strict=True):
            column[: len(values)] = values
        send(columns, self.columns)
        for parts, target in (
            (batch.context_slots, self.context_slots),
            (batch.context_positions, self.context_positions),
        ):
            values = torch.cat(parts)
            send(values, target[: len(values)])


def send(values: torch.Tensor, target: torch.Tensor) -> None:
    """Copies from the host behind what a device still has to do, without waiting for it."""
    if target.device.type == "cuda":
        values = values.pin_memory()
    target.copy_(values, non_blocking=True)
