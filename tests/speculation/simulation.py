"""A made-up machine and made-up texts, on which a planner decides step after step. No clock, no chance left.

Requests decode for ever; each has a rate at which the next draft token stands. What a step takes is a
function of its rows and of what is drafted, with a little noise from a seeded generator.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from engine.planning import PlanOutcome
from engine.speculation.auto_planner import AutoPlanner
from engine.speculation.measurements import Measurements, MethodMeasurements
from engine.speculation.planner import Load, Planner, Wish
from engine.speculation.step_cost import StepShape
from engine.token_tree import TokenTree

Curve = Callable[[int], float]


def cpu(rows: int) -> float:
    """As measured on two cores: flat for a few rows, then each costs like a token."""
    return 0.070 * max(1.0 + 0.02 * (rows - 1), 0.75 + 0.14 * rows)


def padded(rows: int) -> float:
    """Rows are padded to multiples of eight, each of which costs something."""
    return 0.010 * (1.0 + 0.25 * ((rows - 1) // 8))


def gpu(rows: int) -> float:
    """Flat up to a knee at 96 rows."""
    return 0.008 * max(1.0 + 0.001 * rows, rows / 96)


@dataclass
class Machine:
    """What things take.

    Attributes:
        forward: The target's pass by rows.
        draft_pass: One level of drafts, whoever takes part ...
        draft_row: ... and each of them.
        host: The rest of a step.
        noise: Relative deviation of a step's time, seeded.
    """

    forward: Curve
    draft_pass: float
    draft_row: float
    host: float = 0.001
    noise: float = 0.03
    rng: random.Random = field(default_factory=lambda: random.Random(0))

    def jitter(self) -> float:
        return 1.0 + self.noise * self.rng.uniform(-1.0, 1.0)


class Simulation:
    """Runs a planner, or one depth for all.

    Args:
        machine: What things take.
        rates: Per request, how often a draft token stands whose parent does.
        planner: Who decides; None drafts `depth` tokens for everybody.
        depth: See planner; with one the most that may be drafted.
    """

    def __init__(
        self,
        machine: Machine,
        rates: Sequence[float],
        planner: Planner | None = None,
        depth: int = 8,
        measurements: Measurements | None = None,
    ) -> None:
        self.machine = machine
        self.rates = list(rates)
        self.depth = depth
        self.planner = planner
        self.measurements = measurements
        self.seconds = 0.0
        self.num_tokens = 0.0
        self.num_nodes = 0
        self.outcomes: list[PlanOutcome] = []
        self.granted: list[int] = []
        self._rng = random.Random(1)
        self._drafts = [0] * len(rates)

    @classmethod
    def planned(cls, machine: Machine, rates: Sequence[float], depth: int = 8) -> "Simulation":
        measurements = Measurements([MethodMeasurements("draft_model")])
        rows = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32, 40, 48, 64, 96, 128)
        measurements.cost.calibrate({count: machine.forward(count) for count in rows}, 0.0, 0.0)
        return cls(machine, rates, AutoPlanner(measurements), depth, measurements)

    def run(self, num_steps: int) -> float:
        """Tokens per second over some more steps."""
        seconds, num_tokens = self.seconds, self.num_tokens
        for _ in range(num_steps):
            self._step()
        return (self.num_tokens - num_tokens) / (self.seconds - seconds)

    def _step(self) -> None:
        drafts = self._drafts
        count = len(self.rates)
        rows = count + sum(drafts)
        forward = self.machine.forward(rows) * self.machine.jitter()
        self.seconds += forward + self.machine.host
        for place, (rate, num_nodes) in enumerate(zip(self.rates, drafts, strict=True)):
            accepted = 0
            while accepted < num_nodes and self._rng.random() < rate:
                accepted += 1
            # What was to be expected, so that luck does not decide between two runs.
            self.num_tokens += sum(rate**depth for depth in range(num_nodes + 1))
            if num_nodes and self.planner is not None and self.measurements is not None:
                tree = TokenTree.chain(range(num_nodes))
                self.measurements.note_verdict(0, str(place), tree, range(1, accepted + 1))
                self.planner.note_verdict(0, str(place), accepted > 0)
        if self.planner is None or self.measurements is None:
            self._drafts = [self.depth] * count
        else:
            self.measurements.note_step(StepShape(rows, count, 0, 0), forward, self.machine.host)
            self._drafts = self._planned(count)
        self.num_nodes += sum(self._drafts)
        self.granted.append(sum(self._drafts))
        deepest = max(self._drafts, default=0)
        if deepest:
            num_rows = sum(self._drafts) + sum(map(bool, self._drafts))
            spent = deepest * self.machine.draft_pass + num_rows * self.machine.draft_row
            spent *= self.machine.jitter()
            self.seconds += spent
            if self.measurements is not None:
                self.measurements.note_draft(0, deepest, num_rows, spent)

    def _planned(self, count: int) -> list[int]:
        assert self.planner is not None
        shape = StepShape(count, count, 0, 0)
        wishes = [Wish(place, str(place), self.depth, self.depth) for place in range(count)]
        allotment = self.planner.allot(Load(shape, shape, 480, count), [], [wishes])
        self.outcomes.append(allotment.outcome)
        drafts = [0] * count
        for grant in allotment.grants[0]:
            drafts[grant.place] = min(grant.num_nodes, grant.max_depth)
        return drafts

    def resize(self, rates: Sequence[float]) -> None:
        """Requests come or go; those that stay keep their places."""
        for place in range(len(rates), len(self.rates)):
            if self.measurements is not None:
                self.measurements.forget(str(place))
        self._drafts = (self._drafts + [0] * len(rates))[: len(rates)]
        self.rates = list(rates)


def best_fixed(
    machine_of: Callable[[], Machine], rates: Sequence[float], depth: int, num_steps: int
) -> float:
    """The most tokens per second of any fixed depth, none included."""
    speeds = []
    for each in range(depth + 1):
        simulation = Simulation(machine_of(), rates, depth=each)
        simulation.run(2)  # The first step has no drafts to check.
        speeds.append(simulation.run(num_steps))
    return max(speeds)
