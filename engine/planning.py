"""What the planner says of itself: a step's decision for the metrics, and the table behind it for people."""

from dataclasses import dataclass
from enum import StrEnum


class PlanOutcome(StrEnum):
    """What became of speculation in a step, the first that holds.

    Speculated: drafts are checked that are expected to pay. Probing: only a trial draft is, to see whether
    acceptance has come back. Acceptance: drafts would pay if more of them stood. Load: they would not pay
    at this load even then. Waiting: a prompt is read in the step, and whoever waits for its first token would
    wait longer. No draft: nobody had anything to propose. Room: answers end, or contexts or the pool of
    blocks are full. Disabled: the requests asked for none. Reading: prompts are read, nobody decodes.
    """

    SPECULATED = "speculated"
    PROBING = "probing"
    ACCEPTANCE = "acceptance"
    LOAD = "load"
    WAITING = "waiting"
    NO_DRAFT = "no_draft"
    ROOM = "room"
    DISABLED = "disabled"
    READING = "reading"


@dataclass(frozen=True, slots=True)
class PlanStats:
    """One step's planning.

    Attributes:
        outcome: What became of speculation in the step.
        num_granted: Draft nodes granted for it.
        num_probes: Requests that draft for a trial.
        predicted_seconds: What the cost model said of the step before; None before it knew.
        measured_seconds: What that step took, drafting left out.
    """

    outcome: PlanOutcome
    num_granted: int = 0
    num_probes: int = 0
    predicted_seconds: float | None = None
    measured_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class RowCost:
    """A point of the forward curve: milliseconds of a step's pass with so many rows and no context."""

    rows: int
    milliseconds: float
    num_seen: int


@dataclass(frozen=True, slots=True)
class MethodReport:
    """What is known of one method.

    Attributes:
        method: Its name.
        acceptance: Per depth and rank, how often a child of a reached node stands; empty for lookups, which
            estimate each node themselves.
        num_verdicts: Nodes with children that were reached, so far.
        milliseconds_per_draft, milliseconds_per_pass, milliseconds_per_row: The cost of drafting.
        calibration: Of lookups: accepted tokens over those they expected.
    """

    method: str
    acceptance: tuple[tuple[float, ...], ...]
    num_verdicts: int
    milliseconds_per_draft: float
    milliseconds_per_pass: float
    milliseconds_per_row: float
    calibration: float | None = None


@dataclass(frozen=True, slots=True)
class RequestReport:
    """What is known of one request under one method: acceptance of its tested nodes, and how many."""

    request_id: str
    method: str
    acceptance: float
    num_tested: int


@dataclass(frozen=True, slots=True)
class OutcomeCount:
    """Steps so far in which this became of speculation."""

    outcome: PlanOutcome
    num_steps: int


@dataclass(frozen=True, slots=True)
class PlannerReport:
    """The planner's current table.

    Attributes:
        planner: auto or fixed.
        forward: The cost of a step's forward pass by rows.
        speed: Recent steps over the curve as it is held.
        microseconds_per_context_token: What a token of context adds to a pass, once a request ...
        microseconds_per_row_and_context_token: ... and once for every row that looks at it.
        host_milliseconds_per_step, host_milliseconds_per_request: All but forward, sampling and drafting.
        methods: In the order in which they are asked.
        requests: Those that run and have been tested.
        outcomes: What became of speculation.
        num_granted: Draft nodes granted so far.
        prediction_error: Mean of |predicted - measured| / measured over recent steps.
    """

    planner: str
    forward: tuple[RowCost, ...]
    speed: float
    microseconds_per_context_token: float
    microseconds_per_row_and_context_token: float
    host_milliseconds_per_step: float
    host_milliseconds_per_request: float
    methods: tuple[MethodReport, ...]
    requests: tuple[RequestReport, ...]
    outcomes: tuple[OutcomeCount, ...]
    num_granted: int
    prediction_error: float | None
