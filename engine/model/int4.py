"""Linear layers on a CPU that hold 4-bit weights as they are: those of GGUF files (Q4_0, Q4_1, Q4_K).

Such a file gives each output and 32 inputs a scale and a least value, and each weight a number of 0 to 15:
five bits a weight, of which a step reads much less than of eight, and no number is rounded a second time
(scales of Q4_K, which are products, are: to float16). Once a file is converted its weights are plain numbers,
but blocks of 32 that lie on sixteen steps do not come about by chance, so that they are found again.
Activations are rounded to 8 bits with a scale per 32 inputs, as llama.cpp does for such weights; the sums of
a block are exact, so that a row's result has the same bits whatever shares its batch.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from engine.model.cpu_ops.build import CpuOperators
from engine.model.int8 import Int8Linear, Int8Packer
from engine.model.panel_linear import PANEL, PanelLinear, num_panels

BLOCK = 32
"""Inputs that share a scale and a least value."""

_FIRST_LOOK = 4 * PANEL
"""Outputs that are looked at before the whole layer is."""

_OUTPUTS_AT_A_TIME = 64 * PANEL
"""Packing takes a few copies in float32; of this many outputs they are small."""

_USED = 8
"""A block that uses numbers up to this one, or higher ones, has four bits, and not one or two."""


@dataclass(frozen=True, slots=True)
class FourBitWeights:
    """Weights number * scale + least.

    Attributes:
        numbers: uint8 [outputs, blocks, BLOCK], 0 to 15.
        scales: float16 [outputs, blocks].
        least: float16 [outputs, blocks].
    """

    numbers: torch.Tensor
    scales: torch.Tensor
    least: torch.Tensor

    def plain(self) -> torch.Tensor:
        """float32 [outputs, blocks * BLOCK]."""
        return (self.numbers * self.scales.float()[..., None] + self.least.float()[..., None]).flatten(1)


def find_four_bits(weight: torch.Tensor, operators: CpuOperators) -> FourBitWeights | None:
    """The 4-bit weights that a matrix was made of.

    Args:
        weight: float32 or narrower [outputs, inputs].
        operators: The C++ operators.

    Returns:
        None unless every block of it lies on at most sixteen steps of one size, each weight within what
        float16 rounds, and most blocks use more than a few of them: zeros, or weights of which a block has
        two or three values, say nothing of a file.
    """
    outputs, inputs = weight.shape
    if inputs % BLOCK or _find(weight[:_FIRST_LOOK], operators) is None:
        return None
    blocks = inputs // BLOCK
    whole = FourBitWeights(
        torch.empty(outputs, blocks, BLOCK, dtype=torch.uint8),
        torch.empty(outputs, blocks, dtype=torch.float16),
        torch.empty(outputs, blocks, dtype=torch.float16),
    )
    for begin in range(0, outputs, _OUTPUTS_AT_A_TIME):
        rows = slice(begin, begin + _OUTPUTS_AT_A_TIME)
        if (found := _find(weight[rows], operators)) is None:
            return None
        whole.numbers[rows], whole.scales[rows], whole.least[rows] = found.numbers, found.scales, found.least
    is_full = whole.numbers.amax(-1) >= _USED
    return whole if int(is_full.sum()) * 2 > is_full.numel() else None


def _find(weight: torch.Tensor, operators: CpuOperators) -> FourBitWeights | None:
    """The same for a piece, whatever it uses."""
    numbers, scales, least, others = operators.find_steps(weight.float())
    if others:
        return None
    return FourBitWeights(numbers.view(*scales.shape, BLOCK), scales.half(), least.half())


class Int4Linear(PanelLinear):
    """y = x W^T + b with W as 4-bit integers.

    Args:
        weight: The weights.
        bias: float32 [out_features] or None.
        operators: The C++ operators.
    """

    dtype = "int4"

    def __init__(self, weight: FourBitWeights, bias: torch.Tensor | None, operators: CpuOperators) -> None:
        rows, blocks = weight.scales.shape
        panels, half = num_panels(rows), PANEL // 2
        numbers = torch.empty(panels, blocks, BLOCK // 4, half, 4, dtype=torch.uint8)
        scales = torch.empty(panels, blocks, 2, PANEL, dtype=torch.float16)
        super().__init__((rows, blocks * BLOCK), numbers, scales, bias, operators)
        by_quads = (
            _in_panels(weight.numbers).view(panels, PANEL, blocks, BLOCK // 4, 4).permute(0, 2, 3, 1, 4)
        )
        torch.bitwise_or(by_quads[..., :half, :], by_quads[..., half:, :] << 4, out=numbers)
        for place, factors in enumerate((weight.scales, weight.least)):
            scales[:, :, place] = _in_panels(factors).view(panels, PANEL, blocks).transpose(1, 2)

    @property
    def weight(self) -> torch.Tensor:
        """The weights unpacked again, float32 [out_features, in_features]; a copy, made on each access."""
        numbers = torch.cat((self._numbers & 15, self._numbers >> 4), dim=3)
        scales, least = self._scales.unbind(2)
        whole = FourBitWeights(
            numbers.permute(0, 3, 1, 2, 4).reshape(-1, scales.shape[1], BLOCK),
            scales.transpose(1, 2).flatten(0, 1),
            least.transpose(1, 2).flatten(0, 1),
        )
        return whole.plain()[: self.out_features].contiguous()


def _in_panels(rows: torch.Tensor) -> torch.Tensor:
    """Rows filled up with zeros to whole panels."""
    missing = -len(rows) % PANEL
    return torch.cat((rows, rows.new_zeros(missing, *rows.shape[1:]))) if missing else rows


class Int4Packer:
    """Makes Int4Linear layers of weights that have four bits already, Int8Linear layers of others.

    Args:
        operators: The C++ operators.
    """

    dtype = "int4"

    def __init__(self, operators: CpuOperators) -> None:
        self._operators = operators
        self._others = Int8Packer(operators)

    def refuses(self, weight: torch.Tensor) -> str | None:
        """See LinearPacker."""
        return self._others.refuses(weight)

    def pack(self, weight: torch.Tensor, bias: torch.Tensor | None) -> Int4Linear | Int8Linear:
        """See LinearPacker."""
        found = find_four_bits(weight, self._operators)
        if found is None:
            return self._others.pack(weight, bias)
        return Int4Linear(found, bias, self._operators)

    def restore(self, shape: tuple[int, int], stored: Mapping[str, torch.Tensor]) -> Int4Linear | Int8Linear:
        """See LinearPacker."""
        if stored["_numbers"].dtype != torch.uint8:
            return self._others.restore(shape, stored)
        nothing = torch.empty(0, shape[1] // BLOCK, BLOCK, dtype=torch.uint8)
        scales = torch.empty(0, shape[1] // BLOCK, dtype=torch.float16)
        layer = Int4Linear(FourBitWeights(nothing, scales, scales), None, self._operators)
        layer.out_features = shape[0]
        for name, tensor in stored.items():
            setattr(layer, name, tensor)
        return layer
