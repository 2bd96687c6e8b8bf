"""Several speculators feed one tree, as SpecInfer's collection of draft models does (Miao et al. 2023)."""

from collections.abc import Sequence
from dataclasses import replace

from engine.speculation.base import DraftRequest, ProposalContext, Requirements, Speculator
from engine.speculation.merging import merge_trees
from engine.token_tree import TokenTree


class SeveralSpeculators:
    """Asks each for its share of a request's nodes and merges what they say; for the match rule only.

    Drafts that several agree on share their nodes. A block of the prefix cache counts as drafted only if it
    is in every cache.

    Args:
        members: Who proposes; what the first says comes first.
    """

    def __init__(self, members: Sequence[Speculator]) -> None:
        self._members = tuple(members)

    @property
    def requirements(self) -> Requirements:
        """A cache if anyone has one, the shortest context, and trees in any case."""
        wanted = [member.requirements for member in self._members]
        lengths = [each.max_model_len for each in wanted if each.max_model_len is not None]
        return Requirements(
            has_cache=any(each.has_cache for each in wanted),
            max_model_len=min(lengths, default=None),
            branches=True,
        )

    def propose(self, context: ProposalContext) -> list[TokenTree]:
        """See Speculator."""
        proposed = [
            member.propose(
                ProposalContext(tuple(self._share(request, place) for request in context.requests))
            )
            for place, member in enumerate(self._members)
        ]
        return [
            merge_trees(trees, request.budget)
            for request, trees in zip(context.requests, zip(*proposed, strict=True), strict=True)
        ]

    def num_computed_tokens(self, request_id: str) -> int:
        """Tokens in the cache that is furthest behind."""
        counts = [
            member.num_computed_tokens(request_id)
            for member in self._members
            if member.requirements.has_cache
        ]
        return min(counts, default=0)

    def release(self, request_id: str) -> None:
        """Every member forgets the request."""
        for member in self._members:
            member.release(request_id)

    def _share(self, request: DraftRequest, place: int) -> DraftRequest:
        """The request with an equal part of its budget; what is left over goes to the first members."""
        share, rest = divmod(request.budget, len(self._members))
        return replace(request, budget=share + (place < rest))
