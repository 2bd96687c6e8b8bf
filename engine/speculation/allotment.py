"""Which draft nodes of a whole batch are worth their time: those that raise its tokens per second."""

from collections.abc import Sequence
from dataclasses import dataclass


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


@dataclass(frozen=True, slots=True)
class Tariff:
    """What nodes cost.

    Attributes:
        tokens: What the step brings without any.
        seconds: What it takes without any.
        rise: Seconds that 0, 1, 2 ... nodes add to the target's pass.
        start: Seconds to draft at all,
        per_pass: and for each level,
        per_row: and for each node.
    """

    tokens: float
    seconds: float
    rise: Sequence[float]
    start: float = 0.0
    per_pass: float = 0.0
    per_row: float = 0.0

    @property
    def plain_speed(self) -> float:
        """Tokens per second without drafts."""
        return self.tokens / self.seconds

    def floor(self) -> float:
        """A node that stands less likely than that cannot pay, however many come with it."""
        rise = self.rise
        cheapest = min((rise[count] / count for count in range(1, len(rise))), default=1.0)
        return self.plain_speed * cheapest


@dataclass(frozen=True, slots=True)
class Admission:
    """The nodes that pay.

    Attributes:
        counts: Per bid how many of its nodes, the first ones that are not deeper than `depth`.
        depth: Levels to draft; 0 for none.
        speed: Expected tokens per second with them.
    """

    counts: tuple[int, ...]
    depth: int
    speed: float


def admit(bids: Sequence[Bid], tariff: Tariff, margin: float = 1.0) -> Admission:
    """Takes nodes by falling chance, as long as totals say, and as deep as totals say.

    For a given number of levels the best set of n nodes is the n likeliest ones, so all n are tried with the
    totals of tokens and seconds they make; a test of each node against the one before would stop at the first
    step of a curve with steps. At most `len(tariff.rise) - 1` nodes are taken.

    Args:
        bids: One per request that may have nodes.
        tariff: What they cost.
        margin: By what drafting has to beat plain decoding.
    """
    nodes = sorted(
        (-value, place, node, depth)
        for place, bid in enumerate(bids)
        for node, (value, depth) in enumerate(zip(bid.values, bid.depths, strict=True))
    )
    best_speed = tariff.plain_speed * margin
    best_count = best_depth = 0
    previous = 0.0
    for depth in range(max((node[3] for node in nodes), default=0) + 1):
        speed, count = _scan(nodes, bids, tariff, depth)
        if speed > best_speed:
            best_speed, best_count, best_depth = speed, count, depth
        if depth > 1 and speed < previous < best_speed:
            break  # Levels gain ever less and cost the same.
        previous = speed
    counts = [0] * len(bids)
    for _, place, _, level in nodes:
        if best_count and level <= best_depth:
            counts[place] += 1
            best_count -= 1
    speed = best_speed if any(counts) else tariff.plain_speed
    deepest = max(
        (bid.depths[count - 1] for bid, count in zip(bids, counts, strict=True) if count), default=0
    )
    return Admission(tuple(counts), min(best_depth, deepest) if deepest else 0, speed)


def _scan(
    nodes: Sequence[tuple[float, int, int, int]], bids: Sequence[Bid], tariff: Tariff, depth: int
) -> tuple[float, int]:
    """The highest tokens per second of all numbers of nodes, none deeper than `depth`, and that number."""
    rise, per_row = tariff.rise, tariff.per_row
    tokens, most = tariff.tokens, len(rise) - 1
    seconds = tariff.seconds + (tariff.start + tariff.per_pass * depth if depth else 0.0)
    best = 0.0
    best_count = count = 0
    for falling, place, node, level in nodes:
        if level > depth:
            continue
        if count == most:
            break
        count += 1
        tokens -= falling
        if level:
            seconds += per_row
            if not node:
                seconds += bids[place].entry_seconds
        speed = tokens / (seconds + rise[count])
        if speed > best:
            best, best_count = speed, count
    return best, best_count
