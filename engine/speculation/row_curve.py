"""RowCurve: how long a forward pass takes by its rows; a table with straight lines between its entries."""

from bisect import bisect_right
from collections.abc import Mapping

# Every row where drafts are decided one by one, then ever wider apart.
KNOTS = (
    *range(1, 17),
    *range(20, 65, 4),
    *range(80, 129, 16),
    *range(160, 257, 32),
    *range(320, 1025, 64),
    *range(1280, 4097, 256),
)

# Before anything is measured, what a row adds to a step of one row, in its own units: see `evidence`.
UNMEASURED_ROW = 0.12

# How far an entry follows one observation: 1 / n of the way for the n-th, and never less than this.
_LEAST_RATE = 0.03
_FIRST = 4
# Observations that an entry measured at start counts for.
_MEASURED = 16


class RowCurve:
    """Seconds by rows. Not assumed to be straight or convex: kernels pad, and the roofline has a knee.

    Passes of different sizes are seen at different times, on a machine whose speed drifts. Who observes
    tells how fast it is at the moment, so that only a size's deviation from the others moves its entry.
    """

    def __init__(self) -> None:
        self._values = [1.0 + UNMEASURED_ROW * (rows - 1) for rows in KNOTS]
        self._counts = [0] * len(KNOTS)

    def set(self, measured: Mapping[int, float]) -> None:
        """Takes a table, with straight lines between and behind its points.

        Args:
            measured: Seconds by rows; two sizes at least.
        """
        points = sorted(measured.items())
        highest = 0.0
        for place, rows in enumerate(KNOTS):
            above = next((i for i, (size, _) in enumerate(points) if size >= rows), len(points) - 1)
            above = max(above, 1)
            (left, low), (right, high) = points[above - 1], points[above]
            # Behind the last point each row costs no less than on the way to it.
            slope = (high - low) / (right - left)
            if rows > right:
                slope = max(slope, (high - points[0][1]) / (right - points[0][0]))
                value = high + slope * (rows - right)
            else:
                value = high - slope * (right - rows)
            highest = self._values[place] = max(highest, value, 1e-9)
            self._counts[place] = _MEASURED if rows in measured else 0

    def value(self, rows: int) -> float:
        """Seconds of a pass of so many rows."""
        place = min(bisect_right(KNOTS, rows), len(KNOTS) - 1) - 1
        left, right = KNOTS[place], KNOTS[place + 1]
        low, high = self._values[place], self._values[place + 1]
        value: float = low + (high - low) * (rows - left) / (right - left)
        return value

    def run(self, begin: int, count: int) -> list[float]:
        """The values of `begin`, `begin` + 1, ... `begin` + `count` rows."""
        place = min(bisect_right(KNOTS, begin), len(KNOTS) - 1) - 1
        found: list[float] = []
        rows = begin
        while len(found) <= count:
            left, right = KNOTS[place], KNOTS[place + 1]
            low = self._values[place]
            slope = (self._values[place + 1] - low) / (right - left)
            end = begin + count if place + 2 == len(KNOTS) else min(begin + count, right - 1)
            found.extend([low + slope * (row - left) for row in range(rows, end + 1)])
            rows = end + 1
            place = min(place + 1, len(KNOTS) - 2)
        return found

    def observe(self, rows: int, ratio: float) -> None:
        """Corrects the entries beside a size.

        Args:
            rows: The pass's.
            ratio: What it took over what the curve says, at the speed of the moment.
        """
        place = min(bisect_right(KNOTS, rows), len(KNOTS) - 1) - 1
        left, right = KNOTS[place], KNOTS[place + 1]
        share = min(1.0, (rows - left) / (right - left))
        for entry, weight in ((place, 1.0 - share), (place + 1, share)):
            if weight < 0.25:
                continue
            self._counts[entry] += 1
            rate = max(_LEAST_RATE, 1.0 / (_FIRST + self._counts[entry]))
            self._values[entry] *= 1.0 + rate * weight * (ratio - 1.0)

    def entries(self) -> list[tuple[int, float, int]]:
        """Rows, seconds and how often it was seen, of each entry that was."""
        table = zip(KNOTS, self._values, self._counts, strict=True)
        return [(rows, value, count) for rows, value, count in table if count]
