"""Measurements: what planning goes by. Everything in it comes from steps that are over."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from engine.planning import MethodReport, RequestReport
from engine.speculation.acceptance_book import AcceptanceBook
from engine.speculation.calibration_book import CalibrationBook
from engine.speculation.linear_fit import LinearFit
from engine.speculation.resting import LookupRests
from engine.speculation.step_cost import CostModel, StepShape
from engine.speculation.tree_shape import TreeShape
from engine.token_tree import TokenTree

# Steps from one to the next in which it is noted what lookups take.
_REPORTED = 8


@dataclass(slots=True)
class MethodMeasurements:
    """What is known of one method.

    Attributes:
        method: Its name.
        estimates: Whether its trees say how likely each node is.
        shape: What its trees usually look like; None is a chain.
        book: Acceptance by depth, rank and request.
        calibration: What its trees' own estimates have been worth.
        costs: Seconds of drafting, per draft, per level and per row. Before anything was seen they are taken
            to be small, in shares of a step of the target: what seems cheap is tried, and then it is known.
    """

    method: str
    estimates: bool = False
    shape: TreeShape | None = None
    book: AcceptanceBook = field(default_factory=AcceptanceBook)
    costs: LinearFit = field(default_factory=lambda: LinearFit((0.0, 0.05, 0.002), (1.0, 3.0, 6.0)))
    calibration: CalibrationBook = field(default_factory=CalibrationBook)


class Measurements:
    """Costs and acceptance, shared by whoever plans.

    Args:
        methods: In the order in which they are asked.
    """

    def __init__(self, methods: Sequence[MethodMeasurements]) -> None:
        self.methods = tuple(methods)
        self.cost = CostModel()
        self.lookups = LookupRests()
        self.step = 0
        """Number of the step."""

    def note_step(self, shape: StepShape, forward_seconds: float, host_seconds: float) -> float | None:
        """Enters a step that was made.

        Returns:
            What the cost model would have said of it; None before it knew anything.
        """
        self.step += 1
        return self.cost.observe(shape, forward_seconds, host_seconds)

    def note_draft(self, method: int, num_levels: int, num_rows: int, seconds: float) -> None:
        """Enters what a call of a speculator took.

        One that only looks on, or reads what came by, says what rows cost. What it takes to draft at all is
        many times as much as to look on, and told by drafts alone. What lookups take is for reports, and
        changes little.
        """
        is_for_reports = self.methods[method].estimates and self.step % _REPORTED
        if (num_levels or num_rows) and not is_for_reports:
            amounts = (float(num_levels > 0), float(num_levels), float(num_rows))
            self.methods[method].costs.observe(amounts, seconds, self.cost.unit)

    def note_verdict(
        self, method: int, request_id: str, tree: TokenTree, accepted: Sequence[int], most_levels: int = 0
    ) -> None:
        """Enters which nodes of a tree stand, that might have had so many levels."""
        known = self.methods[method]
        if known.estimates:
            known.calibration.note(tree.probabilities, accepted)
        else:
            known.book.note(request_id, tree, accepted, self.step, most_levels)

    def forget(self, request_id: str) -> None:
        """Drops a request that ended."""
        for known in self.methods:
            known.book.forget(request_id)
        self.lookups.forget(request_id)

    def method_reports(self) -> tuple[MethodReport, ...]:
        """The methods for a report."""
        return tuple(self._report(known) for known in self.methods)

    def request_reports(self) -> tuple[RequestReport, ...]:
        """The requests for a report."""
        return tuple(
            RequestReport(request_id, known.method, rate, num_tested)
            for known in self.methods
            for request_id, rate, num_tested in known.book.own_rates()
        )

    def _report(self, known: MethodMeasurements) -> MethodReport:
        start, per_pass, per_row = known.costs.solve(self.cost.unit)
        rates = () if known.estimates else tuple(map(tuple, known.book.rates()))
        return MethodReport(
            known.method,
            rates,
            known.book.num_verdicts,
            1000.0 * start,
            1000.0 * per_pass,
            1000.0 * per_row,
            known.calibration.overall if known.estimates else None,
        )
