"""Draft vocabularies: the target's most frequent tokens, for which a head has output rows."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class DraftVocabulary:
    """Which of the target's tokens a head can draft.

    Attributes:
        to_target: int64 [draft_vocab_size], the target's id of each row, ascending.
        from_target: int64 [vocab_size], the row of each of the target's ids; -1 where it has none.
    """

    to_target: torch.Tensor
    from_target: torch.Tensor

    @classmethod
    def of(cls, to_target: torch.Tensor, vocab_size: int) -> "DraftVocabulary":
        """A vocabulary of given ids."""
        from_target = torch.full((vocab_size,), -1)
        from_target[to_target] = torch.arange(len(to_target))
        return cls(to_target, from_target)

    @classmethod
    def most_frequent(cls, counts: torch.Tensor, size: int) -> "DraftVocabulary":
        """The tokens that are said most often; among equals the lowest ids.

        Args:
            counts: int64 [vocab_size].
            size: How many; no more than there are.
        """
        order = counts.argsort(descending=True, stable=True)
        return cls.of(order[:size].sort().values, len(counts))

    def to(self, device: torch.device) -> "DraftVocabulary":
        """The same on a device."""
        return DraftVocabulary(self.to_target.to(device), self.from_target.to(device))

    def __len__(self) -> int:
        return len(self.to_target)

    def coverage(self, counts: torch.Tensor) -> float:
        """Share of the counted tokens that it has."""
        return float(counts[self.to_target].sum() / counts.sum().clamp(min=1))
