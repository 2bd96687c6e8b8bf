"""What a step takes, learned from steps."""

import random

import pytest

from engine.speculation.linear_fit import LinearFit
from engine.speculation.row_curve import RowCurve
from engine.speculation.step_cost import CostModel, StepShape


def shape(rows: int, *, reads_prompts: bool = False) -> StepShape:
    return StepShape(rows, rows, 0, 0, reads_prompts)


def stepped(rows: int) -> float:
    return 0.010 * (1 + (rows - 1) // 4)


def calibrated() -> CostModel:
    cost = CostModel()
    cost.calibrate({rows: stepped(rows) for rows in range(1, 65)}, 0.0, 0.0)
    return cost


def test_a_curve_goes_through_its_points_and_straight_on() -> None:
    curve = RowCurve()
    curve.set({1: 1.0, 4: 2.5, 8: 3.0, 16: 11.0})
    assert curve.run(1, 7) == pytest.approx([1.0, 1.5, 2.0, 2.5, 2.625, 2.75, 2.875, 3.0])
    assert curve.value(12) == pytest.approx(7.0)
    assert curve.value(32) == pytest.approx(27.0)
    assert curve.run(15, 30) == pytest.approx([curve.value(rows) for rows in range(15, 46)])


def test_a_curve_that_was_measured_to_fall_is_held_level() -> None:
    curve = RowCurve()
    curve.set({1: 2.0, 2: 1.0, 4: 3.0})
    assert curve.run(1, 3) == sorted(curve.run(1, 3))


def test_steps_in_the_curve_are_kept() -> None:
    rise = calibrated().rise(shape(3), 6)
    assert rise == pytest.approx([0.0, 0.0, 0.010, 0.010, 0.010, 0.010, 0.020])


def test_a_slower_machine_slows_sizes_that_were_not_seen() -> None:
    cost = calibrated()
    for _ in range(20):
        cost.observe(shape(1), 0.020, 0.0)
    assert cost.forward(shape(1)) == pytest.approx(0.020, rel=0.01)
    assert cost.forward(shape(16)) == pytest.approx(0.080, rel=0.01)


def test_a_size_that_costs_more_than_thought_is_learned() -> None:
    cost = calibrated()
    for step in range(300):
        rows = (1, 2, 8)[step % 3]
        cost.observe(shape(rows), 0.035 if rows == 8 else stepped(rows), 0.0)
    assert cost.forward(shape(8)) == pytest.approx(0.035, rel=0.05)
    assert cost.forward(shape(1)) == pytest.approx(0.010, rel=0.05)


def drafted(requests: int, nodes: int) -> StepShape:
    return StepShape(requests + nodes, requests, 0, 0)


def test_rows_that_cost_more_for_the_moment_are_learned_within_a_few_steps_and_forgotten_again() -> None:
    cost = CostModel()
    cost.calibrate({1: 0.010, 64: 0.073}, 0.0, 0.0)

    def run(steps: int, per_row: float) -> None:
        for step in range(steps):
            nodes = (0, 1, 0, 3)[step % 4]
            cost.observe(drafted(4, nodes), 0.013 + per_row * nodes, 0.001)

    run(40, 0.001)
    assert cost.rise(drafted(4, 0), 3)[1::2] == pytest.approx([0.001, 0.003], rel=0.1)
    run(40, 0.002)
    assert cost.rise(drafted(4, 0), 3)[1::2] == pytest.approx([0.002, 0.006], rel=0.1)
    assert cost.step(drafted(4, 3)) == pytest.approx(0.020, rel=0.05)
    assert cost.step(drafted(4, 0)) == pytest.approx(0.014, rel=0.05)
    run(60, 0.001)
    assert cost.rise(drafted(4, 0), 3)[1::2] == pytest.approx([0.001, 0.003], rel=0.15)


def test_what_rows_cost_for_a_moment_is_not_believed_for_long_where_nobody_drafts() -> None:
    cost = CostModel()
    cost.calibrate({1: 0.010, 64: 0.073}, 0.0, 0.0)
    for step in range(20):
        cost.observe(drafted(4, step % 2), 0.013 + 0.003 * (step % 2), 0.0)
    before = cost.rise(drafted(4, 0), 1)[1]
    assert before > 0.002
    for _ in range(200):
        cost.observe(drafted(4, 0), 0.013, 0.0)
    # Of what is left the curve has learned a part.
    assert cost.rise(drafted(4, 0), 1)[1] < 0.7 * before


@pytest.mark.parametrize("factor", [0.25, 0.5, 2.0])
@pytest.mark.parametrize("every", [0, 20])
def test_a_machine_of_another_speed_has_no_steeper_rows_where_nearly_all_steps_have_drafts(
    factor: float, every: int
) -> None:
    cost = CostModel()
    cost.calibrate({1: 0.010, 64: 0.073}, 0.0, 0.0)
    for step in range(200):
        nodes = 0 if every and step % every == 0 else (2, 4, 8)[step % 3]
        cost.observe(drafted(1, nodes), factor * (0.010 + 0.001 * nodes), 0.0005)
    assert cost.rise(drafted(1, 0), 4)[4] == pytest.approx(factor * 0.004, rel=0.1)
    assert cost.forward(drafted(1, 0)) == pytest.approx(factor * 0.010, rel=0.05)


def test_drafts_of_the_first_step_do_not_make_rows_cheap() -> None:
    cost = CostModel()
    for nodes in (5, 0, 0, 0):
        cost.observe(drafted(1, nodes), 0.020 + 0.0024 * nodes, 0.001)
    assert cost.rise(drafted(1, 0), 5)[5] == pytest.approx(0.012, rel=0.1)


def test_one_step_that_the_machine_slept_through_says_nothing() -> None:
    cost = calibrated()
    for step in range(60):
        cost.observe(shape(2), 3.0 if step % 10 == 5 else 0.010, 0.0)
    assert cost.forward(shape(2)) == pytest.approx(0.010, rel=0.1)


def test_noise_averages_out() -> None:
    cost, rng = calibrated(), random.Random(0)
    for _ in range(400):
        rows = rng.choice((1, 2, 3, 5, 8))
        cost.observe(shape(rows), stepped(rows) * rng.uniform(0.9, 1.1), 0.001)
    ratio = cost.forward(shape(5)) / cost.forward(shape(4))
    assert ratio == pytest.approx(2.0, rel=0.05)
    assert cost.step(shape(4)) - cost.forward(shape(4)) == pytest.approx(0.001, rel=0.1)


def test_without_a_calibration_steps_teach_the_scale() -> None:
    cost = CostModel()
    known = [cost.is_measured]
    for _ in range(10):
        cost.observe(shape(1), 0.5, 0.0)
        known.append(cost.is_measured)
    assert known == [False] + [True] * 10
    assert cost.unit == pytest.approx(0.5)
    assert cost.rise(shape(1), 1)[1] == pytest.approx(0.06, rel=0.1)


def test_prompts_do_not_pass_for_decoding() -> None:
    cost = calibrated()
    for _ in range(50):
        cost.observe(shape(40, reads_prompts=True), 5.0, 0.0)
    assert cost.forward(shape(1)) == pytest.approx(0.010)


def test_costs_are_told_apart() -> None:
    fit, rng = LinearFit((0.0, 0.0, 0.0), (1.0, 3.0, 6.0)), random.Random(0)
    for _ in range(300):
        passes, rows = float(rng.randint(1, 6)), float(rng.randint(1, 40))
        fit.observe((1.0, passes, rows), 0.002 + 0.01 * passes + 0.0005 * rows, 0.1)
    start, per_pass, per_row = fit.solve(0.1)
    assert per_pass == pytest.approx(0.01, rel=0.1)
    assert per_row == pytest.approx(0.0005, rel=0.1)
    assert start + 2 * per_pass + 20 * per_row == pytest.approx(0.032, rel=0.05)


def test_a_prior_gives_way() -> None:
    fit = LinearFit((1.0,), (1.0,))
    assert fit.solve(0.5) == (0.5,)
    values = []
    for _ in range(50):
        fit.observe((1.0,), 0.1, 0.5)
        values.append(fit.solve(0.5)[0])
    assert values == sorted(values, reverse=True)
    assert values[-1] == pytest.approx(0.1, rel=0.4)
