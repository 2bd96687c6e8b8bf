"""An EAGLE head drafts: one layer that reads the target's hidden states (Li et al. 2024, EAGLE-1 to 3)."""

from collections.abc import Mapping, Sequence

import torch

from engine.model.hidden_states import HiddenSelection
from engine.model.input_batch import SequenceSlice
from engine.sampling.uploading import upload
from engine.speculation.base import DraftRequest, ProposalContext, Requirements
from engine.speculation.chain import ChainWish
from engine.speculation.draft_cache import Motion, plan_motions
from engine.speculation.growing import TreeGrower, next_levels
from engine.speculation.growing_tree import GrowingTree
from engine.speculation.head_progress import BoundaryFeatures, HeadProgress
from engine.speculation.head_runner import HeadRunner
from engine.token_tree import EMPTY_TREE, TokenTree


class EagleSpeculator:
    """Drafts with a head that has a cache of its own, indexed by the engine's block tables.

    Slot p holds token p and the feature of position p - 1. With n committed tokens the target has computed
    positions up to n - 2, so that the head can compute up to slot n - 1, whose row says token n:

        slot        n-3    n-2    n-1  │  n     n+1         scratch: the draft, a pass per level
        token       t      t      x    │  d1    d2
        feature of  n-4    n-3    n-2  │  own output of the slot above

    What the scratch slots hold is made of the head's own guesses and never kept: accepted tokens are computed
    again from what the target says of them. Requests that get no draft leave their features lying, and the
    head reads them once they are many or a draft is wanted. A request that begins with cached blocks needs
    the feature before its first token; the last of each block is kept for that.

    Args:
        runner: The head.
        hidden_states: What it reads of the target.
        boundaries: Kept features, one per block.
        max_num_batched_tokens: Tokens of one pass at most.
        grower: Which trees it grows, and how their tokens are drawn.
    """

    def __init__(
        self,
        runner: HeadRunner,
        hidden_states: HiddenSelection,
        boundaries: BoundaryFeatures,
        max_num_batched_tokens: int,
        grower: TreeGrower,
    ) -> None:
        self._runner = runner
        self._boundaries = boundaries
        self._max_num_batched_tokens = max_num_batched_tokens
        self._grower = grower
        self._progress: dict[str, HeadProgress] = {}
        self._requirements = Requirements(
            has_cache=True,
            branches=grower.branches,
            hidden_states=hidden_states,
            shape=grower.usual_shape,
            ends_early=grower.ends_early,
        )

    @property
    def requirements(self) -> Requirements:
        """A cache beside the target's, filled from its hidden states."""
        return self._requirements

    @torch.inference_mode()
    def propose(self, context: ProposalContext) -> list[TokenTree]:
        """See Speculator. One pass catches up for all requests, then one pass per further level."""
        # One order for the batch, whoever comes first in the context: rows may differ in their last bits
        # with their place in a matrix product.
        requests = sorted(context.requests, key=lambda request: request.request_id)
        # First of all, so that nothing that fails later loses features.
        self._see(requests)
        motions = [self._progress[request.request_id].motion(request) for request in requests]
        wanted = [motion for motion in motions if motion is not None]
        grown = self._draft(plan_motions(wanted, self._max_num_batched_tokens))
        trees = {tree.request.request_id: tree.tree() for tree in grown}
        for request in requests:
            tree = trees.get(request.request_id, EMPTY_TREE)
            self._progress[request.request_id].propose(tree, len(request.token_ids))
        return [trees.get(request.request_id, EMPTY_TREE) for request in context.requests]

    def num_computed_tokens(self, request_id: str) -> int:
        """Committed tokens in the head's cache that somebody else could go on from."""
        progress = self._progress.get(request_id)
        return 0 if progress is None else progress.num_followed

    def release(self, request_id: str) -> None:
        """Forgets how far the request was followed."""
        self._progress.pop(request_id, None)

    def _see(self, requests: Sequence[DraftRequest]) -> None:
        """Takes what came by since the last step: features, and the verdict on the last draft."""
        for request in requests:
            progress = self._progress.get(request.request_id)
            if progress is None:
                progress = HeadProgress(request.num_cached_tokens, self._boundaries.behind(request))
                self._progress[request.request_id] = progress
            if request.features is not None:
                progress.see(request.features)
            self._grower.note(*progress.take_verdict(request.token_ids))
        self._boundaries.keep(requests)

    def _draft(self, motions: Sequence[Motion]) -> list[GrowingTree]:
        """Computes committed tokens, and grows the tree of every request that is up to date."""
        trees = {m.request.request_id: self._grower.start(m.request) for m in motions if m.is_complete}
        wishes: dict[str, ChainWish] = {}
        if self._runner.drafts_chains:
            asked = ((request_id, tree.chain()) for request_id, tree in trees.items())
            wishes = {request_id: wish for request_id, wish in asked if wish is not None}
        by_level: list[Motion] = []
        at_once: list[Motion] = []
        for motion in motions:
            # What drafts nothing goes with the others.
            is_chain = motion.request.request_id in wishes or (wishes and not motion.is_complete)
            (at_once if is_chain else by_level).append(motion)
        if at_once:
            self._draft_chains(at_once, trees, wishes)
        if by_level:
            self._draft_by_levels(by_level, trees)
        return list(trees.values())

    def _draft_chains(
        self, motions: Sequence[Motion], trees: Mapping[str, GrowingTree], wishes: Mapping[str, ChainWish]
    ) -> None:
        """Computes committed tokens and all chains behind them in one go."""
        asked = [wishes.get(motion.request.request_id) for motion in motions]
        drafted = self._runner.draft([motion.slice() for motion in motions], self._take(motions), asked)
        complete = (trees[motion.request.request_id] for motion in motions if motion.is_complete)
        for tree, chain in zip(complete, drafted, strict=True):
            tree.fill(chain)
        self._note_computed(motions)

    def _take(self, motions: Sequence[Motion]) -> torch.Tensor:
        """What the tokens of motions read of the target."""
        features = [self._progress[each.request.request_id].features(each) for each in motions]
        return features[0] if len(features) == 1 else torch.cat(features)

    def _note_computed(self, motions: Sequence[Motion]) -> None:
        for motion in motions:
            self._progress[motion.request.request_id].compute(motion.end)

    def _draft_by_levels(self, motions: Sequence[Motion], trees: Mapping[str, GrowingTree]) -> None:
        """Computes committed tokens, and then a level of all trees after the other."""
        output = self._runner.absorb([motion.slice() for motion in motions], self._take(motions))
        self._note_computed(motions)
        grown = [trees[motion.request.request_id] for motion in motions if motion.is_complete]
        if not grown:
            return
        states = _CarriedStates(grown, output.carried)
        self._grower.draw(grown, output.logits, output.ids)
        while growing := [tree for tree in grown if tree.num_pending]:
            logits: list[torch.Tensor] = []
            for pieces in next_levels(growing, self._max_num_batched_tokens):
                level = self._runner.extend([piece for _, piece in pieces], states.above(pieces))
                states.add(pieces, level.carried)
                logits.append(level.logits)
            self._grower.draw(growing, torch.cat(logits), output.ids)


class _CarriedStates:
    """What computed rows carry to their children: per tree the root's, then one per place.

    Args:
        trees: Trees that have begun.
        roots: [len(trees), hidden_size].
    """

    def __init__(self, trees: Sequence[GrowingTree], roots: torch.Tensor) -> None:
        self._rows = roots
        self._places = {tree.request.request_id: [number] for number, tree in enumerate(trees)}

    def above(self, pieces: Sequence[tuple[GrowingTree, SequenceSlice]]) -> torch.Tensor:
        """The rows of the parents of the nodes in a pass."""
        index = [
            self._places[tree.request.request_id][parent]
            for tree, piece in pieces
            for parent in piece.tree.parents[piece.num_cached_nodes :]
        ]
        return self._rows[upload(index, torch.int64, self._rows.device)]

    def add(self, pieces: Sequence[tuple[GrowingTree, SequenceSlice]], rows: torch.Tensor) -> None:
        """Enters the rows of a pass."""
        place = len(self._rows)
        for tree, piece in pieces:
            self._places[tree.request.request_id] += range(place, place + len(piece))
            place += len(piece)
        self._rows = torch.cat([self._rows, rows])
