"""Drafter: one method as an engine runs it, with its room, and with its calls checked and timed."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from engine.acceptance import proposal_for
from engine.core.request import Request
from engine.core.scheduler import Scheduler
from engine.speculation.base import DraftRequest, FeatureRows, ProposalContext, Requirements, Speculator
from engine.speculation.draft_room import DraftRoom
from engine.speculation.evidence import ALONE, RowPrice
from engine.speculation.planner import Wish
from engine.token_tree import EMPTY_TREE, TokenTree

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Called:
    """What a call of a speculator came to.

    Attributes:
        trees: One per request; empty ones where it failed.
        num_levels: Of the deepest tree.
        num_rows: Nodes drafted, and tokens that a cache caught up with.
        seconds: How long it took; None if it failed.
    """

    trees: Sequence[TokenTree]
    num_levels: int = 0
    num_rows: int = 0
    seconds: float | None = None


def everyone(request: Request) -> bool:
    """Serves all requests."""
    return True


@dataclass(slots=True)
class Drafter:
    """A method as it is set up here.

    Attributes:
        method: Its name, for the log and for reports.
        speculator: Who proposes.
        room: What its drafts may take.
        vocab_size: Draft tokens must be below it.
        serves: Which requests have something for it to go by.
        needs: What the speculator needs of the engine.
    """

    method: str
    speculator: Speculator
    room: DraftRoom
    vocab_size: int
    serves: Callable[[Request], bool] = everyone
    needs: Requirements = field(init=False)

    def __post_init__(self) -> None:
        self.needs = self.speculator.requirements

    def num_nodes(self, request: Request) -> int:
        """Draft nodes that a request has room for."""
        is_idle = not self.serves(request) or self.room.has_outgrown(request) or self._lost(request)
        return 0 if is_idle else self.room.node_budget(request)

    def _lost(self, request: Request) -> bool:
        return self.needs.follows and not request.needs_draft_cache

    def wish(self, place: int, request: Request) -> Wish | None:
        """What a decoding request could use; None if there is no room."""
        num_nodes = self.num_nodes(request)
        if not num_nodes:
            return None
        num_behind = 1
        if self.needs.has_cache:
            computed = self.speculator.num_computed_tokens(request.request_id)
            num_behind = request.num_tokens - max(computed, request.num_draft_cached_tokens)
        ends_early = self.needs.ends_early and not proposal_for(request.params, distinct=False).is_drawn
        return Wish(
            place, request.request_id, num_nodes, self.room.max_depth(request), num_behind, ends_early
        )

    def ask(
        self,
        request: Request,
        scheduler: Scheduler,
        limits: tuple[int, int],
        price: RowPrice = ALONE,
        features: FeatureRows | None = None,
        least: float = 0.0,
    ) -> DraftRequest:
        """The request as the speculator sees it, with blocks for its nodes if the pool has some to spare.

        Args:
            request: Whose draft it is.
            scheduler: Hands out the blocks.
            limits: Nodes and levels at most; no nodes let a cache follow and no more.
            price: What a row costs.
            features: What the last step computed of it, for those who read hidden states.
            least: Where a chain is to end; see DraftRequest.
        """
        num_nodes, max_depth = limits
        return DraftRequest(
            request_id=request.request_id,
            token_ids=request.token_ids,
            num_prompt_tokens=request.num_prompt_tokens,
            num_computed_tokens=request.num_computed_tokens,
            num_cached_tokens=request.num_draft_cached_tokens,
            budget=scheduler.grant_lookahead(request, num_nodes) if num_nodes else 0,
            block_table=scheduler.kv.block_table(request),
            params=request.params,
            max_depth=min(max_depth, self.room.max_depth(request)),
            least=least,
            price=price,
            features=features,
            matcher=request.matcher,
        )

    def call(self, requests: Sequence[DraftRequest], clock: Callable[[], float]) -> Called:
        """Lets the speculator propose; one that raises costs its drafts of this step and nothing else."""
        before = self._num_computed(requests)
        began = clock()
        try:
            trees = self.speculator.propose(ProposalContext(tuple(requests)))
            num_levels = self._check(requests, trees)
        except Exception:
            logger.exception("drafting with %s failed; this step goes on without its drafts", self.method)
            return Called([EMPTY_TREE] * len(requests))
        seconds = clock() - began
        num_caught_up = sum(
            max(0, computed - known)
            for computed, known in zip(self._num_computed(requests), before, strict=True)
        )
        trees = [_legal(request, tree) for request, tree in zip(requests, trees, strict=True)]
        return Called(trees, num_levels, num_caught_up + sum(map(len, trees)), seconds)

    def _num_computed(self, requests: Sequence[DraftRequest]) -> list[int]:
        """Tokens of each request in the speculator's cache."""
        if not self.needs.has_cache:
            return []
        return [self.speculator.num_computed_tokens(request.request_id) for request in requests]

    def _check(self, requests: Sequence[DraftRequest], trees: Sequence[TokenTree]) -> int:
        """The levels of the deepest tree; raises ValueError where a speculator breaks its contract."""
        num_levels = 0
        for request, tree in zip(requests, trees, strict=True):
            if not len(tree):
                continue
            if len(tree) > request.budget:
                raise ValueError(f"{len(tree)} draft nodes proposed, but the budget was {request.budget}")
            depth = max(tree.depths())
            num_levels = max(num_levels, depth)
            if depth > request.max_depth:
                raise ValueError(f"a draft of {depth} levels has room for {request.max_depth}")
            if self.needs.estimates and (tree.proposal.is_drawn or len(tree.probabilities) != len(tree)):
                raise ValueError("a tree that may be cut by its estimates has one per node, and is not drawn")
            for token in (min(tree.tokens), max(tree.tokens)):
                if not 0 <= token < self.vocab_size:
                    raise ValueError(f"draft token {token} is outside 0 to {self.vocab_size - 1}")
        return num_levels


def _legal(request: DraftRequest, tree: TokenTree) -> TokenTree:
    """A tree without what the grammar does not allow; drawn tokens come from masked rows already."""
    if request.matcher is None or tree.proposal.is_drawn:
        return tree
    return request.matcher.pruned(tree)
