"""AutoPlanner: drafts as much as pays, down to nothing under load, and back up when the load falls."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import compress

from engine.planning import PlanOutcome
from engine.speculation.allotment import Admission, Bid, Tariff, admit
from engine.speculation.evidence import MeasuredFloor, RowPrice
from engine.speculation.measurements import Measurements
from engine.speculation.planner import Allotment, Grant, Load, Offer, Wish
from engine.speculation.probing import PROBE_NODES, ProbeSchedule, interval
from engine.speculation.prospects import OPTIMISTIC, Prospects
from engine.speculation.resting import Rests

# Steps over which the cost of catching up with a request's text is spread.
_AMORTISED = 64.0
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

    def kept(self) -> Iterator[tuple[int, int]]:
        """Per offer its place, and how many of its nodes are checked."""
        return compress(zip(self.places, self.admission.counts, strict=True), self.offered)

    def granted(self) -> Iterator[tuple[int, int]]:
        """Per other request with nodes its place, and how many."""
        every = zip(self.places, self.admission.counts, self.offered, strict=True)
        return ((place, count) for place, count, offered in every if count and not offered)


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
        self._prospects = Prospects(measurements)
        self._probes = [ProbeSchedule() for _ in measurements.methods]
        self._context = _USUAL_CONTEXT
        self._floor = 0.0
        self._priced: Tariff | None = None
        self._rests = Rests(len(measurements.methods))

    def price(self, load: Load) -> RowPrice | None:
        """See Planner."""
        plain = self._prospects.plain(load, _LOOKED_AHEAD * load.decoding.requests)
        floor = self._floor_of(plain)
        return MeasuredFloor(floor) if floor < 1.0 and plain.affords_one() else None

    def listens(self, request_id: str) -> bool:
        """See Planner."""
        return self._known.lookups.are_over(request_id, self._known.step)

    def asks(self, method: int, load: Load) -> bool:
        """See Planner. Deciding takes time as well, and what did not pay a step ago hardly does now."""
        if load.shape.reads_prompts:
            plain = self._prospects.plain(load, _LOOKED_AHEAD * load.decoding.requests)
            return self._prospects.tariff(method, plain).affords_one()
        return self._rests.is_over(method, self._known.step, load.decoding.requests)

    def allot(self, load: Load, offers: Sequence[Offer], wishes: Sequence[Sequence[Wish]]) -> Allotment:
        """See Planner."""
        self._context = load.decoding.context // max(load.decoding.requests, 1)
        if not any(wishes):
            # As in all steps where there is a lookup alone.
            return self._cut(load, offers, len(wishes))
        most = max(PROBE_NODES, sum(len(offer.probabilities) for offer in offers))
        most += max((sum(wish.num_nodes for wish in own) for own in wishes), default=0)
        plain = self._prospects.plain(load, most)
        step = _Step(plain, self._floor_of(plain), offers, [self._bid(offer) for offer in offers])
        places = [offer.place for offer in offers]
        best = _Choice(admit(step.bids, plain), step.bids, places, [True] * len(offers))
        for method, own in enumerate(wishes):
            if own:
                choice = self._with(method, own, step)
                if choice.admission.depth and choice.admission.speed > best.admission.speed:
                    best = choice
        kept = dict.fromkeys(places, 0)
        kept.update(best.kept())
        grants: list[list[Grant]] = [[] for _ in wishes]
        if best.method is not None:
            grants[best.method] = self._lengthened(best, wishes[best.method], plain, load)
        num_granted = sum(kept.values()) + sum(grant.num_nodes for own in grants for grant in own)
        num_probes = 0
        may_probe = not load.shape.reads_prompts
        if may_probe and load.num_draft_rows >= num_granted + PROBE_NODES * len(wishes):
            served = {place for place, count in (*kept.items(), *best.granted()) if count}
            num_probes = sum(
                self._add_probe(method, own, grants[method], served, plain)
                for method, own in enumerate(wishes)
                if own
            )
        outcome = self._outcome(num_granted, num_probes, wishes)
        if may_probe:
            self._note_rests(wishes, grants, load, outcome)
        elif not num_granted:
            outcome = PlanOutcome.WAITING
        counts = tuple(kept.values())
        gains = plain.gains(step.bids, counts, num_granted)
        return Allotment(counts, tuple(map(tuple, grants)), outcome, num_probes, gains)

    def follows_prompts(self, method: int) -> bool:
        """See Planner. Where drafts do not pay whatever they are worth, their caches catch up later."""
        return self._prospects.hopeful[method]

    def follows_texts(self, method: int, num_requests: int) -> bool:
        """See Planner. Not where even drafts that are somewhat better than the average would not pay."""
        return self._prospects.follows_texts(method, num_requests, self._context)

    def note_verdict(self, method: int, request_id: str, stood: bool) -> None:
        """See Planner."""
        self._probes[method].note(request_id, stood)

    def _floor_of(self, plain: Tariff) -> float:
        """Its floor; tariffs hold for some steps."""
        if plain is not self._priced:
            self._priced, self._floor = plain, plain.floor()
        return self._floor

    def _cut(self, load: Load, offers: Sequence[Offer], num_methods: int) -> Allotment:
        """What is kept of the offers, where nobody is asked for more."""
        counts: tuple[int, ...] = ()
        gains: tuple[float, ...] = ()
        if offers:
            plain = self._prospects.plain(load, sum(len(offer.probabilities) for offer in offers))
            bids = [self._bid(offer) for offer in offers]
            counts = admit(bids, plain).counts
            gains = plain.gains(bids, counts, sum(counts))
        outcome = PlanOutcome.SPECULATED if any(counts) else self._outcome_unasked(load, offers)
        return Allotment(counts, ((),) * num_methods, outcome, gains=gains)

    def _bid(self, offer: Offer) -> Bid:
        values = self._known.methods[offer.method].calibration.corrected(offer.probabilities)
        return Bid(values, (0,) * len(values))

    def _with(self, method: int, wishes: Sequence[Wish], step: _Step) -> _Choice:
        """The best use of the step if this method drafts where it promises more than what is offered."""
        known = self._known.methods[method]
        tariff = self._prospects.tariff(method, step.plain)
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

    def _lengthened(self, best: _Choice, wishes: Sequence[Wish], plain: Tariff, load: Load) -> list[Grant]:
        """What is granted. Chains may grow while the draft is sure of them, where average ones pay at all.

        Whether another level pays is known better behind the tokens of this very chain than on average.
        """
        assert best.method is not None, "somebody drafts"
        grants = [Grant(place, count, best.admission.depth) for place, count in best.granted()]
        rooms = {wish.place: min(wish.num_nodes, wish.max_depth) for wish in wishes if wish.ends_early}
        if not rooms or not grants or load.shape.reads_prompts:
            return grants
        tariff = self._prospects.tariff(best.method, plain)
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
        num_levels = max(min(wish.num_nodes, wish.max_depth) for wish in wishes)
        may_pay = self._prospects.may_pay(method, len(wishes), num_levels, plain)
        if not may_pay or not probes.may_pick(step):
            return False
        tariff = self._prospects.tariff(method, plain)
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

    def _note_rests(
        self,
        wishes: Sequence[Sequence[Wish]],
        grants: Sequence[Sequence[Grant]],
        load: Load,
        outcome: PlanOutcome,
    ) -> None:
        """Has methods that were asked and got nothing rest for a while."""
        for method, (own, granted) in enumerate(zip(wishes, grants, strict=True)):
            if granted:
                self._rests.end(method)
            elif own:
                self._rests.begin(method, self._known.step, load.decoding.requests, outcome)

    def _outcome_unasked(self, load: Load, offers: Sequence[Offer]) -> PlanOutcome:
        """Why there are no drafts, where no offer pays and nobody else was asked."""
        if load.shape.reads_prompts:
            return PlanOutcome.WAITING
        if self._floor > OPTIMISTIC[-1]:
            return PlanOutcome.LOAD
        resting = self._rests.outcome(self._known.step, load.decoding.requests)
        return resting or (PlanOutcome.ACCEPTANCE if offers else PlanOutcome.NO_DRAFT)

    def _outcome(self, num_granted: int, num_probes: int, wishes: Sequence[Sequence[Wish]]) -> PlanOutcome:
        if num_granted:
            return PlanOutcome.SPECULATED
        if num_probes:
            return PlanOutcome.PROBING
        asked = [method for method, own in enumerate(wishes) if own]
        is_hopeful = any(self._prospects.hopeful[method] for method in asked)
        return PlanOutcome.ACCEPTANCE if is_hopeful else PlanOutcome.LOAD
