"""A smaller model of the same vocabulary drafts (Leviathan et al. 2023; as trees: Miao et al. 2023)."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from engine.model.input_batch import SequenceSlice
from engine.model.model_runner import ModelRunner
from engine.speculation.base import DraftRequest, ProposalContext, Requirements
from engine.speculation.draft_cache import Motion, Progress, cached_path, moves, plan_motions
from engine.speculation.draft_ids import DraftIds
from engine.speculation.draft_vocabulary import DraftVocabulary
from engine.speculation.growing import TreeGrower, next_levels
from engine.speculation.growing_tree import GrowingTree
from engine.token_tree import EMPTY_TREE, TokenTree


@dataclass(frozen=True, slots=True)
class DraftLimits:
    """What bounds a draft model's passes.

    Attributes:
        max_model_len: Positions that the draft model has.
        max_num_batched_tokens: Tokens of one forward pass at most.
    """

    max_model_len: int
    max_num_batched_tokens: int


class DraftModelSpeculator:
    """Drafts with a model that has a cache of its own, indexed by the engine's block tables.

    The cache follows the one rule of motion: a step computes the positions from what is computed to what is
    committed, and then the draft itself, a pass per level for all requests. The last level's tokens need no
    pass. With n committed tokens, a chain d1 ... d4 and a tree:

        committed     chain                    tree                what the next step finds
        ... x    │ d1   d2   d3  (d4)      │ a    b    c   (d)     accepted nodes, b and c say, are moved
        slot n-1 │ n    n+1  n+2           │ n    n+1  n+2         together to slots n and n + 1; d4 and d,
                                                                   drawn but not computed, are the first
                                                                   tokens of the next catch-up if they stand

    Args:
        runner: The draft model. Its vocab_size is the target's, so that no other id is ever drafted.
        limits: What bounds its passes.
        grower: Which trees it grows, and how their tokens are drawn.
        vocabulary: Which tokens it may draft; None is all of them.
    """

    def __init__(
        self,
        runner: ModelRunner,
        limits: DraftLimits,
        grower: TreeGrower,
        vocabulary: DraftVocabulary | None = None,
    ) -> None:
        self._runner = runner
        self._vocabulary = vocabulary
        self._limits = limits
        self._grower = grower
        self._progress: dict[str, Progress] = {}
        self._step = 0
        self._requirements = Requirements(
            has_cache=True,
            max_model_len=limits.max_model_len,
            branches=grower.branches,
            shape=grower.usual_shape,
            ends_early=grower.ends_early,
        )

    @property
    def requirements(self) -> Requirements:
        """A cache beside the target's, and drafts within the draft model's context."""
        return self._requirements

    @torch.inference_mode()
    def propose(self, context: ProposalContext) -> list[TokenTree]:
        """See Speculator. One pass catches up for all requests, then one pass per further level."""
        self._step += 1
        # One order for the batch, whoever comes first in the context: rows may differ in their last bits
        # with their place in a matrix product.
        requests = sorted(context.requests, key=lambda request: request.request_id)
        self._settle(requests)
        if self._vocabulary is not None:
            self._vocabulary.follow(requests)
        growing = self._catch_up(plan_motions(self._motions(requests), self._limits.max_num_batched_tokens))
        grown = list(growing)
        while growing := [tree for tree in growing if tree.num_pending]:
            self._grow(growing)
        trees = {tree.request.request_id: tree.tree() for tree in grown}
        for request_id, tree in trees.items():
            self._progress[request_id] = self._progress[request_id].with_proposed(tree)
        return [trees.get(request.request_id, EMPTY_TREE) for request in context.requests]

    def num_computed_tokens(self, request_id: str) -> int:
        """Committed tokens in the draft's cache; drafted ones count once a step finds them committed."""
        progress = self._progress.get(request_id)
        return 0 if progress is None else progress.num_computed

    def release(self, request_id: str) -> None:
        """Forgets how far the request's cache was."""
        self._progress.pop(request_id, None)
        if self._vocabulary is not None:
            self._vocabulary.release(request_id)

    def _settle(self, requests: Sequence[DraftRequest]) -> None:
        """Puts the last drafts' accepted nodes in line, in all layers at once, and learns from verdicts."""
        settled: dict[str, Progress] = {}
        sources: list[int] = []
        targets: list[int] = []
        for request in requests:
            progress = self._progress.get(request.request_id)
            if progress is None:
                continue
            self._grower.note(progress.proposed, request.token_ids[progress.num_computed :])
            # Whoever sat a step out may share its blocks by now with a request that computed them anew,
            # over the scratch slots.
            path = cached_path(progress, request.token_ids, is_recent=progress.step == self._step - 1)
            for source, target in moves(progress, path, request.block_table, self._runner.cache.block_size):
                sources.append(source)
                targets.append(target)
            settled[request.request_id] = Progress(progress.num_computed + len(path))
        self._runner.cache.move(sources, targets)
        self._progress |= settled

    def _motions(self, requests: Sequence[DraftRequest]) -> Iterator[Motion]:
        """From what is computed to what is wanted, where anything is to be done."""
        for request in requests:
            num_tokens = len(request.token_ids)
            if num_tokens >= self._limits.max_model_len:
                continue
            progress = self._progress.get(request.request_id)
            begin = request.num_cached_tokens if progress is None else progress.num_computed
            if request.budget > 0:
                # The last token's row is the first level's: it is computed again if nothing has come since.
                yield Motion(request, min(begin, num_tokens - 1), num_tokens)
            elif begin < request.num_computed_tokens < num_tokens - 1:
                yield Motion(request, begin, request.num_computed_tokens)

    def _catch_up(self, motions: Sequence[Motion]) -> list[GrowingTree]:
        """Computes committed tokens and draws the first level of every request that is up to date."""
        if not motions:
            return []
        logits, ids = self._rows([(motion.request, motion.slice()) for motion in motions])
        for motion in motions:
            self._progress[motion.request.request_id] = Progress(motion.end, step=self._step)
        trees = [
            self._grower.start(motion.request, self._limits.max_model_len - motion.end)
            for motion in motions
            if motion.is_complete
        ]
        self._grower.draw(trees, logits, ids)
        return trees

    def _grow(self, trees: Sequence[GrowingTree]) -> None:
        """Computes the pending level of each tree and draws the next one."""
        passes = [
            self._rows([(tree.request, piece) for tree, piece in pieces])
            for pieces in next_levels(trees, self._limits.max_num_batched_tokens)
        ]
        for tree in trees:
            request = tree.request
            progress = Progress(len(request.token_ids), tree.placed(), step=self._step)
            self._progress[request.request_id] = progress
        self._grower.draw(trees, torch.cat([logits for logits, _ in passes]), passes[0][1])

    def _rows(
        self, pieces: Sequence[tuple[DraftRequest, SequenceSlice]]
    ) -> tuple[torch.Tensor, DraftIds | None]:
        """A pass: the logits of the wanted rows, and what their entries stand for if not the target's ids."""
        batch = self._runner.build([piece for _, piece in pieces])
        if self._vocabulary is None:
            return self._runner.forward(batch), None
        owners = [request.request_id for request, piece in pieces for _ in range(piece.rows)]
        return self._vocabulary.forward(batch, owners), self._vocabulary.ids
