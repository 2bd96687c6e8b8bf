"""InputBatch: the flat tensors of one forward pass, built from plain slices of sequences.

Prefill chunks, single tokens and draft trees lie side by side in one row of tokens:

    request A, chunk of its prompt     request B, last token and a tree
    a5 a6 a7 a8                        b9 │ n1 n2 n3          tokens
     5  6  7  8                         9 │ 10 10 11          position = base + depth
     5  6  7  8                         9 │ 10 11 12          slot in the sequence: one scratch slot per node
     6  7  8  9                        10 │ 10 10 10          visible: leading slots it may attend to ...
     0  0  0  0                         0 │  1  2  5          ... and the ancestor word over the nodes

A draft model grows its tree level by level: a pass computes the newest nodes only, and those before them
are in their scratch slots already.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from engine.model.batch_context import BatchContext, ContextPart
from engine.token_tree import EMPTY_TREE, TokenTree


@dataclass(frozen=True, slots=True)
class SequenceSlice:
    """The part of one sequence that a forward pass computes.

    Attributes:
        token_ids: Committed tokens to compute, consecutive.
        start: Position of the first of them; everything before is in the cache.
        block_table: Block ids of the sequence, covering all slots that are written or read.
        tree: Draft nodes that hang off the last of token_ids, or off the token before `start` without any.
        num_cached_nodes: Leading nodes of the tree that earlier passes computed; they are in their scratch
            slots, and no token of token_ids is computed any more.
        first_slot: Where position 0 lies, counted from the start of the block table. Draft heads leave slot
            0 empty: they have nothing to say before the second token.
        rows: How many logits rows are wanted, counted from the slice's end: 0 for none, 1 + len(tree) for
            the last committed token and every node, and so on.
    """

    token_ids: Sequence[int]
    start: int
    block_table: Sequence[int]
    tree: TokenTree = EMPTY_TREE
    rows: int = 1
    num_cached_nodes: int = 0
    first_slot: int = 0

    def __len__(self) -> int:
        """Tokens that the pass computes for this slice."""
        return len(self.token_ids) + len(self.tree) - self.num_cached_nodes


@dataclass(frozen=True, slots=True)
class SequenceSpan:
    """Where one slice lies in the batch, as attention needs it.

    Attributes:
        begin, end: Its tokens in the flat batch.
        num_committed: Slots of committed tokens, those computed in this pass included.
        num_slots: All slots in use: committed tokens, then one per draft node.
        has_tree: Whether draft nodes take part.
    """

    begin: int
    end: int
    num_committed: int
    num_slots: int
    has_tree: bool


@dataclass(frozen=True, slots=True)
class InputBatch:
    """The tensors of one forward pass. T tokens, S sequences, R rows wanted.

    Attributes:
        input_ids: int64 [T].
        positions: int64 [T]; siblings of a tree share one.
        slots: int64 [T]; where each token's keys and values go.
        visible: int64 [T]; leading slots of its sequence that the token attends to.
        ancestors: int64 [T]; bit n - 1 set: it attends to node n of its tree as well.
        context: Per sequence, where it has all that it may attend to.
        spans: Per sequence, where it lies.
        logits_rows: int64 [R]; flat token indices whose logits are wanted, in order.
    """

    input_ids: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    visible: torch.Tensor
    ancestors: torch.Tensor
    context: BatchContext
    spans: tuple[SequenceSpan, ...]
    logits_rows: torch.Tensor

    @classmethod
    def build(cls, slices: Sequence[SequenceSlice], block_size: int, device: torch.device) -> "InputBatch":
        """Lays the slices out flat. Reads them only; nothing is written back."""
        flat = _FlatTokens()
        spans = [_append(flat, piece, block_size) for piece in slices]
        rows = [
            row
            for piece, span in zip(slices, spans, strict=True)
            for row in range(span.end - piece.rows, span.end)
        ]
        columns = (flat.input_ids, flat.positions, flat.slots, flat.visible, flat.ancestors)
        input_ids, positions, slots, visible, ancestors = torch.tensor(
            columns, dtype=torch.int64, device=device
        ).unbind()
        parts = [
            ContextPart(piece.block_table, piece.first_slot, span.num_committed, piece.tree)
            for piece, span in zip(slices, spans, strict=True)
        ]
        return cls(
            input_ids=input_ids,
            positions=positions,
            slots=slots,
            visible=visible,
            ancestors=ancestors,
            context=BatchContext(parts, block_size, device),
            spans=tuple(spans),
            logits_rows=torch.tensor(rows, dtype=torch.int64, device=device),
        )

    @property
    def context_slots(self) -> tuple[torch.Tensor, ...]:
        """Per sequence int64 [num_slots]; cache slots in sequence order, tree nodes last."""
        return self.context.slots

    @property
    def context_positions(self) -> tuple[torch.Tensor, ...]:
        """Per sequence int64 [num_slots]; their positions."""
        return self.context.positions

    def to(self, device: torch.device) -> "InputBatch":
        """The same batch on a device. All tensors take one copy, since each costs a GPU the same wait."""
        if device == self.input_ids.device:
            return self
        columns = (
            *(self.input_ids, self.positions, self.slots, self.visible, self.ancestors, self.logits_rows),
            *self.context_slots,
            *self.context_positions,
        )
        moved = torch.split(torch.cat(columns).to(device), [len(column) for column in columns])
        input_ids, positions, slots, visible, ancestors, logits_rows, *context = moved
        count = len(self.spans)
        return InputBatch(
            input_ids=input_ids,
            positions=positions,
            slots=slots,
            visible=visible,
            ancestors=ancestors,
            context=BatchContext.moved(tuple(context[:count]), tuple(context[count:])),
            spans=self.spans,
            logits_rows=logits_rows,
        )


class _FlatTokens:
    """The columns of the batch while it grows."""

    def __init__(self) -> None:
        self.input_ids: list[int] = []
        self.positions: list[int] = []
        self.slots: list[int] = []
        self.visible: list[int] = []
        self.ancestors: list[int] = []


def _append(flat: _FlatTokens, piece: SequenceSlice, block_size: int) -> SequenceSpan:
    begin = len(flat.input_ids)
    num_committed = piece.start + len(piece.token_ids)
    num_slots = num_committed + len(piece.tree)
    end = piece.first_slot + num_slots
    if end > len(piece.block_table) * block_size:
        raise ValueError(f"{end} slots wanted, but {len(piece.block_table)} blocks of {block_size}")
    cached = piece.num_cached_nodes
    if cached and piece.token_ids:
        raise ValueError(
            f"{cached} nodes cannot be cached before the {len(piece.token_ids)} tokens above them"
        )
    has_tree = len(piece.tree) > 0
    flat.input_ids.extend(piece.token_ids)
    flat.positions.extend(range(piece.start, num_committed))
    flat.visible.extend(range(piece.start + 1, num_committed + 1))
    flat.ancestors.extend([0] * len(piece.token_ids))
    if has_tree:
        flat.input_ids.extend(piece.tree.tokens[cached:])
        flat.positions.extend(num_committed - 1 + depth for depth in piece.tree.depths()[1 + cached :])
        flat.visible.extend([num_committed] * (len(piece.tree) - cached))
        flat.ancestors.extend(piece.tree.ancestor_words()[1 + cached :])
    flat.slots.extend(
        piece.block_table[index // block_size] * block_size + index % block_size
        for index in range(piece.first_slot + piece.start + cached, end)
    )
    return SequenceSpan(begin, len(flat.input_ids), num_committed, num_slots, has_tree)
