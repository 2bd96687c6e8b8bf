"""DraftIds: which of the target's tokens the entries of a draft's rows stand for."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class DraftIds:
    """A draft vocabulary: a part of the target's.

    Attributes:
        to_target: int64 [size], the target's id of each entry.
        vocab_size: Ids of the target.
        kept: int64 [size], which rows of the draft's output layer they are; None if they are all.
    """

    to_target: torch.Tensor
    vocab_size: int
    kept: torch.Tensor | None = None

    def spread(self, rows: torch.Tensor, absent: float) -> torch.Tensor:
        """Rows over the target's ids.

        Args:
            rows: [..., size].
            absent: What stands at ids that have no entry.

        Returns:
            [..., vocab_size].
        """
        spread = rows.new_full((*rows.shape[:-1], self.vocab_size), absent)
        return spread.index_copy_(-1, self.to_target, rows)
