"""Medusa heads draft: each guesses a token further on from the target's last state (Cai et al. 2024)."""

import torch

from engine.model.hidden_states import HiddenSelection
from engine.sampling.uploading import upload
from engine.speculation.base import DraftRequest, ProposalContext, Requirements
from engine.speculation.growing import TreeGrower
from engine.speculation.growing_tree import GrowingTree
from engine.speculation.medusa_runner import MedusaRunner
from engine.token_tree import EMPTY_TREE, TokenTree


class MedusaSpeculator:
    """Drafts from one hidden state per request; there is no cache and nothing to catch up with.

    With n committed tokens the target has computed position n - 2, whose state gave token n - 1. Head i says
    token n + i from the same state, whatever stands between:

        position    n-3   n-2   n-1   │   n     n+1     n+2
        token       t     t     x     │   head 0, head 1, head 2      all from the state at n - 2

    So all nodes of a level have the same candidates, and a tree is made of the paths through them that are
    likeliest to be right.

    Args:
        runner: The heads.
        grower: Which trees it grows, and how their tokens are drawn.
    """

    def __init__(self, runner: MedusaRunner, grower: TreeGrower) -> None:
        self._runner = runner
        self._grower = grower
        self._proposed: dict[str, tuple[TokenTree, int]] = {}
        self._requirements = Requirements(
            branches=grower.branches, hidden_states=HiddenSelection(last=True), shape=grower.usual_shape
        )

    @property
    def requirements(self) -> Requirements:
        """The state that the target's own output layer sees."""
        return self._requirements

    @torch.inference_mode()
    def propose(self, context: ProposalContext) -> list[TokenTree]:
        """See Speculator. One pass of all heads for all requests."""
        # One order for the batch, whoever comes first in the context: rows may differ in their last bits
        # with their place in a matrix product.
        requests = sorted(context.requests, key=lambda request: request.request_id)
        states: list[torch.Tensor] = []
        trees: list[GrowingTree] = []
        for request in requests:
            self._note(request)
            features = request.features
            if request.budget and features is not None and features.end == len(request.token_ids) - 1:
                states.append(features.rows[-1])
                trees.append(self._grower.start(request, self._runner.num_heads))
        if trees:
            self._grow(trees, torch.stack(states))
        drafts = {tree.request.request_id: tree.tree() for tree in trees}
        for request in requests:
            if request.request_id in drafts:
                self._proposed[request.request_id] = drafts[request.request_id], len(request.token_ids)
        return [drafts.get(request.request_id, EMPTY_TREE) for request in context.requests]

    def num_computed_tokens(self, request_id: str) -> int:
        """There is no cache."""
        return 0

    def release(self, request_id: str) -> None:
        """Forgets the request's last draft."""
        self._proposed.pop(request_id, None)

    def _note(self, request: DraftRequest) -> None:
        """Learns from the verdict on a request's last draft."""
        proposed = self._proposed.pop(request.request_id, None)
        if proposed is not None:
            tree, num_tokens = proposed
            self._grower.note(tree, request.token_ids[num_tokens:])

    def _grow(self, trees: list[GrowingTree], states: torch.Tensor) -> None:
        """Grows each tree, a head per level.

        Args:
            trees: Trees without nodes.
            states: [len(trees), hidden_size].
        """
        logits = self._runner.forward(states)
        growing = list(range(len(trees)))
        for level in logits:  # [len(trees), rows of a head]
            index = upload(growing, torch.int64, level.device)
            self._grower.draw_alike([trees[place] for place in growing], level[index], self._runner.ids)
            growing = [place for place in growing if trees[place].num_pending]
            for place in growing:
                trees[place].take(trees[place].num_pending)
            if not growing:
                break
