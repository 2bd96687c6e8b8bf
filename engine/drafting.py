"""Drafting: asks the speculators for the next step's trees, as planner and block pool allow."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from engine.core.request import Request
from engine.core.scheduler import ScheduledRequest, Scheduler, SchedulerOutput
from engine.planning import PlannerReport, PlanOutcome, PlanStats
from engine.speculation.base import DraftRequest
from engine.speculation.draft_batch import DraftBatch, batch_of, shape_of
from engine.speculation.drafter import Drafter, everyone
from engine.speculation.following import Following
from engine.speculation.measurements import Measurements
from engine.speculation.outgrown import Outgrown
from engine.speculation.plan_record import PlanRecord
from engine.speculation.planner import Grant, Offer, Planner, Wish
from engine.speculation.prediction import PredictionSpeculator
from engine.speculation.step_cost import StepShape
from engine.speculation.step_features import StepFeatures
from engine.token_tree import MAX_NODES, TokenTree

SHOWN_TOGETHER = 16
"""Positions of a request without drafts that a head is shown at once."""


@dataclass(frozen=True, slots=True)
class Proposed:
    """What a round of drafting came to.

    Attributes:
        num_outgrown: Requests that have just outgrown a draft's context and go on without it.
        plan: What was planned; None if no request runs.
    """

    num_outgrown: int
    plan: PlanStats | None


class Drafting:
    """Speculation as the engine core uses it.

    Args:
        drafters: In the order in which they are asked; those whose trees come with estimates first.
        planner: Who drafts how many nodes.
        measurements: What the planner goes by; it knows the same methods in the same order.
        predictions: The one of the speculators that follows requests' predictions; None ignores them.
        clock: Seconds, monotonic.

    Attributes:
        hidden_states: What the speculators read of the target; only a head does, and there is one at most.
        computes: Whether a speculator runs passes of its own.
    """

    def __init__(
        self,
        drafters: Sequence[Drafter],
        planner: Planner,
        measurements: Measurements,
        predictions: PredictionSpeculator | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._drafters = tuple(drafters)
        self._planner = planner
        self._measurements = measurements
        self._predictions = predictions
        self._clock = clock
        self._record = PlanRecord(clock)
        self._outgrown = Outgrown(self._drafters)
        # Who drafted what the next step checks, and how many levels it might have.
        self._methods: dict[str, tuple[int, int]] = {}
        self._shape = StepShape(0, 0, 0, 0)
        self._timed: tuple[float | None, float] = (None, 0.0)
        self._features = StepFeatures(keeps=any(drafter.needs.follows for drafter in self._drafters))
        self._following = Following(self._drafters, planner)
        numbered = list(enumerate(self._drafters))
        self._lookups = [(method, each) for method, each in numbered if each.needs.estimates]
        self._others = [(method, each) for method, each in numbered if not each.needs.estimates]
        self._serves_all = any(each.serves is everyone for each in self._drafters)
        self.hidden_states = next(filter(None, (each.needs.hidden_states for each in self._drafters)), None)
        self.computes = bool(self.hidden_states) or any(each.needs.has_cache for each in self._drafters)

    def follows(self, request: Request, scheduler: Scheduler) -> bool:
        """Whether a speculator is to see every position of a new request, so that none may be skipped."""
        return self._following.begins(request, len(scheduler.running) + len(scheduler.waiting) + 1)

    def note_features(self, plan: SchedulerOutput, features: torch.Tensor) -> None:
        """Takes the hidden states of a step's tokens, [T, width], in the plan's order."""
        self._features.begin(plan.scheduled, features)

    def note_commit(self, item: ScheduledRequest, accepted: Sequence[int]) -> None:
        """Learns which of a request's nodes stay, before the scheduler does."""
        if self.hidden_states is None:
            return
        request = item.request
        is_followed = request.needs_draft_cache and request.request_id not in self._outgrown
        if is_followed or not self._features.keeps:
            self._features.commit(item, accepted)

    def note_plan(self, plan: SchedulerOutput) -> None:
        """Notes what the step that begins computes."""
        self._shape = shape_of(plan.scheduled)
        for request in plan.preempted:
            self.release(request)

    def note_verdict(self, item: ScheduledRequest, accepted: Sequence[int]) -> None:
        """Learns which nodes of a tree stand, whatever a stop then makes of them."""
        request_id = item.request.request_id
        method, most_levels = self._methods.get(request_id, (None, 0))
        if method is not None and len(item.tree):
            self._measurements.note_verdict(method, request_id, item.tree, accepted, most_levels)
            self._planner.note_verdict(method, request_id, bool(accepted))

    def note_step(self, forward_seconds: float, host_seconds: float) -> None:
        """Learns what the step that ends took: the target's pass with the choice of tokens, and the rest."""
        if self._shape.rows:
            predicted = self._measurements.note_step(self._shape, forward_seconds, host_seconds)
            self._timed = (predicted, forward_seconds + host_seconds)

    def propose(self, scheduler: Scheduler) -> Proposed:
        """Gives running requests their drafts for the next step."""
        running = scheduler.running
        num_outgrown = self._outgrown.note(running)
        self._methods.clear()
        if not running:
            return Proposed(num_outgrown, None)
        self._following.review(running)
        if self._serves_all or any(each.serves(request) for each in self._drafters for request in running):
            stats = self._plan(batch_of(scheduler), scheduler)
        else:
            stats = PlanStats(PlanOutcome.NO_DRAFT, 0, 0, *self._timed)
        self._record.note(stats)
        return Proposed(num_outgrown, stats)

    def num_found(self, request: Request) -> int:
        """How many tokens of its own prediction the request's answer has so far."""
        speculation = request.params.speculation
        if self._predictions is None or not speculation.enabled or not speculation.prediction:
            return 0
        return self._predictions.num_found(
            request.request_id, speculation.prediction, request.token_ids, request.num_prompt_tokens
        )

    def num_computed_tokens(self, request: Request) -> int:
        """Leading tokens of the request that all speculators' caches hold."""
        return min(
            (
                drafter.speculator.num_computed_tokens(request.request_id)
                for drafter in self._drafters
                if drafter.needs.has_cache
            ),
            default=0,
        )

    def read_up(self, request: Request, scheduler: Scheduler) -> None:
        """Has a head read what it was not shown yet of a running request that ends before its time.

        Others may be waiting for what is read of it, and go on from what all caches hold.
        """
        for method, drafter in enumerate(self._drafters):
            features = self._features.take(request.request_id) if drafter.needs.follows else None
            if features is not None:
                self._call(method, [drafter.ask(request, scheduler, (0, 0), features=features)])

    def release(self, request: Request) -> None:
        """Forgets a request that ended or lost its blocks."""
        self._features.drop(request.request_id)
        for drafter in self._drafters:
            drafter.speculator.release(request.request_id)

    def retire(self, request: Request) -> None:
        """Forgets a request that ended, but for its text where texts are shared and it takes part."""
        for drafter in self._drafters:
            store = drafter.needs.text_store
            if store is not None and request.params.speculation.enabled:
                store.add(request.params.cache_scope, request.token_ids, request.num_prompt_tokens)
        self.release(request)
        self._measurements.forget(request.request_id)
        self._methods.pop(request.request_id, None)
        self._outgrown.forget(request.request_id)

    def report(self) -> PlannerReport:
        """The planner's current table."""
        return self._record.report(self._planner.name, self._measurements)

    def _plan(self, batch: DraftBatch, scheduler: Scheduler) -> PlanStats:
        """Asks, decides and drafts."""
        offers = self._collect_offers(batch, scheduler)
        wishes: list[list[Wish]] = [[] for _ in self._drafters]
        for method, drafter in self._others:
            if self._planner.asks(method, batch.load):
                wished = (drafter.wish(place, request) for place, request in enumerate(batch.decoding))
                wishes[method] = [wish for wish in wished if wish is not None]
        allotment = self._planner.allot(batch.load, offers, wishes)
        for offer, count in zip(offers, allotment.kept, strict=True):
            request = batch.decoding[offer.place]
            request.draft = request.draft.truncated(count)
        num_nodes = sum(allotment.kept)
        for offer, gain in zip(offers, allotment.gains, strict=False):
            self._measurements.lookups.note_gain(batch.decoding[offer.place].request_id, gain)
        for method, _ in self._others:
            num_nodes += self._draft(method, allotment.grants[method], batch, scheduler)
        outcome = self._outcome(batch, allotment.outcome, num_nodes)
        return PlanStats(outcome, num_nodes, allotment.num_probes, *self._timed)

    def _collect_offers(self, batch: DraftBatch, scheduler: Scheduler) -> list[Offer]:
        """Asks those whose trees cost nothing; for each request the first that has something is heard."""
        offers: list[Offer] = []
        price = self._planner.price(batch.load) if batch.decoding else None
        if price is None:
            return offers
        began, listens = self._clock(), self._planner.listens
        waiting = {place: each for place, each in enumerate(batch.decoding) if listens(each.request_id)}
        num_asked = len(waiting)
        for method, drafter in self._lookups:
            asked: dict[int, DraftRequest] = {}
            for place, request in waiting.items():
                num_nodes = drafter.num_nodes(request)
                if num_nodes:
                    draft_request = drafter.ask(request, scheduler, (num_nodes, MAX_NODES), price)
                    if draft_request.budget:
                        asked[place] = draft_request
            if not asked:
                continue
            for place, tree in zip(asked, self._call(method, list(asked.values())), strict=True):
                if len(tree):
                    self._hand_out(waiting.pop(place), tree, method)
                    offers.append(Offer(place, method, tree.probabilities))
        self._measurements.lookups.note_cost(self._clock() - began, num_asked)
        for request in waiting.values():
            self._measurements.lookups.note_gain(request.request_id, 0.0)
        return offers

    def _draft(self, method: int, grants: Sequence[Grant], batch: DraftBatch, scheduler: Scheduler) -> int:
        """Lets those draft who may, and lets caches follow prompts; how many nodes came of it."""
        drafter = self._drafters[method]
        if not grants and not drafter.needs.has_cache:
            return 0
        granted = {batch.decoding[grant.place].request_id: grant for grant in grants} if grants else {}
        asked: list[tuple[Request, DraftRequest]] = []
        for request in batch.requests:
            grant = granted.get(request.request_id)
            watches = self._watches(method, request)
            if grant is None and not watches:
                continue
            limits = (0, 0) if grant is None else (grant.num_nodes, grant.max_depth)
            reads = drafter.needs.hidden_states is not None
            features = self._features.take(request.request_id) if reads else None
            least = 0.0 if grant is None else grant.least
            draft_request = drafter.ask(request, scheduler, limits, features=features, least=least)
            if draft_request.budget or watches or drafter.needs.follows:
                asked.append((request, draft_request))
        trees = self._call(method, [draft_request for _, draft_request in asked])
        for (request, draft_request), tree in zip(asked, trees, strict=True):
            if draft_request.budget:
                self._hand_out(request, tree, method, min(draft_request.budget, draft_request.max_depth))
        return sum(map(len, trees))

    def _watches(self, method: int, request: Request) -> bool:
        """Whether a method is told of a request that it drafts nothing for.

        A head sees each position once, many together where it drafts nothing. Other caches may come later,
        and follow prompts where that pays.
        """
        drafter = self._drafters[method]
        if drafter.needs.follows:
            waiting = self._features.num_waiting(request.request_id)
            is_due = request.needs_draft_cache and waiting >= SHOWN_TOGETHER
        else:
            is_read = request.num_uncomputed_tokens > 1
            is_due = drafter.needs.has_cache and is_read and self._planner.follows_prompts(method)
        return is_due and not drafter.room.has_outgrown(request)

    def _call(self, method: int, requests: Sequence[DraftRequest]) -> Sequence[TokenTree]:
        if not requests:
            return ()
        called = self._drafters[method].call(requests, self._clock)
        if called.seconds is not None:
            self._measurements.note_draft(method, called.num_levels, called.num_rows, called.seconds)
        return called.trees

    def _hand_out(self, request: Request, tree: TokenTree, method: int, most_levels: int = 0) -> None:
        request.draft = tree
        self._methods[request.request_id] = (method, most_levels)

    def _outcome(self, batch: DraftBatch, planned: PlanOutcome, num_nodes: int) -> PlanOutcome:
        if not batch.load.decoding.requests:
            return PlanOutcome.READING
        if not batch.decoding:
            return PlanOutcome.DISABLED
        if num_nodes:
            return planned
        if not any(drafter.num_nodes(each) for drafter in self._drafters for each in batch.decoding):
            return PlanOutcome.ROOM
        is_off = planned in (PlanOutcome.ACCEPTANCE, PlanOutcome.LOAD, PlanOutcome.WAITING)
        return planned if is_off else PlanOutcome.NO_DRAFT
