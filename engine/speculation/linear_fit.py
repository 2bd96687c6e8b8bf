"""LinearFit: a sum of few costs, learned from what they came to together."""

from collections.abc import Sequence

# Observations after which an old one counts a third.
_MEMORY = 100.0
# How many observations of the usual size the prior counts for.
_PRIOR_WEIGHT = 3.0
# Once something is known, an observation counts as this many times the expected at most: a step that the
# machine slept through says nothing.
_MOST = 3.0
_KNOWN = 8
# Units that differ by no more than this share one solution.
_SAME_UNIT = 0.1
# Once so many observations have come in, a solution holds for some more: each changes it by little.
_SETTLED = 64
_HOLDS = 8


class LinearFit:
    """Least squares with forgetting, pulled to a prior where the observations say nothing.

    Args:
        priors: Per factor its cost before anything was seen, in units that `solve` is told.
        usual: Per factor a usual amount.
    """

    def __init__(self, priors: Sequence[float], usual: Sequence[float]) -> None:
        self._priors = tuple(priors)
        self._weights = tuple(_PRIOR_WEIGHT * amount * amount for amount in usual)
        size = len(self._priors)
        self._products = [[0.0] * size for _ in range(size)]
        self._targets = [0.0] * size
        self.num_seen = 0
        self._solution: tuple[float, ...] = ()
        self._unit = 0.0

    def observe(self, amounts: Sequence[float], cost: float, unit: float) -> None:
        """Enters what some amounts of the factors cost together."""
        if self.num_seen >= _KNOWN:
            expected = sum(map(float.__mul__, self.solve(unit), map(float, amounts)))
            cost = min(cost, _MOST * expected)
        self.num_seen += 1
        if self.num_seen < _SETTLED or self.num_seen % _HOLDS == 0:
            self._solution = ()
        keep = 1.0 - 1.0 / _MEMORY
        for row, (amount, products) in enumerate(zip(amounts, self._products, strict=True)):
            self._targets[row] = keep * self._targets[row] + amount * cost
            for column, other in enumerate(amounts):
                products[column] = keep * products[column] + amount * other

    def solve(self, unit: float) -> tuple[float, ...]:
        """The cost of each factor, none below 0.

        Args:
            unit: What a prior of 1 stands for.
        """
        if self._solution and abs(unit - self._unit) <= _SAME_UNIT * unit:
            return self._solution
        rows = [[*products, target] for products, target in zip(self._products, self._targets, strict=True)]
        for place, (row, weight, prior) in enumerate(zip(rows, self._weights, self._priors, strict=True)):
            row[place] += weight
            row[-1] += weight * prior * unit
        self._solution, self._unit = tuple(max(0.0, value) for value in _solved(rows)), unit
        return self._solution


def _solved(rows: list[list[float]]) -> list[float]:
    """Gauss and Jordan; the weights of the priors keep the pivots away from 0."""
    for place, pivot in enumerate(rows):
        scale = pivot[place]
        pivot[:] = [value / scale for value in pivot]
        for other in rows:
            if other is not pivot and other[place]:
                factor = other[place]
                other[:] = [value - factor * own for value, own in zip(other, pivot, strict=True)]
    return [row[-1] for row in rows]
