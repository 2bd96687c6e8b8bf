"""PlanRecord: what the planner did, counted for reports, and a line in the log every minute."""

import logging
from collections.abc import Callable
from itertools import starmap

from engine.planning import OutcomeCount, PlannerReport, PlanOutcome, PlanStats, RowCost
from engine.speculation.measurements import Measurements

logger = logging.getLogger(__name__)

_SECONDS_PER_LINE = 60.0
_RATE = 0.02


class PlanRecord:
    """Counts steps by outcome.

    Args:
        clock: Seconds, monotonic.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._line_at = clock() + _SECONDS_PER_LINE
        self._since_line = dict.fromkeys(PlanOutcome, 0)
        self._granted_since_line = 0
        self.outcomes = dict.fromkeys(PlanOutcome, 0)
        self.num_granted = 0
        self.error: float | None = None
        """Mean deviation of predicted from measured steps, recent ones first of all."""

    def note(self, stats: PlanStats) -> None:
        """Enters a step."""
        self.outcomes[stats.outcome] += 1
        self._since_line[stats.outcome] += 1
        self.num_granted += stats.num_granted
        self._granted_since_line += stats.num_granted
        if stats.predicted_seconds is not None and stats.measured_seconds > 0.0:
            error = abs(stats.predicted_seconds - stats.measured_seconds) / stats.measured_seconds
            self.error = error if self.error is None else self.error + _RATE * (error - self.error)
        if self._clock() >= self._line_at:
            self._say()

    def report(self, planner: str, known: Measurements) -> PlannerReport:
        """The current table: what a planner of that name goes by, and has done."""
        cost = known.cost
        context, row_context = cost.context_costs
        per_step, per_request = cost.host_costs
        return PlannerReport(
            planner=planner,
            forward=tuple(RowCost(rows, 1e3 * seconds, seen) for rows, seconds, seen in cost.table()),
            speed=cost.speed,
            microseconds_per_context_token=1e6 * context,
            microseconds_per_row_and_context_token=1e6 * row_context,
            host_milliseconds_per_step=1e3 * per_step,
            host_milliseconds_per_request=1e3 * per_request,
            methods=known.method_reports(),
            requests=known.request_reports(),
            outcomes=tuple(starmap(OutcomeCount, self.outcomes.items())),
            num_granted=self.num_granted,
            prediction_error=self.error,
        )

    def _say(self) -> None:
        num_steps = sum(self._since_line.values())
        shares = ", ".join(
            f"{count / num_steps:.0%} {outcome}" for outcome, count in self._since_line.items() if count
        )
        logger.info(
            "planner: %d steps (%s), %.1f draft nodes granted a step, steps predicted within %s",
            num_steps,
            shares,
            self._granted_since_line / num_steps,
            "-" if self.error is None else f"{self.error:.0%}",
        )
        self._since_line = dict.fromkeys(PlanOutcome, 0)
        self._granted_since_line = 0
        self._line_at = self._clock() + _SECONDS_PER_LINE
