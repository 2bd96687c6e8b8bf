"""What is measured while serving: the cost of drafting is told from that of looking on."""

import pytest

from engine.speculation.measurements import Measurements, MethodMeasurements

START, PER_PASS, PER_ROW = 0.001, 0.0004, 0.00006


def test_calls_that_only_look_on_do_not_make_drafts_look_cheap() -> None:
    measurements = Measurements([MethodMeasurements("eagle")])
    measurements.cost.calibrate({1: 0.008, 2: 0.009}, 0.0, 0.0)
    for step in range(400):
        num_levels = 1 + step // 8 % 3 if step % 8 == 0 else 0
        num_rows = 60 if step % 8 == 4 else 2 * num_levels
        seconds = START + PER_PASS * num_levels if num_levels else 0.0001
        measurements.note_draft(0, num_levels, num_rows, seconds + PER_ROW * num_rows)
    costs = measurements.methods[0].costs.solve(measurements.cost.unit)
    for num_levels in (1, 2, 3):
        expected = START + (PER_PASS + 2 * PER_ROW) * num_levels
        found = costs[0] + (costs[1] + 2 * costs[2]) * num_levels
        assert found == pytest.approx(expected, rel=0.15)
