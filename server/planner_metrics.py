"""What the planner of speculation decides, and how well it foresees what steps take."""

from engine.planning import PlanOutcome, PlanStats
from server.metric_family import STEP_BUCKETS, EngineFamily


class PlannerMetrics:
    """The planner's part of the metrics.

    Args:
        family: Makes them.
    """

    def __init__(self, family: EngineFamily) -> None:
        self._steps = family.counters(
            "planner_steps",
            "Steps by what became of speculation: speculated, probing (a trial only), or why nothing was "
            "drafted: acceptance (too low), load (rows too dear), waiting (for a first token), no_draft, "
            "room, disabled, reading.",
            "outcome",
            list(PlanOutcome),
        )
        self._granted = family.counter("planner_granted_nodes", "Draft nodes granted for coming steps.")
        self._probes = family.counter("planner_probes", "Requests that drafted for a trial.")
        self._predicted = family.histogram(
            "planner_predicted_step_seconds",
            "Steps as predicted, drafting left out.",
            STEP_BUCKETS,
        )
        self._measured = family.histogram(
            "planner_measured_step_seconds", "The same steps as they were.", STEP_BUCKETS
        )

    def note(self, plan: PlanStats | None) -> None:
        """Adds a step; None where nothing was planned."""
        if plan is None:
            return
        self._steps[plan.outcome].inc()
        self._granted.inc(plan.num_granted)
        self._probes.inc(plan.num_probes)
        if plan.predicted_seconds is not None:
            self._predicted.observe(plan.predicted_seconds)
            self._measured.observe(plan.measured_seconds)
