"""The arithmetic behind the figures: pure functions of numbers."""

import heapq
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean


@dataclass(frozen=True, slots=True)
class Distribution:
    """A sample in a few numbers, all of the sample's unit but the count."""

    count: int
    mean: float
    p50: float
    p90: float
    p99: float
    smallest: float
    largest: float

    @classmethod
    def of(cls, values: Sequence[float]) -> "Distribution | None":
        """The distribution of a sample; None of an empty one."""
        if not values:
            return None
        ordered = sorted(values)
        p50, p90, p99 = (percentile(ordered, share) for share in (0.5, 0.9, 0.99))
        return cls(len(ordered), fmean(ordered), p50, p90, p99, ordered[0], ordered[-1])


@dataclass(frozen=True, slots=True)
class Interval:
    """A confidence interval."""

    low: float
    high: float


def percentile(ordered: Sequence[float], share: float) -> float:
    """The value below which `share` of a sample lies, between neighbours on a line.

    Args:
        ordered: The sample in ascending order; not empty.
        share: 0 for the smallest value to 1 for the largest.
    """
    place = share * (len(ordered) - 1)
    below = math.floor(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)


def apportion(total: int, weights: Sequence[int]) -> list[int]:
    """Shares `total` out in whole numbers, as near to the weights as these allow.

    Each gets at least one while there are enough; the rest goes to the highest averages (Webster 1832).
    So a chunk's share of an answer's tokens is guessed from its share of the text.

    Args:
        total: What is shared out.
        weights: Positive; their ratio is the one to be met.
    """
    least = 1 if total >= len(weights) else 0
    shares = [least] * len(weights)
    heap = [(-weight / (2 * least + 1), index) for index, weight in enumerate(weights)]
    heapq.heapify(heap)
    for _ in range(total - least * len(weights) if weights else 0):
        _, index = heap[0]
        shares[index] += 1
        heapq.heapreplace(heap, (-weights[index] / (2 * shares[index] + 1), index))
    return shares


def token_gaps(arrivals: Sequence[float], tokens: Sequence[int]) -> list[float]:
    """The latency of each token after the first arrival's.

    Tokens that come together share the wait for them evenly: a step of three tokens in 60 ms is three
    times 20 ms, not one of 60 and two of none.

    Args:
        arrivals: Times of the chunks, ascending.
        tokens: How many tokens each chunk has; the wait for a chunk of none counts for the next.
    """
    gaps: list[float] = []
    since: float | None = None
    for time, count in zip(arrivals, tokens, strict=True):
        if count == 0:
            continue
        if since is not None:
            gaps.extend([(time - since) / count] * count)
        since = time
    return gaps


def geometric_mean(values: Sequence[float]) -> float:
    """The mean of ratios: that of 2 and 1/2 is 1. Values are positive, and there is one."""
    return math.exp(fmean(map(math.log, values)))


def bootstrap_interval(
    values: Sequence[float], seed: int, confidence: float = 0.95, resamples: int = 4000
) -> Interval | None:
    """Confidence interval of the geometric mean: Efron's percentile bootstrap (1979).

    Args:
        values: Independent and positive, such as one speed-up per prompt.
        seed: Of the resampling.
        confidence: Share of resamples that lie within.
        resamples: How often to draw.

    Returns:
        The interval; None for fewer than two values, whose spread cannot be known.
    """
    if len(values) < 2:
        return None
    logs = [math.log(value) for value in values]
    chance = random.Random(seed)
    means = sorted(fmean(chance.choices(logs, k=len(logs))) for _ in range(resamples))
    tail = (1 - confidence) / 2
    return Interval(math.exp(percentile(means, tail)), math.exp(percentile(means, 1 - tail)))


def poisson_arrivals(rate: float, count: int, seed: int) -> list[float]:
    """Times in seconds of `count` arrivals at `rate` per second on average, independent of each other."""
    chance = random.Random(seed)
    times, now = [], 0.0
    for _ in range(count):
        now += chance.expovariate(rate)
        times.append(now)
    return times
