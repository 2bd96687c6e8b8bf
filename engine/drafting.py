"""Drafting: asks the speculator for the next step's trees, within what planner and block pool allow."""

import logging
from collections.abc import Sequence

from engine.core.request import Request
from engine.core.scheduler import Scheduler
from engine.speculation.base import DraftRequest, ProposalContext, Speculator
from engine.speculation.planner import Planner
from engine.speculation.prediction import PredictionSpeculator
from engine.token_tree import EMPTY_TREE, MAX_NODES, TokenTree

logger = logging.getLogger(__name__)


class Drafting:
    """Speculation as the engine core uses it.

    Args:
        method: The method's name, for the log.
        speculator: Who proposes.
        planner: How many nodes each request gets.
        vocab_size: Draft tokens must be below it.
        predictions: The part of the speculator that follows predictions; None ignores them.
    """

    def __init__(
        self,
        method: str,
        speculator: Speculator,
        planner: Planner,
        vocab_size: int,
        predictions: PredictionSpeculator | None = None,
    ) -> None:
        self.method = method
        self._speculator = speculator
        self._planner = planner
        self._vocab_size = vocab_size
        self._predictions = predictions
        self._outgrown: set[str] = set()

    def propose(self, scheduler: Scheduler) -> int:
        """Gives every running request its draft for the next step.

        A speculator that raises costs this step's drafts and nothing else.

        Returns:
            Requests that have just outgrown the draft's context and decode plainly from here on.
        """
        num_outgrown = 0
        wanted: list[tuple[Request, DraftRequest]] = []
        for request in scheduler.running:
            if not request.params.speculation.enabled:
                continue
            outgrown = self._planner.has_outgrown(request)
            if outgrown:
                num_outgrown += self._note_outgrown(request)
            if not request.params.speculation.prediction and self._draft_forced(request, scheduler):
                continue
            draft_request = self._ask(request, scheduler, outgrown=outgrown)
            if draft_request is not None:
                wanted.append((request, draft_request))
        if not wanted:
            return num_outgrown
        trees = self._trees(ProposalContext(tuple(draft_request for _, draft_request in wanted)))
        for (request, _), tree in zip(wanted, trees, strict=True):
            if request.matcher is not None and not tree.proposal.is_drawn:
                tree = request.matcher.pruned(tree)
            request.draft = tree
            if not tree and request.params.speculation.prediction:
                self._draft_forced(request, scheduler)
        return num_outgrown

    def _trees(self, context: ProposalContext) -> list[TokenTree]:
        try:
            trees = self._speculator.propose(context)
            self._check(context.requests, trees)
        except Exception:
            logger.exception("drafting with %s failed; this step goes on without drafts", self.method)
            return [EMPTY_TREE] * len(context.requests)
        return trees

    def num_found(self, request: Request) -> int:
        """How many tokens of its own prediction the request's answer has so far."""
        speculation = request.params.speculation
        if self._predictions is None or not speculation.enabled or not speculation.prediction:
            return 0
        return self._predictions.num_found(
            request.request_id, speculation.prediction, request.token_ids, request.num_prompt_tokens
        )

    def num_computed_tokens(self, request: Request) -> int:
        """Leading tokens of the request that the speculator's cache holds."""
        return self._speculator.num_computed_tokens(request.request_id)

    def release(self, request: Request) -> None:
        """Forgets a request that ended or lost its blocks."""
        self._speculator.release(request.request_id)

    def retire(self, request: Request) -> None:
        """Forgets a request that ended, but for its text where texts are shared and it takes part."""
        store = self._speculator.requirements.text_store
        if store is not None and request.params.speculation.enabled:
            store.add(request.params.cache_scope, request.token_ids, request.num_prompt_tokens)
        self.release(request)
        self._outgrown.discard(request.request_id)

    def _draft_forced(self, request: Request, scheduler: Scheduler) -> bool:
        """Drafts what the request's grammar leaves no choice about; whether there is such a thing.

        It costs nothing to find and nearly always stands, so the speculator's opinion is not asked.
        """
        if request.matcher is None or request.num_uncomputed_tokens > 1:
            return False
        wanted = min(
            self._planner.max_depth(request), request.params.speculation.num_draft_tokens or MAX_NODES
        )
        forced = request.matcher.forced_tokens()[:wanted]
        request.draft = TokenTree.chain(forced[: scheduler.grant_lookahead(request, len(forced))])
        return len(request.draft) > 0

    def _ask(self, request: Request, scheduler: Scheduler, *, outgrown: bool) -> DraftRequest | None:
        """What to ask for one request; None if there is nothing to gain.

        Where a request has outgrown the speculator, its own prediction may still draft.
        """
        budget = predicted = 0
        if request.num_uncomputed_tokens > 1:
            if outgrown or not self._speculator.requirements.has_cache:
                return None
        else:
            budget = 0 if outgrown else self._planner.node_budget(request)
            predicted = 0 if self._predictions is None else self._planner.prediction_budget(request)
            granted = scheduler.grant_lookahead(request, max(budget, predicted))
            budget, predicted = min(budget, granted), min(predicted, granted)
            if granted == 0:
                return None
        return DraftRequest(
            request_id=request.request_id,
            token_ids=request.token_ids,
            num_prompt_tokens=request.num_prompt_tokens,
            num_computed_tokens=request.num_computed_tokens,
            num_cached_tokens=request.num_draft_cached_tokens,
            block_table=scheduler.kv.block_table(request),
            params=request.params,
            budget=budget,
            max_depth=self._planner.max_depth(request),
            matcher=request.matcher,
            num_requests=len(scheduler.running),
            prediction_budget=predicted,
        )

    def _check(self, requests: Sequence[DraftRequest], trees: Sequence[TokenTree]) -> None:
        """Raises ValueError where a speculator breaks its contract."""
        for request, tree in zip(requests, trees, strict=True):
            budget = max(request.budget, request.prediction_budget)
            max_depth = max(request.max_depth, request.prediction_budget)
            if len(tree) > budget:
                raise ValueError(f"{len(tree)} draft nodes proposed, but the budget was {budget}")
            if max(tree.depths()) > max_depth:
                raise ValueError(f"a draft of {max(tree.depths())} levels has room for {max_depth}")
            for token in tree.tokens:
                if not 0 <= token < self._vocab_size:
                    raise ValueError(f"draft token {token} is outside 0 to {self._vocab_size - 1}")

    def _note_outgrown(self, request: Request) -> bool:
        if request.request_id in self._outgrown:
            return False
        self._outgrown.add(request.request_id)
        logger.info(
            "request %s has %d tokens, more than the draft's context holds: it decodes plainly from here on",
            request.request_id,
            request.num_tokens,
        )
        return True
