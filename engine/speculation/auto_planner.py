"""AutoPlanner: drafts as much as pays, down to nothing under load, and back up when the load falls."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from engine.planning import PlanOutcome
from engine.speculation.allotment import Admission, Bid, Tariff, admit
from engine.speculation.evidence import MeasuredFloor, RowPrice
from engine.speculation.measurements import Measurements
from engine.speculation.planner import Allotment, Grant, Load, Offer, Wish
from engine.speculation.probing import PROBE_NODES, ProbeSchedule, interval
from engine.speculation.step_cost import StepShape

# What drafts cost is taken to be so many times what it was measured to be: estimates are noisy, and the best
# of many noisy ones is too good to be true.
_CAUTION = 1.05
# Nodes of all requests that are weighed against each other in a step.
_MOST_NODES = 256
# Steps over which the cost of catching up with a request's text is spread.
_AMORTISED = 64.0
# If not even such drafts paid, of one request or of all, more acceptance would not help.
_OPTIMISTIC = tuple(0.97**depth for depth in range(1, 9))
_OPTIMISM_STEPS = 8
# What drafts have to promise over plain steps for a text to be followed: a little more than nothing.
_MARGIN = 1.05
# By this factor the odds of a text's drafts may be better than those of all that is known.
_OPTIMISTIC_ODDS = 1.5
# Levels of the drafts that following is weighed by.
_FOLLOWED_DEPTH = 3
# Tokens of a request before any was seen.
_USUAL_CONTEXT = 256
# Of the tokens behind ones that stand so many stand themselves, where the draft was sure of those.
_GOES_ON = 0.7
# Nodes per request among which the cheapest row is sought before anybody has offered any.
_LOOKED_AHEAD = 8


@dataclass(frozen=True, slots=True)
class _Choice:
    """The best use of the step found so far: with which method beside the offers, if any."""

    admission: Admission
    bids: Sequence[Bid]
    places: Sequence[int]
    offered: Sequence[bool]
    method: int | None = None


@dataclass(frozen=True, slots=True)
class _Step:
    """What is known of the step before it is decided.

    Attributes:
        plain: Its tariff, without the costs of drafting.
        floor: Nodes less likely to stand cannot pay.
        offers, bids: Trees that are there already, and what they are worth.
    """

    plain: Tariff
    floor: float
    offers: Sequence[Offer]
    bids: Sequence[Bid]


class AutoPlanner:
    """Admits the nodes of the whole batch that raise its expected tokens per second, down to none.

    Goodput over measured costs (Liu et al. 2024, "Optimizing speculative decoding for serving large language
    models using goodput"), with the nodes of all requests sorted by their chance to stand. Of several methods
    that need passes of their own the one with which the step does best drafts for all; lookups come first
    where they promise more for a request.

    Args:
        measurements: What it goes by.
    """

    name = "auto"

    def __init__(self, measurements: Measurements) -> None:
        self._known = measurements
        self._probes = [ProbeSchedule() for _ in measurements.methods]
        self._hopeful = [True for _ in measurements.methods]
        self._context = _USUAL_CONTEXT
        self._floor = 0.0
        self._asked_hope = [-_OPTIMISM_STEPS for _ in measurements.methods]

    def price(self, load: Load) -> RowPrice:
        """See Planner."""
        self._floor = self._plain(load, _LOOKED_AHEAD * load.decoding.requests).floor()
        return MeasuredFloor(self._floor)

    def allot(self, load: Load, offers: Sequence[Offer], wishes: Sequence[Sequence[Wish]]) -> Allotment:
        """See Planner."""
        self._context = load.decoding.context // max(load.decoding.requests, 1)
        if not offers and not any(wishes):
            # As most steps are where there is a lookup alone.
            is_load = self._floor > _OPTIMISTIC[-1]
            return Allotment((), ((),) * len(wishes), PlanOutcome.LOAD if is_load else PlanOutcome.NO_DRAFT)
        most = max(PROBE_NODES, sum(len(offer.probabilities) for offer in offers))
        most += max((sum(wish.num_nodes for wish in own) for own in wishes), default=0)
        plain = self._plain(load, most)
        step = _Step(plain, plain.floor(), offers, [self._bid(offer) for offer in offers])
        places = [offer.place for offer in offers]
        best = _Choice(admit(step.bids, plain), step.bids, places, [True] * len(offers))
        for method, own in enumerate(wishes):
            if own:
                choice = self._with(method, own, step)
                if choice.admission.depth and choice.admission.speed > best.admission.speed:
                    best = choice
        kept = dict.fromkeys((offer.place for offer in offers), 0)
        grants: list[list[Grant]] = [[] for _ in wishes]
        for place, count, offered in zip(best.places, best.admission.counts, best.offered, strict=True):
            if offered:
                kept[place] = count
            elif count and best.method is not None:
                grants[best.method].append(Grant(place, count, best.admission.depth))
        if best.method is not None and grants[best.method]:
            grants[best.method] = self._lengthened(
                best, grants[best.method], wishes[best.method], plain, load
            )
        num_granted = sum(kept.values()) + sum(grant.num_nodes for own in grants for grant in own)
        num_probes = 0
        if load.num_draft_rows >= num_granted + PROBE_NODES * len(wishes):
            served = {grant.place for own in grants for grant in own}
            served |= {place for place, count in kept.items() if count}
            num_probes = sum(
                self._add_probe(method, own, grants[method], served, plain)
                for method, own in enumerate(wishes)
                if own
            )
        return Allotment(
            tuple(kept[offer.place] for offer in offers),
            tuple(map(tuple, grants)),
            self._outcome(num_granted, num_probes, wishes, step),
            num_probes,
        )

    def follows_prompts(self, method: int) -> bool:
        """See Planner. Where drafts do not pay whatever they are worth, their caches catch up later."""
        return self._hopeful[method]

    def follows_texts(self, method: int, num_requests: int) -> bool:
        """See Planner. Not where even drafts that are somewhat better than the average would not pay."""
        known = self._known.methods[method]
        if not self._known.cost.is_measured:
            return True
        context = num_requests * self._context
        shape = StepShape(num_requests, num_requests, context, context)
        num_rows = _FOLLOWED_DEPTH * num_requests
        tariff = self._tariff(method, self._plain(Load(shape, shape, num_rows, num_requests), num_rows))
        rate = known.book.rates()[0][0]
        rate = _OPTIMISTIC_ODDS * rate / (1.0 - rate + _OPTIMISTIC_ODDS * rate)
        # Following costs a row of the method per token of each request, drafted for or not.
        tariff = replace(tariff, start=tariff.start + tariff.per_row * num_requests)
        worth_it = _MARGIN * tariff.plain_speed
        tokens = list(accumulate(rate**level for level in range(1, _FOLLOWED_DEPTH + 1)))
        return any(
            tariff.speed(gained, count, depth) > worth_it
            for count in (1, num_requests)
            for depth, gained in enumerate(tokens, start=1)
            if count * depth < len(tariff.rise)
        )

    def note_verdict(self, method: int, request_id: str, stood: bool) -> None:
        """See Planner."""
        self._probes[method].note(request_id, stood)

    def _plain(self, load: Load, most: int) -> Tariff:
        """What the step costs, and up to so many nodes in it."""
        cost = self._known.cost
        rise = cost.rise(load.shape, min(load.num_draft_rows, most, _MOST_NODES))
        rise = [_CAUTION * seconds for seconds in rise]
        # Prompts that are read in the same step have a worth of their own: their time is not the drafts'.
        return Tariff(load.decoding.requests, cost.step(load.decoding), rise)

    def _tariff(self, method: int, plain: Tariff) -> Tariff:
        """The same with the costs of a method that drafts."""
        costs = self._known.methods[method].costs.solve(self._known.cost.unit)
        start, per_pass, per_row = (_CAUTION * cost for cost in costs)
        return replace(plain, start=start, per_pass=per_pass, per_row=per_row)

    def _bid(self, offer: Offer) -> Bid:
        factor = self._known.methods[offer.method].calibration
        values = [min(1.0, probability * factor) for probability in offer.probabilities]
        return Bid(values, (0,) * len(values))

    def _with(self, method: int, wishes: Sequence[Wish], step: _Step) -> _Choice:
        """The best use of the step if this method drafts where it promises more than what is offered."""
        known = self._known.methods[method]
        tariff = self._tariff(method, step.plain)
        offered = {offer.place: bid for offer, bid in zip(step.offers, step.bids, strict=True)}
        bids: list[Bid] = []
        places: list[int] = []
        for wish in wishes:
            room = (wish.num_nodes, wish.max_depth)
            values, depths = known.book.values(
                wish.request_id, known.shape, room, step.floor, self._known.step
            )
            if offered and wish.place in offered and sum(offered[wish.place].values) >= sum(values):
                continue
            if not values:
                continue
            entry = tariff.per_row * (1.0 + (wish.num_behind - 1) / _AMORTISED)
            bids.append(Bid(values, depths, entry))
            places.append(wish.place)
        taken = set(places)
        left = {place: bid for place, bid in offered.items() if place not in taken}
        every = [*bids, *left.values()]
        is_offered = [False] * len(bids) + [True] * len(left)
        return _Choice(admit(every, tariff), every, [*places, *left], is_offered, method)

    def _lengthened(
        self, best: _Choice, grants: list[Grant], wishes: Sequence[Wish], plain: Tariff, load: Load
    ) -> list[Grant]:
        """Lets chains grow while the draft is sure of them, where the average one pays at all.

        Whether another level pays is known better behind the tokens of this very chain than on average.
        """
        assert best.method is not None, "somebody drafts"
        rooms = {wish.place: min(wish.num_nodes, wish.max_depth) for wish in wishes if wish.ends_early}
        if not rooms:
            return grants
        tariff = self._tariff(best.method, plain)
        num_nodes = sum(best.admission.counts)
        row = tariff.rise[num_nodes] / num_nodes + tariff.per_row
        seconds = tariff.per_pass / len(grants) + row
        # Tokens that somebody without drafts loses in that time, all of them together.
        price = tariff.requests * seconds / best.admission.seconds / _GOES_ON
        tokens = {
            place: 1.0 + sum(bid.values[:count])
            for place, bid, count in zip(best.places, best.bids, best.admission.counts, strict=True)
        }
        spare = load.num_draft_rows - num_nodes
        longer: list[Grant] = []
        for grant in grants:
            if grant.place not in rooms:
                longer.append(grant)
                continue
            more = min(rooms[grant.place] - grant.num_nodes, spare)
            spare -= more
            length = grant.num_nodes + more
            least = min(price * tokens[grant.place], 1.0)
            longer.append(Grant(grant.place, length, length, least))
        return longer

    def _add_probe(
        self, method: int, wishes: Sequence[Wish], grants: list[Grant], served: set[int], plain: Tariff
    ) -> bool:
        """Adds a trial where one is due, for a request that gets nothing otherwise."""
        probes, step = self._probes[method], self._known.step
        if grants:
            probes.recover()
        if not self._may_pay(method, wishes, plain) or not probes.may_pick(step):
            return False
        tariff = self._tariff(method, plain)
        # A trial may have a cache catch up, but not for longer than a step.
        most_behind = plain.seconds / tariff.per_row if tariff.per_row else float("inf")
        idle = {
            wish.request_id: wish
            for wish in wishes
            if wish.place not in served and wish.num_behind <= most_behind
        }
        if not idle:
            return False
        book = self._known.methods[method].book
        behind = max(wish.num_behind for wish in idle.values())
        seconds = tariff.start + tariff.per_row * (PROBE_NODES + behind) + PROBE_NODES * tariff.per_pass
        seconds += tariff.rise[PROBE_NODES]
        steps = interval(seconds / tariff.seconds, book.num_verdicts)
        name = probes.pick(step, idle, book.last_tested, steps)
        if name is None:
            return False
        wish = idle[name]
        grants.append(Grant(wish.place, min(PROBE_NODES, wish.num_nodes), min(PROBE_NODES, wish.max_depth)))
        served.add(wish.place)
        return True

    def _may_pay(self, method: int, wishes: Sequence[Wish], plain: Tariff) -> bool:
        """Whether drafts that nearly always stand would pay at this load; asked anew every few steps."""
        if self._known.step - self._asked_hope[method] >= _OPTIMISM_STEPS:
            self._asked_hope[method] = self._known.step
            tariff = self._tariff(method, plain)
            room = min(max(min(wish.num_nodes, wish.max_depth) for wish in wishes), len(_OPTIMISTIC))
            self._hopeful[method] = any(
                tariff.speed(sum(_OPTIMISTIC[:depth]), count, depth) > tariff.plain_speed
                for count in (1, len(wishes))
                for depth in range(1, room + 1)
                if count * depth < len(tariff.rise)
            )
        return self._hopeful[method]

    def _outcome(
        self, num_granted: int, num_probes: int, wishes: Sequence[Sequence[Wish]], step: _Step
    ) -> PlanOutcome:
        if num_granted:
            return PlanOutcome.SPECULATED
        if num_probes:
            return PlanOutcome.PROBING
        asked = [method for method, own in enumerate(wishes) if own]
        if any(self._hopeful[method] for method in asked):
            return PlanOutcome.ACCEPTANCE
        return PlanOutcome.LOAD if asked or step.floor > _OPTIMISTIC[-1] else PlanOutcome.ACCEPTANCE
