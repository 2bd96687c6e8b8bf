"""CostModel: what a step of the target takes, by rows, context and requests, measured and kept up to date."""

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate, compress
from statistics import median

from engine.speculation.linear_fit import LinearFit
from engine.speculation.row_curve import RowCurve
from engine.speculation.steepness import Steepness

# Steps whose median says how fast the machine is at the moment.
_RECENT = 9
# So many plain ones among them are enough.
_ENOUGH = 3
# Steps whose host work is entered one by one, and then of so many one: they are much alike.
_FIRST, _EVERY = 64, 4
# One step's deviation that a row count's own entry may be moved by.
_LEAST, _MOST = 0.67, 1.5
# Behind so many rows a pass with prompts in it is like one without.
_MANY_ROWS = 64


@dataclass(frozen=True, slots=True)
class StepShape:
    """What a step computes.

    Attributes:
        rows: Tokens of the forward pass.
        requests: How many take part.
        context: Tokens that they look at, added up over requests ...
        row_context: ... and over rows.
        reads_prompts: Whether prompts are among them, most of whose rows want no logits.
    """

    rows: int
    requests: int
    context: int
    row_context: int
    reads_prompts: bool = False

    @property
    def plain(self) -> "StepShape":
        """The same without drafts; for a step that reads no prompts."""
        return StepShape(self.requests, self.requests, self.context, self.context)


class CostModel:
    """Seconds of a step: forward by a curve over rows and a share per context token, and the host's work.

    Forward includes choosing tokens: on a GPU the wait for the one shows up in the other.
    """

    def __init__(self) -> None:
        self._curve = RowCurve()
        self._per_context = 0.0
        self._per_row_context = 0.0
        # Of recent steps what they took over what the curve says, their rows, and which had no drafts.
        self._ratios: deque[float] = deque(maxlen=_RECENT)
        self._rows: deque[int] = deque(maxlen=_RECENT)
        self._are_plain: deque[bool] = deque(maxlen=_RECENT)
        self._speed = 1.0
        self._steepness = Steepness()
        self._num_steps = 0
        self._host = LinearFit((0.02, 0.005), (1.0, 4.0))
        self._host_costs = (0.0, 0.0)
        self.is_measured = False

    def calibrate(self, by_rows: Mapping[int, float], per_context: float, per_row_context: float) -> None:
        """Takes what was measured at start; see `engine.calibration`.

        Args:
            by_rows: Seconds of a forward pass by rows, without context.
            per_context: Seconds that a token of context adds, once a request.
            per_row_context: And once for every row.
        """
        self._curve.set(by_rows)
        self._per_context, self._per_row_context = per_context, per_row_context
        self._ratios.extend([1.0] * 3)
        self._rows.extend([0] * 3)
        self._are_plain.extend([False] * 3)  # Of another moment.
        self._speed = 1.0
        self._host_costs = (0.0, 0.0)
        self.is_measured = True

    @property
    def unit(self) -> float:
        """Seconds of a pass of one row without context: the scale of everything that is not measured yet."""
        return self._speed * self._curve.value(1)

    def forward(self, shape: StepShape) -> float:
        """Seconds of the target's pass."""
        at_rest = self._at_rest(shape)
        if shape.rows > shape.requests and not shape.reads_prompts:
            at_rest += (self._steepness.value - 1.0) * (at_rest - self._at_rest(shape.plain))
        return self._speed * at_rest

    def step(self, shape: StepShape) -> float:
        """Seconds of a step, drafting left out."""
        per_step, per_request = self._host_costs
        return self.forward(shape) + per_step + per_request * shape.requests

    def rise(self, shape: StepShape, count: int) -> list[float]:
        """Seconds that 0, 1, ... `count` more rows add to a pass; never falling."""
        per_row = self._per_row_context * shape.context / max(shape.requests, 1)
        values = list(accumulate(self._curve.run(shape.rows, count), max))
        first, speed = values[0], self._speed * self._steepness.value
        if not per_row:
            return [speed * (value - first) for value in values]
        return [speed * (value - first + number * per_row) for number, value in enumerate(values)]

    def observe(self, shape: StepShape, forward_seconds: float, host_seconds: float) -> float | None:
        """Enters a step that was made.

        Returns:
            What would have been said of it; None before anything was known.
        """
        expected = self._at_rest(shape)
        said = self.step(shape) if self.is_measured else None
        if not shape.reads_prompts:
            expected = self._observe_drafts(shape, expected, forward_seconds + host_seconds)
            self._ratios.append(forward_seconds / expected)
            self._rows.append(shape.rows)
            self._are_plain.append(shape.rows == shape.requests)
            plain = list(compress(self._ratios, self._are_plain))
            # What drafts cost is told from plain steps.
            self._speed = median(plain if len(plain) >= _ENOUGH else self._ratios)
            self.is_measured = True
            self._observe_host(shape, host_seconds)
        # Of a size that most recent steps had, nobody can say whether it or the machine has become slower.
        is_usual = len(self._rows) < _RECENT or 2 * self._rows.count(shape.rows) > _RECENT
        if not is_usual and (not shape.reads_prompts or shape.rows > _MANY_ROWS):
            ratio = forward_seconds / (self._speed * expected)
            self._curve.observe(shape.rows, min(max(ratio, _LEAST), _MOST))
        return said

    def _observe_drafts(self, shape: StepShape, expected: float, seconds: float) -> float:
        """Learns what drafts added to a step; returns what was expected of its pass, at rest."""
        rise = expected - self._at_rest(shape.plain)
        expected += (self._steepness.value - 1.0) * rise
        # Without plain ones nobody can say whether rows have become dearer or all of the step.
        said = self._speed * rise if sum(self._are_plain) >= _ENOUGH else 0.0
        self._steepness.observe(said, seconds - self.step(shape.plain), self.unit)
        return expected

    def _observe_host(self, shape: StepShape, seconds: float) -> None:
        self._num_steps += 1
        if self._num_steps <= _FIRST or self._num_steps % _EVERY == 0:
            self._host.observe((1.0, float(shape.requests)), seconds, self.unit)
            per_step, per_request = self._host.solve(self.unit)
            self._host_costs = (per_step, per_request)

    @property
    def speed(self) -> float:
        """Recent steps over the curve as it is held."""
        return self._speed

    @property
    def context_costs(self) -> tuple[float, float]:
        """Seconds per token of context, once a request and once a row."""
        return self._speed * self._per_context, self._speed * self._per_row_context

    @property
    def host_costs(self) -> tuple[float, float]:
        """Seconds of the host's work per step and per request."""
        return self._host_costs

    def table(self) -> list[tuple[int, float, int]]:
        """Rows, seconds at the speed of the moment and number of observations of each known size."""
        return [(rows, self._speed * seconds, seen) for rows, seconds, seen in self._curve.entries()]

    def _at_rest(self, shape: StepShape) -> float:
        return (
            self._curve.value(shape.rows)
            + self._per_context * shape.context
            + self._per_row_context * shape.row_context
        )
