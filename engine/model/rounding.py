"""Linear layers of five and six bits in four, for models that need not be exact: those that only draft.

A pass of a small model on a CPU waits for its weights, and of a file of five or six bits it reads a fifth or
a quarter less so. What it drafts is checked by the target, so that no answer depends on it.
"""

from collections.abc import Mapping

import torch

from engine.model.cpu_ops.build import CpuOperators
from engine.model.few_bits import BLOCK, FewBitsLinear, FewBitsPacker, FewBitWeights
from engine.model.int8 import Int8Linear
from engine.model.six_bits import SixBitsLinear

_BITS = 4
_LARGEST = 2**_BITS - 1

_SHARES = (1.0, 0.95, 0.9, 0.85)
"""Of a block's range that its steps may span: with less than all, extremes lose and all others gain."""

_OUTPUTS_AT_A_TIME = 1024
"""Rounding takes a few copies in float32; of this many outputs they are small."""


def round_to_four_bits(weight: torch.Tensor) -> FewBitWeights:
    """Weights on 16 steps per output and block, of the spans tried that with the least squared error.

    Args:
        weight: float32 or narrower [outputs, inputs]; inputs a multiple of BLOCK.
    """
    outputs, inputs = weight.shape
    whole = FewBitWeights.empty(_BITS, outputs, inputs // BLOCK)
    for begin in range(0, outputs, _OUTPUTS_AT_A_TIME):
        rows = slice(begin, begin + _OUTPUTS_AT_A_TIME)
        whole.numbers[rows], whole.scales[rows], whole.least[rows] = _best_steps(weight[rows].float())
    return whole


def _best_steps(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Numbers, scales and least values of a piece."""
    blocks = weight.view(len(weight), -1, BLOCK)
    best = _steps(blocks, _SHARES[0])
    least_error = _error(blocks, best)
    for share in _SHARES[1:]:
        tried = _steps(blocks, share)
        error = _error(blocks, tried)
        is_better = error < least_error
        least_error = torch.where(is_better, error, least_error)
        numbers = torch.where(is_better[..., None], tried.numbers, best.numbers)
        scales = torch.where(is_better, tried.scales, best.scales)
        best = FewBitWeights(_BITS, numbers, scales, torch.where(is_better, tried.least, best.least))
    return best.numbers, best.scales, best.least


def _steps(blocks: torch.Tensor, share: float) -> FewBitWeights:
    lowest, highest = blocks.aminmax(dim=-1)
    span = (highest - lowest) * share
    least = ((lowest + highest - span) / 2).half()
    scales = (span / _LARGEST).half()
    # Where all weights are equal, or float16 takes the step for nothing, the least value stands for them.
    steps = torch.where(scales == 0, torch.inf, scales.float())[..., None]
    numbers = ((blocks - least.float()[..., None]) / steps).round_().clamp_(0, _LARGEST)
    return FewBitWeights(_BITS, numbers.to(torch.uint8), scales, least)


def _error(blocks: torch.Tensor, steps: FewBitWeights) -> torch.Tensor:
    return (steps.plain().view_as(blocks) - blocks).square_().sum(-1)


class RoundingPacker:
    """Makes layers as FewBitsPacker does, but for those of five and six bits: they get four.

    Args:
        operators: The C++ operators.
    """

    dtype = "int4"

    def __init__(self, operators: CpuOperators) -> None:
        self._operators = operators
        self._exact = FewBitsPacker(operators)

    def refuses(self, weight: torch.Tensor) -> str | None:
        """See LinearPacker."""
        return self._exact.refuses(weight)

    def pack(
        self, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> FewBitsLinear | SixBitsLinear | Int8Linear:
        """See LinearPacker."""
        layer = self._exact.pack(weight, bias)
        if layer.dtype not in ("int5", "int6"):
            return layer
        return FewBitsLinear(round_to_four_bits(weight), bias, self._operators)

    def restore(
        self, shape: tuple[int, int], stored: Mapping[str, torch.Tensor]
    ) -> FewBitsLinear | SixBitsLinear | Int8Linear:
        """See LinearPacker."""
        return self._exact.restore(shape, stored)
