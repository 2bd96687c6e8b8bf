"""Several speculators feed one tree, as SpecInfer's collection of draft models does (Miao et al. 2023)."""

from collections.abc import Sequence
from dataclasses import replace

from engine.speculation.base import DraftRequest, ProposalContext, Requirements, Speculator
from engine.speculation.merging import merge_trees
from engine.speculation.tree_shape import TreeShape
from engine.token_tree import MAX_NODES, TokenTree


class SeveralSpeculators:
    """Asks each for its share of a request's nodes and merges what they say; for the match rule only.

    Drafts that several agree on share their nodes. A block of the prefix cache counts as drafted only if it
    is in every cache.

    Args:
        members: Who proposes; what the first says comes first.
    """

    def __init__(self, members: Sequence[Speculator]) -> None:
        self._members = tuple(members)
        wanted = [member.requirements for member in members]
        lengths = [each.max_model_len for each in wanted if each.max_model_len is not None]
        self._requirements = Requirements(
            has_cache=any(each.has_cache for each in wanted),
            max_model_len=min(lengths, default=None),
            branches=True,
            shape=_side_by_side(wanted),
        )

    @property
    def requirements(self) -> Requirements:
        """A cache if anyone has one, the shortest context, and trees in any case."""
        return self._requirements

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


def _side_by_side(wanted: Sequence[Requirements]) -> TreeShape | None:
    """The shape of trees that share nothing but the root, the members taking turns.

    Drafts that agree share nodes, so the merged trees are smaller; the later members' nodes count as those
    of later ranks, which stand less often, and that is about what they are.
    """
    shapes = [each.shape or TreeShape.chain(MAX_NODES // len(wanted)) for each in wanted]
    parents: list[int] = []
    numbers: list[list[int]] = [[0] for _ in shapes]
    for place in range(max(map(len, shapes))):
        for shape, own in zip(shapes, numbers, strict=True):
            if place < len(shape) and len(parents) < MAX_NODES:
                parents.append(own[shape.parents[place]])
                own.append(len(parents))
    return TreeShape(tuple(parents))
