"""Which draft nodes of a whole batch are worth their time: those that raise its tokens per second."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, count, islice
from operator import add, sub, truediv


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
        each = map(truediv, islice(self.rise, 1, None), count(1))
        return self.plain_speed * min(each, default=self.seconds)

    def cost(self, bid: Bid, node: int) -> float:
        """Seconds to draft one node, the levels left out; nothing for one that is there already."""
        if not bid.depths[node]:
            return 0.0
        return self.per_row if node else self.per_row + bid.entry_seconds

    def speed(self, tokens: float, num_nodes: int, depth: int) -> float:
        """Tokens per second with so many drafted nodes in so many levels that bring so many tokens."""
        drafting = self.start + self.per_pass * depth + self.per_row * num_nodes
        return (self.tokens + tokens) / (self.seconds + drafting + self.rise[num_nodes])


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


def admit(bids: Sequence[Bid], tariff: Tariff) -> Admission:
    """Takes nodes by falling chance, as long as totals say, and as deep as totals say.

    For a given number of levels the best set of n nodes is the n likeliest ones, so all n are tried with the
    totals of tokens and seconds they make; a test of each node against the one before would stop at the first
    step of a curve with steps. At most `len(tariff.rise) - 1` nodes are taken.

    Args:
        bids: One per request that may have nodes. Whose entry costs more than all of its nodes can bring is
            left out from the start.
        tariff: What they cost.
    """
    nodes = [
        (-value, place, node, bid.depths[node], tariff.cost(bid, node))
        for place, bid in enumerate(bids)
        if not bid.entry_seconds or sum(bid.values) > tariff.plain_speed * bid.entry_seconds
        for node, value in enumerate(bid.values)
    ]
    nodes.sort()
    best_speed = tariff.plain_speed
    best_count = best_depth = 0
    previous = 0.0
    for depth in range(max((node[3] for node in nodes), default=0) + 1):
        speed, num_nodes = _scan(nodes, tariff, depth)
        if speed > best_speed:
            best_speed, best_count, best_depth = speed, num_nodes, depth
        if depth > 1 and speed < previous < best_speed:
            break  # Levels gain ever less and cost the same.
        previous = speed
    counts = [0] * len(bids)
    for _, place, _, level, _ in nodes:
        if best_count and level <= best_depth:
            counts[place] += 1
            best_count -= 1
    taken = [bid.depths[number - 1] for bid, number in zip(bids, counts, strict=True) if number]
    speed = best_speed if taken else tariff.plain_speed
    return Admission(tuple(counts), min(best_depth, max(taken, default=0)), speed)


def _scan(
    nodes: Sequence[tuple[float, int, int, int, float]], tariff: Tariff, depth: int
) -> tuple[float, int]:
    """The highest tokens per second of all numbers of nodes, none deeper than `depth`, and that number."""
    chosen = [node for node in nodes if node[3] <= depth][: len(tariff.rise) - 1]
    start = tariff.seconds + (tariff.start + tariff.per_pass * depth if depth else 0.0)
    tokens = accumulate([node[0] for node in chosen], sub, initial=tariff.tokens)
    drafting = accumulate([node[4] for node in chosen], initial=start)
    speeds = list(map(truediv, tokens, map(add, drafting, tariff.rise)))
    best = max(speeds)
    return best, speeds.index(best)
