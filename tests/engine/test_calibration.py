"""A pass's cost by rows and context, measured at start: here on a clock that a made-up model moves."""

from contextlib import nullcontext
from dataclasses import dataclass, field

import pytest
import torch

from engine.calibration import CalibrationLimits, calibrate
from engine.model.input_batch import SequenceSlice
from engine.speculation.step_cost import CostModel, StepShape


@dataclass
class Pass:
    rows: int
    context: int


@dataclass
class MadeUpCache:
    num_filled: int = 0
    block_size = 16

    def clear(self, num_slots: int) -> None:
        self.num_filled = num_slots


@dataclass
class MadeUpModel:
    """Passes of 10 ms and 1 ms per row, 2 us per token of context and 1 us per row that looks at it.

    Context in slots that nobody has filled costs nothing, as in memory that the system has yet to hand out.

    Attributes:
        stumbles: The second pass of each size takes ten times as long.
        drifts: The machine is twice as fast during a part of the first passes.
    """

    stumbles: bool = False
    drifts: bool = False
    now: float = 0.0
    passes: list[Pass] = field(default_factory=list)
    vocab_size = 16
    threads = nullcontext()
    cache: MadeUpCache = field(default_factory=MadeUpCache)

    def build(self, slices: list[SequenceSlice]) -> Pass:
        [piece] = slices
        assert len(piece.block_table) * 16 >= piece.start + len(piece)
        return Pass(len(piece), piece.start)

    def forward(self, batch: Pass) -> torch.Tensor:
        self.passes.append(batch)
        context = min(batch.context, self.cache.num_filled)
        seconds = 0.010 + 0.001 * batch.rows + context * (2e-6 + 1e-6 * batch.rows)
        if self.stumbles and self.passes.count(batch) == 2:
            seconds *= 10
        if self.drifts and 4 <= len(self.passes) <= 12:
            seconds /= 2
        self.now += seconds
        return torch.zeros(batch.rows, self.vocab_size)


def calibrated(model: MadeUpModel, limits: CalibrationLimits) -> CostModel:
    cost = CostModel()
    calibrate(model, cost, limits, lambda: model.now)  # type: ignore[arg-type]
    return cost


def alone(rows: int, context: int = 0) -> StepShape:
    return StepShape(rows, 1, context, rows * context)


@pytest.mark.parametrize("stumbles", [False, True])
def test_it_finds_what_a_pass_takes(stumbles: bool) -> None:
    cost = calibrated(MadeUpModel(stumbles), CalibrationLimits(4096, 512, 100.0))
    for rows in (1, 2, 7, 30, 100, 400):
        assert cost.forward(alone(rows)) == pytest.approx(0.010 + 0.001 * rows)
        assert cost.forward(alone(rows, 1000)) == pytest.approx(0.012 + 0.002 * rows)


def test_a_machine_that_is_fast_for_a_moment_leaves_no_step_in_the_curve() -> None:
    cost = calibrated(MadeUpModel(drifts=True), CalibrationLimits(4096, 512, 100.0))
    for rows in (2, 3, 4, 5, 6, 8, 16):
        assert cost.forward(alone(rows)) == pytest.approx(0.010 + 0.001 * rows)


def test_it_ends_in_time_and_goes_on_with_a_straight_line() -> None:
    model = MadeUpModel()
    cost = calibrated(model, CalibrationLimits(4096, 512, 0.2))
    first = next(place for place, each in enumerate(model.passes) if each.context)
    assert sum(0.010 + 0.001 * each.rows for each in model.passes[:first]) < 0.25
    assert len(model.passes) - first <= 12
    assert max(each.rows for each in model.passes) < 32
    assert cost.forward(alone(128)) == pytest.approx(0.138)


@pytest.mark.parametrize("limits", [CalibrationLimits(24, 512), CalibrationLimits(4096, 24)])
def test_it_keeps_to_the_room_there_is(limits: CalibrationLimits) -> None:
    model = MadeUpModel()
    calibrated(model, limits)
    assert max(each.rows + each.context for each in model.passes if each.context == 0) <= 24
    assert max(each.rows + each.context for each in model.passes) <= limits.num_tokens


def test_where_there_is_room_for_one_row_there_is_nothing_to_measure() -> None:
    model = MadeUpModel()
    assert not calibrated(model, CalibrationLimits(4096, 1)).is_measured
    assert model.passes == []
