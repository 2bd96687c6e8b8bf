"""The scheduler: which tokens the next step computes, and what becomes of them."""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from engine.core.kv_cache_manager import KVCacheManager, PrefixMatch
from engine.core.request import Request, RequestStatus
from engine.token_tree import EMPTY_TREE, TokenTree

MIN_AWAITED_TOKENS = 32
"""Shared prompt tokens that are worth waiting for, since who waits comes a step later. A step of few tokens
takes a CPU about as long as so many tokens more in another; a GPU, which has them for less, loses a step."""


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


@dataclass(slots=True)
class _Plan:
    """A step in the making: what is left of its budgets, and what SchedulerOutput says of it."""

    budget: int
    draft_budget: int
    scheduled: list[ScheduledRequest] = field(default_factory=list)
    preempted: list[Request] = field(default_factory=list)
    num_queries: int = 0
    num_hits: int = 0

    def begin(self, request: Request, num_looked_up: int) -> None:
        """Counts what the prefix cache had for a request that takes part from now on."""
        self.num_queries += num_looked_up
        self.num_hits += request.num_cached_tokens

    def add(self, item: ScheduledRequest) -> None:
        """Enters a request's part."""
        self.scheduled.append(item)
        self.budget -= item.num_tokens + len(item.tree)
        self.draft_budget -= len(item.tree)

    def output(self) -> SchedulerOutput:
        """The step as it is handed out."""
        return SchedulerOutput(tuple(self.scheduled), tuple(self.preempted), self.num_queries, self.num_hits)


class Scheduler:
    """Continuous batching: running requests first, then waiting ones, within a token budget.

    Every running request gets a token per step. What is left goes to draft nodes (half of it at most
    while prompts are still to be read), then to prompt chunks. When the pool is dry, the youngest running
    request loses its blocks and goes back to the head of the queue; its text is not affected.

    Prompts with an equal beginning that arrive together are read once. A request whose next blocks are just
    being computed by one that runs already is held: it has its seat and its place among those that run, and
    the pool's room for it is kept, but it computes nothing until the blocks are there. The older one gets at
    least as much of every step as the younger would have, so that waiting costs about a step. Nobody waits
    for a younger one or for one that is held itself, so that the oldest always computes; when the one waited
    for ends or loses its blocks, the next in line goes on where it stopped.

    Args:
        kv: Block tables and the pool.
        max_num_seqs: Requests that run at most.
        max_num_batched_tokens: Tokens of a step at most.
        min_awaited_tokens: A request is held for no less than so many tokens.
    """

    def __init__(
        self,
        kv: KVCacheManager,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        min_awaited_tokens: int = MIN_AWAITED_TOKENS,
    ) -> None:
        self.kv = kv
        self.running: list[Request] = []
        self.waiting: deque[Request] = deque()
        # Who found no room in the pool last time, and will hardly find more in the next step.
        self._refused: Request | None = None
        self._max_num_seqs = max_num_seqs
        self._max_num_batched_tokens = max_num_batched_tokens
        self._min_awaited_tokens = min_awaited_tokens

    @property
    def has_work(self) -> bool:
        """Whether a step would compute anything."""
        return bool(self.running or self.waiting)

    @property
    def num_running(self) -> int:
        """Requests that compute."""
        return sum(not request.is_held for request in self.running)

    @property
    def num_waiting(self) -> int:
        """Requests that wait, for room or for what an older one computes."""
        return len(self.waiting) + len(self.running) - self.num_running

    def add(self, request: Request) -> None:
        """Queues a request behind those that are as urgent, and in front of those that are less."""
        place = len(self.waiting)
        while place and self.waiting[place - 1].params.priority > request.params.priority:
            place -= 1
        self.waiting.insert(place, request)

    def schedule(self) -> SchedulerOutput:
        """Plans one step and allocates its blocks."""
        plan = _Plan(self._max_num_batched_tokens, self.num_draft_rows())
        self._go_on(plan)
        # Whoever was just preempted would be admitted again at once, only to be preempted once more.
        self._refused = None
        while not plan.preempted and plan.budget > 0 and self.waiting:
            request = self.waiting[0]
            if len(self.running) >= self._max_num_seqs:
                break
            if not self._admit(request, plan.budget):
                self._refused = request
                break
            if not request.is_held:
                plan.begin(request, self.kv.num_looked_up(request))
                plan.add(self._fit(request, plan.budget))
        return plan.output()

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

    def num_prompt_rows(self) -> tuple[int, int]:
        """Prompt tokens of the next step: of who runs, and with newcomers', some of which may be cached."""
        reading = (request.num_uncomputed_tokens - 1 for request in self.running if not request.is_held)
        certain = wanted = sum(reading)
        for place, request in enumerate(self.waiting):
            if len(self.running) + place >= self._max_num_seqs or request is self._refused:
                break
            wanted += request.num_tokens
        most = self._max_num_batched_tokens - len(self.running)
        return min(certain, most), min(wanted, most)

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

    def _go_on(self, plan: _Plan) -> None:
        """Plans the requests that run already, the oldest first."""
        for index, request in enumerate(list(self.running)):
            if request.status is not RequestStatus.RUNNING:
                break  # It and all younger ones were preempted below.
            if request.is_held:
                match = self.kv.match_prefix(request)
                self.kv.rematch(request, match)
                is_held = self._is_being_read(request, match, self.running[:index])
                self._start(request, match, is_held)
                if is_held:
                    continue
                plan.begin(request, self.kv.num_looked_up(request))
            num_younger = len(self.running) - index - 1
            spare = plan.budget - num_younger
            if request.num_uncomputed_tokens == 1:
                spare = min(spare, 1 + plan.draft_budget)
            item = self._make_room(self._fit(request, spare), plan.preempted)
            if item is None:
                break
            plan.add(item)

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
        """Lets the head of the queue run, or be held, if the pool has room for all of its tokens."""
        match = self.kv.match_prefix(request)
        num_free = self.kv.pool.num_free - self._num_kept_free()
        if self.running and self.kv.num_taken(match, request.num_tokens) > num_free:
            return False
        is_held = self._is_being_read(request, match, self.running)
        num_tokens = 0 if is_held else min(request.num_tokens - match.num_tokens, budget)
        if not self.kv.admit(request, match, match.num_tokens + num_tokens):
            return False
        self.waiting.popleft()
        self.running.append(request)
        request.status = RequestStatus.RUNNING
        self._start(request, match, is_held)
        return True

    def _start(self, request: Request, match: PrefixMatch, is_held: bool) -> None:
        """Puts a request behind what the prefix cache has of it, to go on from there or to be held."""
        request.is_held = is_held
        request.num_computed_tokens = request.num_cached_tokens = match.num_tokens
        request.num_draft_cached_tokens = match.num_draft_tokens

    def _is_being_read(self, request: Request, match: PrefixMatch, older: Iterable[Request]) -> bool:
        """Whether one of the older requests computes in this step what the request would compute next."""
        return any(
            not reader.is_held
            and reader.num_uncomputed_tokens > 1
            and self.kv.will_share(reader, request, match, self._min_awaited_tokens)
            for reader in older
        )

    def _num_kept_free(self) -> int:
        """Blocks that held requests take if they come to share nothing more than they do now."""
        return sum(self.kv.num_missing(request) for request in self.running if request.is_held)

    def _preempt(self, request: Request) -> None:
        self.running.remove(request)
        self.kv.free(request)
        request.status = RequestStatus.WAITING
        request.is_held = False
        request.num_computed_tokens = 0
        request.draft = EMPTY_TREE
        self.waiting.appendleft(request)
