"""AcceptanceBook: how often drafted tokens stand, by depth, rank and request, from what was really tested.

    a request's own recent tests  ->  the method's at that depth and rank  ->  the method's at that rank
                                  ->  a prior

Each is shrunk to the next. A node counts only if its parent was reached: behind a rejected one nothing was
tested, and nothing has failed (counting it would be the usual bias towards short drafts).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from engine.speculation.tree_shape import PRIOR_RATES, TreeShape
from engine.token_tree import MAX_NODES, TokenTree

DEPTHS = 8
RANKS = len(PRIOR_RATES)

_PRIOR_WEIGHT = 16.0  # Tests that the prior counts for, and a rank's average over depths at one depth.
_MEMORY = 1000.0  # Tests at a depth and rank after which all count half.
_OWN_WEIGHT = 16.0  # Tests that the method's average counts for in a request's own.
_MOST_TESTS = 64.0  # Of its own that count, the latest most.
_FADING = 128  # Steps without a test after which a request's tests count half.
# How far, in standard deviations, an uncertain rate is taken to be better than it looks. Who is thought worse
# than he is gets no nodes, and so no chance to show it; who is thought better is soon found out. Once more
# for every doubling of the steps without a test, from the first so many on.
_OPTIMISM = 0.3
_PATIENCE = 16
_CERTAIN = 0.995


@dataclass(slots=True)
class OwnRate:
    """One request under one method.

    Attributes:
        recent: Moving average of its tests: 1 where a child stood.
        expected: The same of what the method's rates had said.
        num_tested: Tests so far, up to a bound.
        last_step: When the last one came in.
    """

    recent: float
    expected: float
    num_tested: float = 0.0
    last_step: int = 0
    _odds: float = 1.0
    _odds_until: int = -1

    def note(self, num_tested: int, num_stood: int, expected: Sequence[float], step: int) -> None:
        """Enters the tests of one verdict.

        Args:
            num_tested: Nodes with children that were reached.
            num_stood: Those, the first ones, of which a child stood.
            expected: How often that happens with this method, by depth.
            step: Number of the step.
        """
        weight = self._weight(step)
        for depth in range(num_tested):
            weight = min(weight + 1.0, _MOST_TESTS)
            share = 1.0 / (weight + 1.0)
            self.recent += share * ((depth < num_stood) - self.recent)
            self.expected += share * (expected[depth] - self.expected)
        self.num_tested, self.last_step, self._odds_until = weight, step, -1

    def odds_ratio(self, step: int) -> float:
        """By what the odds of the method's rates are multiplied for this request."""
        if step < self._odds_until:
            return self._odds
        weight = self._weight(step)
        own = (self.recent * weight + self.expected * _OWN_WEIGHT) / (weight + _OWN_WEIGHT)
        optimism = _OPTIMISM * (1.0 + math.log2(1.0 + (step - self.last_step) / _PATIENCE))
        own += optimism * math.sqrt(own * (1.0 - own) / (weight + _OWN_WEIGHT))
        own = min(max(own, 1e-4), _CERTAIN)
        expected = min(max(self.expected, 1e-4), _CERTAIN)
        self._odds = own * (1.0 - expected) / (expected * (1.0 - own))
        self._odds_until = step + _FADING // 12
        return self._odds

    def _weight(self, step: int) -> float:
        if step == self.last_step:
            return self.num_tested
        return self.num_tested * math.exp2((self.last_step - step) / _FADING)


class AcceptanceBook:
    """What verdicts on one method's trees have shown."""

    def __init__(self) -> None:
        self._tried = [[0.0] * RANKS for _ in range(DEPTHS)]
        self._stood = [[0.0] * RANKS for _ in range(DEPTHS)]
        self._own: dict[str, OwnRate] = {}
        self._rates: list[list[float]] = []
        self._chain: list[float] = []
        self._is_stale = True
        self._plans: dict[TreeShape, tuple[tuple[int, int, int], ...]] = {}
        self.num_verdicts = 0

    def note(
        self, request_id: str, tree: TokenTree, accepted: Sequence[int], step: int, most_levels: int = 0
    ) -> None:
        """Enters a verdict.

        A chain that was ended for want of confidence did not bring the token it might have had next, so that
        rates say what a level brings to whoever wishes for it.

        Args:
            request_id: Whose tree it was.
            tree: What was checked.
            accepted: The nodes that stand, a path from the root.
            step: Number of the step, for the fading of old tests.
            most_levels: A chain's, had the draft been sure enough.
        """
        rates = self._rates or self.rates()
        own = self._own.get(request_id)
        if own is None:
            own = self._own[request_id] = OwnRate(rates[0][0], rates[0][0])
        num_stood = len(accepted)
        if tree.is_chain:
            num_tested = min(num_stood + 1, max(len(tree), most_levels))
            for depth in range(num_tested):
                self._count(depth, 1, 0 if depth < num_stood else RANKS)
            own.note(num_tested, num_stood, self._chain, step)
            return
        expected: list[float] = []
        for depth, node in enumerate((0, *accepted)):
            children = tree.children(node)
            if not children:
                break
            rank = children.index(accepted[depth]) if depth < num_stood else RANKS
            expected.append(min(sum(rates[min(depth, DEPTHS - 1)][: len(children)]), _CERTAIN))
            self._count(depth, len(children), rank)
        own.note(len(expected), num_stood, expected, step)

    def forget(self, request_id: str) -> None:
        """Drops a request that ended."""
        self._own.pop(request_id, None)

    def rates(self) -> list[list[float]]:
        """Per depth and rank; of the method as a whole."""
        if self._is_stale:
            self._is_stale = False
            across = [
                (sum(level[rank] for level in self._stood) + _PRIOR_WEIGHT * prior)
                / (sum(level[rank] for level in self._tried) + _PRIOR_WEIGHT)
                for rank, prior in enumerate(PRIOR_RATES)
            ]
            self._rates = [
                [
                    (stood + _PRIOR_WEIGHT * rate) / (tried + _PRIOR_WEIGHT)
                    for stood, tried, rate in zip(*level, across, strict=True)
                ]
                for level in zip(self._stood, self._tried, strict=True)
            ]
            own = [level[0] for level in self._rates]
            self._chain = own + own[-1:] * (MAX_NODES - DEPTHS)
        return self._rates

    def values(
        self, request_id: str, shape: TreeShape | None, room: tuple[int, int], least: float, step: int
    ) -> tuple[list[float], list[int]]:
        """How likely the first nodes of a request's next tree are to stand, and their depths.

        Args:
            request_id: Whose.
            shape: The usual tree, None for chains.
            room: Nodes and levels at most.
            least: Behind the first value below it there are none.
            step: Number of the step.

        Returns:
            Falling values, and the depth of each.
        """
        self.rates()
        own = self._own.get(request_id)
        ratio = 1.0 if own is None else own.odds_ratio(step)
        if shape is None:
            return _chain_values(self._chain, ratio, min(room), least)
        return self._tree_values(shape, ratio, room, least)

    def last_tested(self, request_id: str) -> int:
        """The step in which a request was tested last; -1 if it never was."""
        own = self._own.get(request_id)
        return -1 if own is None else own.last_step

    def own_rates(self) -> list[tuple[str, float, int]]:
        """Per request tested: its id, the share of its recent tests that stood, and how many there were."""
        return [(name, own.recent, round(own.num_tested)) for name, own in self._own.items()]

    def _count(self, depth: int, num_children: int, rank: int) -> None:
        self._is_stale = True
        self.num_verdicts += 1
        level = depth if depth < DEPTHS else DEPTHS - 1
        tried, stood = self._tried[level], self._stood[level]
        for place in range(min(num_children, RANKS)):
            tried[place] += 1.0
        if rank < RANKS:
            stood[rank] += 1.0
        if tried[0] > _MEMORY:
            self._tried[level] = [count / 2 for count in tried]
            self._stood[level] = [count / 2 for count in stood]

    def _tree_values(
        self, shape: TreeShape, ratio: float, room: tuple[int, int], least: float
    ) -> tuple[list[float], list[int]]:
        rates = self.rates()
        worths = [1.0]
        found: list[float] = []
        depths: list[int] = []
        lowest = 1.0
        for parent, depth, rank in self._plan(shape):
            rate = rates[min(depth, DEPTHS) - 1][min(rank, RANKS - 1)]
            worths.append(worths[parent] * rate * ratio / (1.0 - rate + rate * ratio))
            if depth > room[1]:
                continue
            lowest = min(lowest, worths[-1])
            if lowest < least or len(found) == room[0]:
                break
            found.append(lowest)
            depths.append(depth)
        return found, depths

    def _plan(self, shape: TreeShape) -> tuple[tuple[int, int, int], ...]:
        """Parent, depth and rank of each node."""
        plan = self._plans.get(shape)
        if plan is None:
            depths = shape.depths()
            num_children = [0] * (len(shape) + 1)
            rows: list[tuple[int, int, int]] = []
            for node, parent in enumerate(shape.parents, start=1):
                rows.append((parent, depths[node], num_children[parent]))
                num_children[parent] += 1
            plan = tuple(rows)
            self._plans = {shape: plan}
        return plan


def _chain_values(
    rates: Sequence[float], ratio: float, room: int, least: float
) -> tuple[list[float], list[int]]:
    found: list[float] = []
    worth = 1.0
    for rate in rates[:room]:
        worth *= rate * ratio / (1.0 - rate + rate * ratio)
        if worth < least:
            break
        found.append(worth)
    return found, list(range(1, len(found) + 1))
