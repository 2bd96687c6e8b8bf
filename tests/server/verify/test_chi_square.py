"""Tail probabilities against tables, exact sums and simple cases."""

import math

import pytest

from server.verify.chi_square import poisson_tail, statistic, upper_tail


@pytest.mark.parametrize(
    ("value", "degrees", "chance"),
    # Abramowitz and Stegun, table 26.8.
    [
        (3.841459, 1, 0.05),
        (6.634897, 1, 0.01),
        (18.30704, 10, 0.05),
        (24.32189, 7, 0.001),
        (124.3421, 100, 0.05),
    ],
)
def test_the_tail_is_that_of_the_tables(value: float, degrees: int, chance: float) -> None:
    assert upper_tail(value, degrees) == pytest.approx(chance, rel=1e-5)


@pytest.mark.parametrize("value", [0.01, 1.0, 7.5, 80.0, 700.0])
def test_two_degrees_are_an_exponential_and_one_is_a_normal(value: float) -> None:
    assert upper_tail(value, 2) == pytest.approx(math.exp(-value / 2), rel=1e-10)
    assert upper_tail(value, 1) == pytest.approx(math.erfc(math.sqrt(value / 2)), rel=1e-10)


def test_the_ends() -> None:
    assert upper_tail(0.0, 5) == 1.0
    assert upper_tail(math.inf, 5) == 0.0
    assert 0 <= upper_tail(1e4, 3) < 1e-300


def test_the_tail_falls_with_the_value_and_rises_with_the_degrees() -> None:
    tails = [upper_tail(value / 3, 6) for value in range(1, 120)]
    assert tails == sorted(tails, reverse=True)
    wider = [upper_tail(9.0, degrees) for degrees in range(1, 40)]
    assert wider == sorted(wider)


def test_events_that_are_rare_come_rarely() -> None:
    assert poisson_tail(0, 3.0) == 1.0
    assert poisson_tail(1, 0.5) == pytest.approx(1 - math.exp(-0.5))
    assert poisson_tail(3, 0.01) == pytest.approx(1.65e-7, rel=0.01)


def test_pearsons_statistic() -> None:
    assert statistic([10, 20, 30], [20, 20, 20]) == pytest.approx(10.0)
