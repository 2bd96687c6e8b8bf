"""The scheduler: which tokens the next step computes, and what becomes of them."""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from engine.core.kv_cache_manager import KVCacheManager
from engine.core.request import Request, RequestStatus
from engine.token_tree import EMPTY_TREE, TokenTree


@dataclass(frozen=True, slots=True)
class ScheduledRequest:
    """A request's part of a step.

    Attributes:
        request: Which one.
        num_tokens: Committed tokens to compute, from request.num_computed_tokens on.
        tree: Draft nodes to verify; empty unless the committed tokens are all computed in this step.
        reaches_end: Whether the step computes the last committed token, so that a new one is chosen.
    """

    request: Request
    num_tokens: int
    tree: TokenTree
    reaches_end: bool


@dataclass(frozen=True, slots=True)
class SchedulerOutput:
    """One step's plan.

    Attributes:
        scheduled: What to compute.
        preempted: Requests that lost their blocks and wait again.
        prefix_cache_queries, prefix_cache_hits: Tokens looked up and found for newly admitted requests.
    """

    scheduled: tuple[ScheduledRequest, ...]
    preempted: tuple[Request, ...]
    prefix_cache_queries: int
    prefix_cache_hits: int


class Scheduler:
    """Continuous batching: running requests first, then waiting ones, within a token budget.

    Every running request gets a token per step. What is left goes to draft nodes (half of it at most
    while prompts are still to be read), then to prompt chunks. When the pool is dry, the youngest running
    request loses its blocks and goes back to the head of the queue; its text is not affected.
    """

    def __init__(self, kv: KVCacheManager, *, max_num_seqs: int, max_num_batched_tokens: int) -> None:
        self.kv = kv
        self.running: list[Request] = []
        self.waiting: deque[Request] = deque()
        self._max_num_seqs = max_num_seqs
        self._max_num_batched_tokens = max_num_batched_tokens

    @property
    def has_work(self) -> bool:
        """Whether a step would compute anything."""
        return bool(self.running or self.waiting)

    def add(self, request: Request) -> None:
        """Queues a request behind those that are as urgent, and in front of those that are less."""
        place = len(self.waiting)
        while place and self.waiting[place - 1].params.priority > request.params.priority:
            place -= 1
        self.waiting.insert(place, request)

    def schedule(self) -> SchedulerOutput:
        """Plans one step and allocates its blocks."""
        budget = self._max_num_batched_tokens
        draft_budget = self.num_draft_rows()
        scheduled: list[ScheduledRequest] = []
        preempted: list[Request] = []
        for index, request in enumerate(list(self.running)):
            if request.status is not RequestStatus.RUNNING:
                break  # It and all younger ones were preempted below.
            num_younger = len(self.running) - index - 1
            spare = budget - num_younger
            if request.num_uncomputed_tokens == 1:
                spare = min(spare, 1 + draft_budget)
            item = self._make_room(self._fit(request, spare), preempted)
            if item is None:
                break
            scheduled.append(item)
            budget -= item.num_tokens + len(item.tree)
            draft_budget -= len(item.tree)
        queries = hits = 0
        # Whoever was just preempted would be admitted again at once, only to be preempted once more.
        while not preempted and budget > 0 and self.waiting and len(self.running) < self._max_num_seqs:
            request = self.waiting[0]
            if not self._admit(request, budget):
                break
            queries += self.kv.num_looked_up(request)
            hits += request.num_cached_tokens
            admitted = self._fit(request, budget)
            scheduled.append(admitted)
            budget -= admitted.num_tokens
        return SchedulerOutput(tuple(scheduled), tuple(preempted), queries, hits)

    def update(self, item: ScheduledRequest, run: Iterable[int], num_accepted: int) -> None:
        """Enters what a step computed and committed.

        Args:
            item: The request's part of the step.
            run: The tokens that stand, stops applied: accepted draft tokens, then the target's own.
            num_accepted: How many of them are draft tokens, whose keys and values the step computed.
        """
        request = item.request
        request.num_computed_tokens += item.num_tokens + num_accepted
        request.token_ids.extend(run)
        request.draft = EMPTY_TREE

    def grant_lookahead(self, request: Request, num_nodes: int) -> int:
        """Blocks for draft nodes behind the committed tokens; how many of num_nodes they can hold.

        Drafts never push anyone out: they get new blocks only while every running request could still
        have one.
        """
        self.kv.extend(request, request.num_tokens + num_nodes, leave_free=len(self.running))
        return max(0, min(num_nodes, self.kv.num_slots(request) - request.num_tokens))

    def num_draft_rows(self) -> int:
        """Draft nodes that the next step has room for, as things stand."""
        spare = self._max_num_batched_tokens - len(self.running)
        reading = any(request.num_uncomputed_tokens > 1 for request in self.running)
        return spare // 2 if reading or self.waiting else spare

    def num_prompt_rows(self) -> int:
        """Prompt tokens that the next step reads if no drafts take their place, as things stand."""
        wanted = sum(request.num_uncomputed_tokens - 1 for request in self.running)
        for place, request in enumerate(self.waiting):
            if len(self.running) + place >= self._max_num_seqs:
                break
            wanted += request.num_tokens
        return min(wanted, self._max_num_batched_tokens - len(self.running))

    def finish(self, request: Request) -> None:
        """Takes a request out, wherever it is, and gives its blocks back."""
        if request.status is RequestStatus.RUNNING:
            self.running.remove(request)
        elif request.status is RequestStatus.WAITING:
            self.waiting.remove(request)
        request.status = RequestStatus.FINISHED
        self.kv.free(request)

    def check_integrity(self) -> None:
        """Raises AssertionError unless queues and block tables agree."""
        self.kv.check_integrity()
        for request in self.running:
            assert request.status is RequestStatus.RUNNING, request.request_id
            assert 0 <= request.num_computed_tokens < request.num_tokens, request.request_id
            assert self.kv.num_slots(request) >= request.num_computed_tokens, request.request_id
        for request in self.waiting:
            assert request.status is RequestStatus.WAITING, request.request_id
            assert request.num_computed_tokens == 0, request.request_id

    def _fit(self, request: Request, num_spare: int) -> ScheduledRequest:
        """As much of the request as num_spare tokens allow, its draft last."""
        num_tokens = min(request.num_uncomputed_tokens, num_spare)
        reaches_end = num_tokens == request.num_uncomputed_tokens
        tree = request.draft.truncated(num_spare - num_tokens) if reaches_end else EMPTY_TREE
        return ScheduledRequest(request, num_tokens, tree, reaches_end)

    def _make_room(self, item: ScheduledRequest, preempted: list[Request]) -> ScheduledRequest | None:
        """Finds blocks for a running request: with its draft, without it, or by preempting the youngest."""
        request = item.request
        end = request.num_computed_tokens + item.num_tokens
        if self.kv.extend(request, end + len(item.tree)):
            return item
        while not self.kv.extend(request, end):
            victim = self.running[-1]
            self._preempt(victim)
            preempted.append(victim)
            if victim is request:
                return None
        return ScheduledRequest(request, item.num_tokens, EMPTY_TREE, item.reaches_end)

    def _admit(self, request: Request, budget: int) -> bool:
        """Lets the head of the queue run if the pool has room for all of its tokens."""
        match = self.kv.match_prefix(request)
        if self.running and self.kv.num_taken(match, request.num_tokens) > self.kv.pool.num_free:
            return False
        num_tokens = min(request.num_tokens - match.num_tokens, budget)
        if not self.kv.admit(request, match, match.num_tokens + num_tokens):
            return False
        self.waiting.popleft()
        self.running.append(request)
        request.status = RequestStatus.RUNNING
        request.num_computed_tokens = request.num_cached_tokens = match.num_tokens
        request.num_draft_cached_tokens = match.num_draft_tokens
        return True

    def _preempt(self, request: Request) -> None:
        self.running.remove(request)
        self.kv.free(request)
        request.status = RequestStatus.WAITING
        request.num_computed_tokens = 0
        request.draft = EMPTY_TREE
        self.waiting.appendleft(request)
