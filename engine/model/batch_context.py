"""BatchContext: where the tokens lie that a batch's sequences may look at."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from engine.token_tree import TokenTree


@dataclass(frozen=True, slots=True)
class ContextPart:
    """One sequence's part.

    Attributes:
        block_table: Its blocks.
        first_slot: Where its position 0 lies, counted from the start of the table.
        num_committed: Committed tokens.
        tree: Draft nodes behind them.
    """

    block_table: Sequence[int]
    first_slot: int
    num_committed: int
    tree: TokenTree

    @property
    def num_slots(self) -> int:
        """Slots in use."""
        return self.num_committed + len(self.tree)


class BatchContext:
    """Slots and positions of all sequences' contexts. Each table is made when it is first asked for.

    Not all backends ask for all, and each takes a few calls of torch's operators.

    Args:
        parts: Per sequence.
        block_size: Slots of a block.
        device: Where the tables are wanted.

    Attributes:
        begins: Per sequence where its first slot stands in `table_slots`.
    """

    def __init__(self, parts: Sequence[ContextPart], block_size: int, device: torch.device) -> None:
        self._parts = parts
        self._block_size = block_size
        self._device = device
        # Tables grow; these are the blocks of now.
        self._starts = [block * block_size for part in parts for block in part.block_table]
        self.begins: list[int] = []
        begin = 0
        for part in parts:
            self.begins.append(begin + part.first_slot)
            begin += len(part.block_table) * block_size

    @classmethod
    def moved(cls, slots: tuple[torch.Tensor, ...], positions: tuple[torch.Tensor, ...]) -> "BatchContext":
        """One on another device, where nobody asks for `table_slots`."""
        context = cls((), 1, torch.device("cpu"))
        context.slots, context.positions = slots, positions
        return context

    @cached_property
    def table_slots(self) -> torch.Tensor:
        """int64; the slots of all blocks, sequence after sequence."""
        starts = torch.tensor(self._starts, dtype=torch.int64, device=self._device)
        within = torch.arange(self._block_size, dtype=torch.int64, device=self._device)
        return (starts[:, None] + within).view(-1)

    @cached_property
    def slots(self) -> tuple[torch.Tensor, ...]:
        """Per sequence int64 [num_slots]; see InputBatch."""
        return tuple(
            self.table_slots.narrow(0, begin, part.num_slots)
            for begin, part in zip(self.begins, self._parts, strict=True)
        )

    @cached_property
    def positions(self) -> tuple[torch.Tensor, ...]:
        """Per sequence int64 [num_slots]; see InputBatch."""
        longest = max((part.num_committed for part in self._parts), default=0)
        counted = torch.arange(longest, dtype=torch.int64, device=self._device)
        return tuple(self._positions_of(part, counted) for part in self._parts)

    def _positions_of(self, part: ContextPart, counted: torch.Tensor) -> torch.Tensor:
        committed = counted.narrow(0, 0, part.num_committed)
        if not len(part.tree):
            return committed
        depths = torch.tensor(part.tree.depths()[1:], dtype=torch.int64, device=self._device)
        return torch.cat((committed, part.num_committed - 1 + depths))
