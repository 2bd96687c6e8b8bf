"""Pearson's chi-square statistic and its critical values, for tests over fixed ranges of seeds.

The noise is a pure function of its key, so a statistic over a fixed range of seeds is one fixed number: such
a test either always passes or always fails. The critical values say that a sound hash would exceed them with
a probability of one in a thousand.
"""

import torch

# Degrees of freedom -> value exceeded with probability 0.001.
CRITICAL = {7: 24.32, 9: 27.88, 15: 37.70, 255: 330.52}


def statistic(counts: torch.Tensor, law: torch.Tensor) -> float:
    """Sum of (observed - expected)^2 / expected over all cells."""
    expected = law.flatten().to(torch.float64) * counts.sum()
    assert float(expected.min()) > 5, "too few draws for the chi-square law to hold"
    return float(((counts.flatten() - expected) ** 2 / expected).sum())
