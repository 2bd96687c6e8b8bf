"""TreeGrower: what all drafting models do alike, whatever computes their rows."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch

from engine.model.input_batch import SequenceSlice
from engine.model.static_batch import LARGEST
from engine.sampling.device_rows import DeviceRows
from engine.sampling.logits import RowOperators, process_logits
from engine.sampling.row_group import RowGroup
from engine.speculation.base import DraftRequest
from engine.speculation.draft_ids import DraftIds
from engine.speculation.drawing import Child, DrawingStyle, RowWish, draw_children
from engine.speculation.growing_tree import GrowingTree
from engine.speculation.growth import Gardener
from engine.speculation.tree_shape import TreeShape
from engine.token_tree import MAX_NODES, TokenTree

DRAWING_LIMITS = LARGEST.num_sequences, 18
"""Rows that recorded draws take, and recordings of such draws: options and two widths, of all sizes."""


class TreeGrower:
    """Starts trees and draws their nodes.

    Args:
        gardener: Which trees are grown.
        style: How their tokens are drawn.
        eos_token_ids: The target's EOS ids; no node hangs off one of them.
        operators: What rows of logits are processed with; None is plain torch.
        far: What does it instead, on a device that it takes long to hear from.
    """

    def __init__(
        self,
        gardener: Gardener,
        style: DrawingStyle,
        eos_token_ids: frozenset[int],
        operators: RowOperators | None = None,
        far: DeviceRows | None = None,
    ) -> None:
        self._gardener = gardener
        self._style = style
        self._eos_token_ids = eos_token_ids
        self._operators = operators
        self._far = far

    @property
    def branches(self) -> bool:
        """Whether nodes may have siblings."""
        return self._style.branches

    @property
    def ends_early(self) -> bool:
        """Whether chains end where the draft is not sure enough of them."""
        return self._gardener.ends_early

    @property
    def usual_shape(self) -> TreeShape | None:
        """What trees look like, roughly; None for chains."""
        return self._gardener.usual_shape

    def note(self, tree: TokenTree, committed: Sequence[int]) -> None:
        """Learns which tokens have come since a tree was proposed."""
        self._gardener.note(tree, committed)

    def start(self, request: DraftRequest, room: int = MAX_NODES) -> GrowingTree:
        """A tree without nodes; its first rows are the root's.

        Args:
            request: Whose it is.
            room: Levels that whoever drafts has room for.
        """
        proposal = self._style.proposal(request.params)
        growth = self._gardener.start(proposal, request.budget, min(request.max_depth, room), request.least)
        return GrowingTree(request, proposal, growth, self._eos_token_ids)

    def draw(self, trees: Sequence[GrowingTree], logits: torch.Tensor, ids: DraftIds | None = None) -> None:
        """Draws the children of each row, processed as if the path to it had been emitted.

        Args:
            trees: Whose rows these are, in order.
            logits: float32 [num_rows, vocab_size], or a row's entries as `ids` says.
            ids: What the entries of a row stand for; None where they are the target's ids.
        """
        for own, rows, own_ids in _by_ids(trees, logits, [tree.num_rows for tree in trees], ids):
            self._draw(own, rows, own_ids)

    def _draw(self, trees: Sequence[GrowingTree], logits: torch.Tensor, ids: DraftIds | None) -> None:
        groups = [tree.row_group() for tree in trees]
        wishes = [wish for tree, group in zip(trees, groups, strict=True) for wish in tree.wishes(group)]
        children = iter(self._children(logits, groups, wishes, ids))
        for tree, group in zip(trees, groups, strict=True):
            tree.add([next(children) for _ in group.paths])

    def draw_alike(
        self, trees: Sequence[GrowingTree], logits: torch.Tensor, ids: DraftIds | None = None
    ) -> None:
        """Draws the same children for all rows of a tree, for models that do not see the path to a node.

        The row is processed as if the path to its first node had been emitted, and drawn from once.

        Args:
            trees: Those with rows.
            logits: float32 [len(trees), vocab_size], or a row's entries as `ids` says.
            ids: See `draw`.
        """
        for own, rows, own_ids in _by_ids(trees, logits, [1] * len(trees), ids):
            self._draw_alike(own, rows, own_ids)

    def _draw_alike(self, trees: Sequence[GrowingTree], logits: torch.Tensor, ids: DraftIds | None) -> None:
        every = [tree.wishes(tree.row_group()) for tree in trees]
        groups = [replace(group, paths=group.paths[:1]) for group in (tree.row_group() for tree in trees)]
        widest = [replace(wishes[0], width=max(wish.width for wish in wishes)) for wishes in every]
        drawn = self._children(logits, groups, widest, ids)
        for tree, wishes, children in zip(trees, every, drawn, strict=True):
            tree.add([children[: wish.width] for wish in wishes])

    def _children(
        self,
        logits: torch.Tensor,
        groups: Sequence[RowGroup],
        wishes: Sequence[RowWish],
        ids: DraftIds | None,
    ) -> list[list[Child]]:
        """The children of each row."""
        if self._far is None:
            rows = process_logits(logits, groups, self._operators)
        else:
            rows = self._far.process(logits, groups)
        return draw_children(rows, wishes, self._operators, ids, self._far)


def _by_ids(
    trees: Sequence[GrowingTree], logits: torch.Tensor, counts: Sequence[int], ids: DraftIds | None
) -> Iterator[tuple[Sequence[GrowingTree], torch.Tensor, DraftIds | None]]:
    """Trees with their rows: as they are, or over all of the target's ids where drawing needs those.

    Each tree by itself: how it is drawn does not depend on what is drawn beside it.
    """
    if ids is None or not any(tree.depends_on_ids for tree in trees):
        if trees:
            yield trees, logits, ids
        return
    parts = list(zip(trees, torch.split(logits, list(counts)), strict=True))
    for depends in (False, True):
        chosen = [(tree, rows) for tree, rows in parts if tree.depends_on_ids is depends]
        if chosen:
            rows = torch.cat([rows for _, rows in chosen])
            own = [tree for tree, _ in chosen]
            yield (own, ids.spread(rows, -torch.inf), None) if depends else (own, rows, ids)


def next_levels(
    trees: Sequence[GrowingTree], num_tokens: int
) -> Iterator[list[tuple[GrowingTree, SequenceSlice]]]:
    """The pending nodes of trees, as the passes of `num_tokens` tokens at most that compute them."""
    pieces: list[tuple[GrowingTree, SequenceSlice]] = []
    spare = num_tokens
    for tree in trees:
        while tree.num_pending:
            piece = tree.take(spare)
            pieces.append((tree, piece))
            spare -= len(piece)
            if not spare:
                yield pieces
                pieces, spare = [], num_tokens
    if pieces:
        yield pieces
