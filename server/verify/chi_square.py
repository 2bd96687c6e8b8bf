"""Tail probabilities: how rarely chance alone would show as much."""

import math
from collections.abc import Sequence

_ROUNDS = 10_000
_SMALL = 1e-15


def statistic(counts: Sequence[int], expected: Sequence[float]) -> float:
    """Pearson's chi-square: sum of (observed - expected)^2 / expected. Expected counts are above 0."""
    pairs = zip(counts, expected, strict=True)
    return math.fsum((count - mean) ** 2 / mean for count, mean in pairs)


def upper_tail(value: float, degrees: int) -> float:
    """The chance that a chi-square variable exceeds a value.

    The regularised upper incomplete gamma function Q(degrees / 2, value / 2), by its series where that
    converges fast and by Legendre's continued fraction elsewhere (Abramowitz and Stegun, 6.5.29 and 6.5.31).

    Args:
        value: At least 0; infinity is fine.
        degrees: At least 1.
    """
    if value <= 0:
        return 1.0
    if math.isinf(value):
        return 0.0
    shape, point = degrees / 2, value / 2
    front = math.exp(shape * math.log(point) - point - math.lgamma(shape))
    if point < shape + 1:
        return max(0.0, 1.0 - front * _series(shape, point))
    return front * _fraction(shape, point)


def poisson_tail(count: int, mean: float) -> float:
    """The chance of at least `count` events where `mean` are expected."""
    below = math.fsum(math.exp(-mean) * mean**k / math.factorial(k) for k in range(count))
    return max(0.0, 1.0 - below)


def _series(shape: float, point: float) -> float:
    """Sum of point^k / (shape (shape + 1) ... (shape + k)) over k from 0."""
    term = total = 1.0 / shape
    for step in range(1, _ROUNDS):
        term *= point / (shape + step)
        total += term
        if term < total * _SMALL:
            break
    return total


def _fraction(shape: float, point: float) -> float:
    """1 / (point + 1 - shape - 1 (1 - shape) / (point + 3 - shape - ...)), by Lentz's method."""
    denominator = point + 1 - shape
    ratio_d = result = 1.0 / denominator
    ratio_c = 1.0 / 1e-300
    for step in range(1, _ROUNDS):
        factor = -step * (step - shape)
        denominator += 2
        ratio_d = 1.0 / (factor * ratio_d + denominator)
        ratio_c = denominator + factor / ratio_c
        change = ratio_c * ratio_d
        result *= change
        if abs(change - 1) < _SMALL:
            break
    return result
