"""Linear layers on a CPU: weights as 8-bit integers with scales, activations rounded to 16 bits.

A decoding step on a CPU waits for weights; these take half the bytes of float16. Each output has a scale
per 64 inputs, and each row of activations one of its own. Products are summed as integers, exactly, so that
a row's result has the same bits whatever shares its batch.
"""

import math
from collections.abc import Mapping

import torch

from engine.model.cpu_ops.build import CpuOperators
from engine.model.packing import NOT_FINITE, largest_magnitude
from engine.model.panel_linear import PANEL, PanelLinear, num_panels

BLOCK = 64
"""Inputs that share a scale."""

_LARGEST = 127
_PANELS_AT_A_TIME = 64
"""Packing takes a few copies in float32; of this many panels they are small."""


class Int8Linear(PanelLinear):
    """y = x W^T + b with W as 8-bit integers.

    Args:
        weight: float32 or narrower [out_features, in_features]; copied, so that the caller may free it.
        bias: float32 [out_features] or None.
        operators: The C++ operators.
    """

    dtype = "int8"

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, operators: CpuOperators) -> None:
        rows, columns = weight.shape
        panels, blocks = num_panels(rows), -(-columns // BLOCK)
        numbers = torch.empty(panels, blocks, BLOCK // 2, PANEL, 2, dtype=torch.int8)
        scales = torch.empty(panels, blocks, PANEL, dtype=torch.bfloat16)
        super().__init__((rows, columns), numbers, scales, bias, operators)
        for begin in range(0, panels, _PANELS_AT_A_TIME):
            end = min(begin + _PANELS_AT_A_TIME, panels)
            self._pack(weight[begin * PANEL : end * PANEL].float(), slice(begin, end))

    def _pack(self, weight: torch.Tensor, panels: slice) -> None:
        count, blocks = panels.stop - panels.start, self._scales.shape[1]
        padded = weight.new_zeros(count * PANEL, blocks * BLOCK)
        padded[: weight.shape[0], : weight.shape[1]] = weight
        scales = block_scales(padded)
        numbers = torch.round(padded.view(-1, blocks, BLOCK) / scales.float()[..., None]).to(torch.int8)
        self._numbers[panels] = numbers.view(count, PANEL, blocks, BLOCK // 2, 2).permute(0, 2, 3, 1, 4)
        self._scales[panels] = scales.view(count, PANEL, blocks).permute(0, 2, 1)

    @property
    def weight(self) -> torch.Tensor:
        """The weights unpacked again, float32 [out_features, in_features]; a copy, made on each access."""
        panels, blocks = self._scales.shape[:2]
        numbers = self._numbers.permute(0, 3, 1, 2, 4).reshape(panels * PANEL, blocks, BLOCK)
        scales = self._scales.permute(0, 2, 1).reshape(panels * PANEL, blocks, 1)
        whole = (numbers * scales.float()).flatten(1)
        return whole[: self.out_features, : self.in_features].contiguous()


def block_scales(weight: torch.Tensor) -> torch.Tensor:
    """One scale per output and block, in bfloat16 and never too small for the block's largest weight.

    Args:
        weight: float32 [outputs, blocks * BLOCK].

    Returns:
        bfloat16 [outputs, blocks].
    """
    exact = weight.view(weight.shape[0], -1, BLOCK).abs().amax(-1) / _LARGEST
    rounded = exact.to(torch.bfloat16)
    # A scale that was rounded down would push the largest weight beyond 127: the next bfloat16 up.
    too_small = rounded.float() < exact
    rounded = torch.where(too_small, (rounded.view(torch.int16) + 1).view(torch.bfloat16), rounded)
    return torch.where(rounded == 0, torch.ones_like(rounded), rounded)


class Int8Packer:
    """Makes Int8Linear layers.

    Args:
        operators: The C++ operators.
    """

    dtype = "int8"

    def __init__(self, operators: CpuOperators) -> None:
        self._operators = operators

    def refuses(self, weight: torch.Tensor) -> str | None:
        """See LinearPacker."""
        return None if math.isfinite(largest_magnitude(weight)) else NOT_FINITE

    def pack(self, weight: torch.Tensor, bias: torch.Tensor | None) -> Int8Linear:
        """See LinearPacker."""
        return Int8Linear(weight, bias, self._operators)

    def restore(self, shape: tuple[int, int], stored: Mapping[str, torch.Tensor]) -> Int8Linear:
        """See LinearPacker."""
        rows, columns = shape
        return Int8Linear(torch.empty(0, columns), None, self._operators).filled(rows, stored)
