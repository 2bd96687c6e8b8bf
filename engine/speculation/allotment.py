"""Which draft nodes of a whole batch are worth their time: those that speed its requests up, on the whole.

A step's time is everybody's. Were tokens per second of all together what counts, one request with sure drafts
would have as many rows as the others pay for: eight tokens of its own against four steps that take half as
long again. Nothing is won by that. The others wait, it ends early, and they go on in a batch that is the
worse for being smaller. So what counts is the product of all requests' speeds (proportional fairness; Kelly,
Maulloo and Tan 1998): a request may be made faster by as much as it slows the others down, each in its own
measure, and no more. Of alike requests that is the same as tokens per second, and where that product is
higher than without drafts, so is the sum of the speeds.
"""

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, count, islice, pairwise
from operator import add, mul, truediv
from typing import NamedTuple


@dataclass(frozen=True, slots=True)
class Bid:
    """What one request could do with draft nodes.

    Attributes:
        values: Per node the chance that it stands; never rising.
        depths: Per node its depth, if it is yet to be drafted; 0 for one that is there already.
        entry_seconds: What it costs to draft for this request at all, such as catching up.
    """

    values: Sequence[float]
    depths: Sequence[int]
    entry_seconds: float = 0.0

    def gains(self) -> list[float]:
        """Per node the factor by which it lengthens the request's step; falling.

        Where only a part of the tree's levels is drafted that is a little too low behind what is left out.
        """
        return [more / less for less, more in pairwise(accumulate(self.values, initial=1.0))]


@dataclass(frozen=True, slots=True)
class Tariff:
    """What nodes cost.

    Attributes:
        requests: How many the step serves; without any it brings each a token.
        seconds: What it takes without any.
        rise: Seconds that 0, 1, 2 ... nodes add to the target's pass.
        start: Seconds to draft at all,
        per_pass: and for each level,
        per_row: and for each node.
        most: Seconds that all of that may add to the step.
    """

    requests: int
    seconds: float
    rise: Sequence[float]
    start: float = 0.0
    per_pass: float = 0.0
    per_row: float = 0.0
    most: float = math.inf

    @property
    def plain_speed(self) -> float:
        """Tokens per second without drafts."""
        return self.requests / self.seconds

    def floor(self) -> float:
        """A node that stands less likely than that cannot pay, however many come with it."""
        each = map(truediv, islice(self.rise, 1, None), count(1))
        return self.plain_speed * min(each, default=self.seconds)

    def affords_one(self) -> bool:
        """Whether a draft of a single node may take the time that it takes."""
        return len(self.rise) > 1 and self.start + self.per_pass + self.per_row + self.rise[1] <= self.most

    def cost(self, bid: Bid, node: int) -> float:
        """Seconds to draft one node, the levels left out; nothing for one that is there already."""
        if not bid.depths[node]:
            return 0.0
        return self.per_row if node else self.per_row + bid.entry_seconds

    def gains(self, bids: Sequence[Bid], counts: Sequence[int], num_nodes: int) -> tuple[float, ...]:
        """What the first nodes of each bid save, in seconds of a step.

        Args:
            bids: One per request, of trees that are there already.
            counts: How many of each one's nodes are checked,
            num_nodes: and of the whole step; each costs the same part of what all of them add.

        Returns:
            Nothing where what they may take is limited: that says little of other steps.
        """
        if math.isfinite(self.most):
            return ()
        # Chains that grow may come to more than were weighed.
        weighed = min(num_nodes, len(self.rise) - 1)
        per_node = self.rise[weighed] / weighed if weighed else 0.0
        share = self.seconds / self.requests
        return tuple(
            share * math.log1p(sum(bid.values[:count])) - per_node * count if count else 0.0
            for bid, count in zip(bids, counts, strict=True)
        )

    def speed(self, gained: float, num_drafting: int, depth: int) -> float:
        """The speed if so many requests draft chains of so many levels, which bring each so many tokens."""
        num_nodes = num_drafting * depth
        drafting = self.start + self.per_pass * depth + self.per_row * num_nodes
        tokens = self.requests * math.pow(1.0 + gained, num_drafting / self.requests)
        return tokens / (self.seconds + drafting + self.rise[num_nodes])


@dataclass(frozen=True, slots=True)
class Admission:
    """The nodes that pay.

    Attributes:
        counts: Per bid how many of its nodes, the first ones that are not deeper than `depth`.
        depth: Levels to draft; 0 for none.
        speed: Tokens per second with them, as if each request had the geometric mean of all requests' tokens.
        seconds: Of the step with them.
    """

    counts: tuple[int, ...]
    depth: int
    speed: float
    seconds: float


def admit(bids: Sequence[Bid], tariff: Tariff) -> Admission:
    """Takes nodes by falling gain, as long as totals say, and as deep as totals say.

    For a given number of levels the best set of n nodes is the n of the highest gains, so all n are tried
    with the totals of gains and seconds they make; a test of each node against the one before would stop at
    the first step of a curve with steps. At most `len(tariff.rise) - 1` nodes are taken.

    Args:
        bids: One per request that may have nodes. Whose entry costs more than all of its nodes can bring is
            left out from the start.
        tariff: What they cost.
    """
    share = 1.0 / tariff.requests
    nodes: list[_Node] = [
        (-(gain**share), place, node, bid.depths[node], tariff.cost(bid, node))
        for place, bid in enumerate(bids)
        if (1.0 + sum(bid.values)) ** share > 1.0 + bid.entry_seconds / tariff.seconds
        for node, gain in enumerate(bid.gains())
    ]
    nodes.sort()
    best = _Scanned(tariff.plain_speed, 0, tariff.seconds)
    best_depth = 0
    previous = 0.0
    for depth in range(max((node[3] for node in nodes), default=0) + 1):
        found = _scan(nodes, tariff, depth)
        if found.speed > best.speed:
            best, best_depth = found, depth
        if depth > 1 and found.speed < previous < best.speed:
            break  # Levels gain ever less and cost the same.
        previous = found.speed
    counts = [0] * len(bids)
    left = best.num_nodes
    for _, place, _, level, _ in nodes:
        if left and level <= best_depth:
            counts[place] += 1
            left -= 1
    taken = [bid.depths[number - 1] for bid, number in zip(bids, counts, strict=True) if number]
    return Admission(tuple(counts), min(best_depth, max(taken, default=0)), best.speed, best.seconds)


_Node = tuple[float, int, int, int, float]
"""By what it lengthens the mean request's step, negative; its bid, its place there, its depth, seconds."""


class _Scanned(NamedTuple):
    """The best number of nodes, the speed with them, and what the step then takes."""

    speed: float
    num_nodes: int
    seconds: float


def _scan(nodes: Sequence[_Node], tariff: Tariff, depth: int) -> _Scanned:
    """The highest speed of all numbers of nodes, none deeper than `depth`."""
    chosen = [node for node in nodes if node[3] <= depth][: len(tariff.rise) - 1]
    start = tariff.seconds + (tariff.start + tariff.per_pass * depth if depth else 0.0)
    tokens = accumulate([-node[0] for node in chosen], mul, initial=float(tariff.requests))
    drafting = accumulate([node[4] for node in chosen], initial=start)
    seconds = list(map(add, drafting, tariff.rise))
    # They never fall from one node to the next.
    num_allowed = bisect_right(seconds, tariff.seconds + tariff.most)
    speeds = list(map(truediv, tokens, seconds[:num_allowed]))
    best = max(speeds, default=0.0)
    if not speeds:
        return _Scanned(0.0, 0, tariff.seconds)
    place = speeds.index(best)
    return _Scanned(best, place, seconds[place])
