"""The arithmetic, against values worked out by hand or by enumeration."""

import itertools
import math
from statistics import fmean

import pytest

from server.bench.statistics import (
    Distribution,
    apportion,
    bootstrap_interval,
    geometric_mean,
    percentile,
    poisson_arrivals,
    token_gaps,
)


@pytest.mark.parametrize(
    ("share", "expected"), [(0.0, 10.0), (0.5, 25.0), (0.9, 37.0), (0.99, 39.7), (1.0, 40.0)]
)
def test_percentiles_lie_on_the_line_between_neighbours(share: float, expected: float) -> None:
    assert percentile([10.0, 20.0, 30.0, 40.0], share) == pytest.approx(expected)


def test_every_percentile_of_one_value_is_that_value() -> None:
    assert [percentile([7.0], share) for share in (0.0, 0.5, 0.99)] == [7.0] * 3


def test_a_distribution_does_not_care_for_order() -> None:
    found = Distribution.of([40.0, 10.0, 30.0, 20.0])
    assert found is not None
    assert (found.count, found.mean, found.smallest, found.largest) == (4, 25.0, 10.0, 40.0)
    assert [found.p50, found.p90, found.p99] == pytest.approx([25.0, 37.0, 39.7])
    assert Distribution.of([]) is None


@pytest.mark.parametrize(
    ("total", "weights", "expected"),
    [
        (4, [1, 1, 1, 1], [1, 1, 1, 1]),
        (8, [4, 28], [1, 7]),
        (6, [10, 10, 10], [2, 2, 2]),
        (5, [1, 100], [1, 4]),
        (10, [53, 24, 23], [6, 2, 2]),
        (2, [1, 5, 4], [0, 1, 1]),
        (0, [3, 4], [0, 0]),
        (5, [], []),
    ],
)
def test_tokens_are_shared_out_by_weight_and_each_chunk_has_one(
    total: int, weights: list[int], expected: list[int]
) -> None:
    assert apportion(total, weights) == expected


def test_no_token_is_lost_or_invented() -> None:
    for total in range(30):
        assert sum(apportion(total, [3, 1, 4, 1, 5, 9, 2, 6])) == total


def test_tokens_of_one_chunk_share_its_wait() -> None:
    assert token_gaps([1.0, 1.06, 1.16], [2, 3, 1]) == pytest.approx([0.02, 0.02, 0.02, 0.1])


def test_the_wait_for_a_chunk_without_a_token_counts_for_the_next() -> None:
    assert token_gaps([0.0, 0.1, 0.3], [1, 0, 2]) == pytest.approx([0.15, 0.15])
    assert token_gaps([0.0, 0.1, 0.3], [0, 1, 1]) == pytest.approx([0.2])
    assert token_gaps([], []) == []


def test_gaps_add_up_to_the_time_from_the_first_to_the_last() -> None:
    arrivals = [0.5, 0.7, 0.75, 1.5, 2.0]
    assert sum(token_gaps(arrivals, [1, 4, 1, 2, 3])) == pytest.approx(1.5)


def test_a_doubling_and_a_halving_cancel_out() -> None:
    assert geometric_mean([2.0, 0.5]) == pytest.approx(1.0)
    assert geometric_mean([1.0, 4.0, 2.0]) == pytest.approx(2.0)


def test_the_interval_is_that_of_all_resamples() -> None:
    """Of four values there are 256 resamples, all as likely: their percentiles are what sampling nears."""
    values = [0.9, 1.1, 1.6, 2.4]
    means = sorted(fmean(math.log(v) for v in chosen) for chosen in itertools.product(values, repeat=4))
    found = bootstrap_interval(values, seed=1, resamples=20_000)
    assert found is not None
    # Half a percent of probability to either side, many times the error of 20 000 draws.
    assert math.exp(percentile(means, 0.02)) <= found.low <= math.exp(percentile(means, 0.03))
    assert math.exp(percentile(means, 0.97)) <= found.high <= math.exp(percentile(means, 0.98))
    assert found.low < geometric_mean(values) < found.high


def test_the_interval_is_a_function_of_its_seed() -> None:
    values = [1.01**step for step in range(40)]
    assert bootstrap_interval(values, 3) == bootstrap_interval(values, 3)
    assert bootstrap_interval(values, 3) != bootstrap_interval(values, 4)


def test_equal_values_have_no_spread_and_one_value_has_no_interval() -> None:
    found = bootstrap_interval([1.5, 1.5, 1.5], 0)
    assert found is not None
    assert [found.low, found.high] == pytest.approx([1.5, 1.5])
    assert bootstrap_interval([1.5], 0) is None
    assert bootstrap_interval([], 0) is None


def test_poisson_arrivals_have_the_rate_and_the_spread_of_a_poisson_process() -> None:
    arrivals = poisson_arrivals(4.0, 20_000, 0)
    gaps = [later - earlier for earlier, later in itertools.pairwise([0.0, *arrivals])]
    assert min(gaps) > 0
    # Mean and standard deviation of an exponential law are both 1 / rate; 20 000 draws err by under 1 %.
    mean = fmean(gaps)
    assert mean == pytest.approx(0.25, rel=0.03)
    assert math.sqrt(fmean((gap - mean) ** 2 for gap in gaps)) == pytest.approx(0.25, rel=0.03)
    assert poisson_arrivals(4.0, 3, 0) == arrivals[:3] != poisson_arrivals(4.0, 3, 1)
