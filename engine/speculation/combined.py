"""A request's own prediction first, then the configured method."""

from collections.abc import Sequence
from dataclasses import replace

from engine.speculation.base import DraftRequest, ProposalContext, Requirements, Speculator
from engine.speculation.prediction import PredictionSpeculator
from engine.token_tree import EMPTY_TREE, TokenTree


class CombinedSpeculator:
    """The method drafts for requests whose prediction has nothing to say: it has run out, or found no place.

    A request that its prediction drafts for sits the method out. Where the method comes back to it, it
    catches up: lookups read the tokens they missed, a draft model computes them.

    Args:
        predictions: Drafts from predictions.
        method: The configured method; None for none.

    Attributes:
        predictions, method: The same.
    """

    def __init__(self, predictions: PredictionSpeculator, method: Speculator | None) -> None:
        self.predictions = predictions
        self.method = method

    @property
    def requirements(self) -> Requirements:
        """The method's."""
        return Requirements() if self.method is None else self.method.requirements

    def propose(self, context: ProposalContext) -> list[TokenTree]:
        """See Speculator; a chain from a prediction keeps to `prediction_budget` instead of `budget`."""
        requests = context.requests
        predicted = [replace(request, budget=request.prediction_budget) for request in requests]
        trees = self.predictions.propose(ProposalContext(tuple(predicted)))
        left = [place for place, tree in enumerate(trees) if not tree and self._can_draft(requests[place])]
        drafts = self._ask_method([requests[place] for place in left])
        for place, tree in zip(left, drafts, strict=True):
            trees[place] = tree
        return trees

    def num_computed_tokens(self, request_id: str) -> int:
        """The method's."""
        return 0 if self.method is None else self.method.num_computed_tokens(request_id)

    def release(self, request_id: str) -> None:
        """Both forget the request."""
        self.predictions.release(request_id)
        if self.method is not None:
            self.method.release(request_id)

    def _can_draft(self, request: DraftRequest) -> bool:
        """Whether the method has room to draft, or a prompt to follow."""
        return request.budget > 0 or request.num_computed_tokens < len(request.token_ids) - 1

    def _ask_method(self, requests: Sequence[DraftRequest]) -> list[TokenTree]:
        if self.method is None or not requests:
            return [EMPTY_TREE] * len(requests)
        return self.method.propose(ProposalContext(tuple(requests)))
