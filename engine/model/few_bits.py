"""Linear layers on a CPU that hold weights of few bits as they are: those of GGUF files.

Files of the types Q4_0, Q4_1 and Q4_K give each output and 32 inputs a scale and a least value, and each
weight a number of 0 to 15, those of Q5_0, Q5_1 and Q5_K one of 0 to 31: five and six bits a weight, of which
a step reads much less than of eight, and no number is rounded a second time (scales of Q4_K and Q5_K, which
are products, are: to float16). Once a file is converted its weights are plain numbers, but blocks of 32 that
lie on so few steps do not come about by chance, so that they are found again. Activations are rounded to 8
bits with a scale per 32 inputs, as llama.cpp does for such weights; the sums of a block are exact, so that a
row's result has the same bits whatever shares its batch.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from engine.model.cpu_ops.build import CpuOperators
from engine.model.int8 import Int8Linear, Int8Packer
from engine.model.panel_linear import PANEL, PanelLinear, in_panels, num_panels
from engine.model.six_bits import BLOCK_BYTES, SixBitsLinear, SixBitWeights, find_six_bits

BLOCK = 32
"""Inputs that share a scale and a least value."""

FEW_BITS = (4, 5)

_HALF = PANEL // 2
_LOW_BYTES = BLOCK * _HALF
"""Bytes of the low four bits of a panel's block; the fifth bits, if there are any, lie behind them."""

_FIRST_LOOK = 4 * PANEL
"""Outputs that are looked at before the whole layer is."""

_OUTPUTS_AT_A_TIME = 64 * PANEL
"""Packing takes a few copies in float32; of this many outputs they are small."""

_USED = 8
"""A block that uses numbers up to this one, or higher ones, has four bits or more, and not one or two."""


@dataclass(frozen=True, slots=True)
class FewBitWeights:
    """Weights number * scale + least.

    Attributes:
        bits: Of a number: 4 or 5.
        numbers: uint8 [outputs, blocks, BLOCK].
        scales: float16 [outputs, blocks].
        least: float16 [outputs, blocks].
    """

    bits: int
    numbers: torch.Tensor
    scales: torch.Tensor
    least: torch.Tensor

    @classmethod
    def empty(cls, bits: int, outputs: int, blocks: int) -> "FewBitWeights":
        """Weights to be filled in."""
        numbers = torch.empty(outputs, blocks, BLOCK, dtype=torch.uint8)
        scales, least = (torch.empty(outputs, blocks, dtype=torch.float16) for _ in range(2))
        return cls(bits, numbers, scales, least)

    def plain(self) -> torch.Tensor:
        """float32 [outputs, blocks * BLOCK]."""
        return (self.numbers * self.scales.float()[..., None] + self.least.float()[..., None]).flatten(1)


def find_few_bits(weight: torch.Tensor, operators: CpuOperators) -> FewBitWeights | None:
    """The weights of four or five bits that a matrix was made of.

    Args:
        weight: float32 or narrower [outputs, inputs].
        operators: The C++ operators.

    Returns:
        None unless every block of it lies on at most 32 steps of one size, each weight within what float16
        rounds, and most blocks use more than a few of them: zeros, or weights of which a block has two or
        three values, say nothing of a file.
    """
    if weight.shape[1] % BLOCK:
        return None
    tries = (_find_all(weight, bits, operators) for bits in FEW_BITS)
    return next((found for found in tries if found is not None), None)


def _find_all(weight: torch.Tensor, bits: int, operators: CpuOperators) -> FewBitWeights | None:
    outputs, inputs = weight.shape
    if _find(weight[:_FIRST_LOOK], bits, operators) is None:
        return None
    whole = FewBitWeights.empty(bits, outputs, inputs // BLOCK)
    for begin in range(0, outputs, _OUTPUTS_AT_A_TIME):
        rows = slice(begin, begin + _OUTPUTS_AT_A_TIME)
        if (found := _find(weight[rows], bits, operators)) is None:
            return None
        whole.numbers[rows], whole.scales[rows], whole.least[rows] = found.numbers, found.scales, found.least
    is_full = whole.numbers.amax(-1) >= _USED
    return whole if int(is_full.sum()) * 2 > is_full.numel() else None


def _find(weight: torch.Tensor, bits: int, operators: CpuOperators) -> FewBitWeights | None:
    """Those of a piece, whatever it uses."""
    numbers, scales, least, others = operators.find_steps(weight.float(), 2**bits - 1)
    if others:
        return None
    return FewBitWeights(bits, numbers.view(*scales.shape, BLOCK), scales.half(), least.half())


class FewBitsLinear(PanelLinear):
    """y = x W^T + b with W as integers of four or five bits.

    Args:
        weight: The weights.
        bias: float32 [out_features] or None.
        operators: The C++ operators.
    """

    def __init__(self, weight: FewBitWeights, bias: torch.Tensor | None, operators: CpuOperators) -> None:
        rows, blocks = weight.scales.shape
        panels = num_panels(rows)
        numbers = torch.empty(panels, blocks, BLOCK * PANEL * weight.bits // 8, dtype=torch.uint8)
        scales = torch.empty(panels, blocks, 2, PANEL, dtype=torch.float16)
        super().__init__((rows, blocks * BLOCK), numbers, scales, bias, operators)
        self._bits = weight.bits
        by_quads = in_panels(weight.numbers).view(panels, PANEL, blocks, BLOCK // 4, 4).permute(0, 2, 3, 1, 4)
        first, second = by_quads[..., :_HALF, :], by_quads[..., _HALF:, :]
        numbers[..., :_LOW_BYTES] = (first & 15 | (second & 15) << 4).flatten(2)
        if weight.bits > 4:
            numbers[..., _LOW_BYTES:] = _gathered(first >> 4 | second >> 4 << 1)
        for place, factors in enumerate((weight.scales, weight.least)):
            scales[:, :, place] = in_panels(factors).view(panels, PANEL, blocks).transpose(1, 2)

    @property
    def dtype(self) -> str:
        """See PackedLayer."""
        return f"int{self._bits}"

    @property
    def weight(self) -> torch.Tensor:
        """The weights unpacked again, float32 [out_features, in_features]; a copy, made on each access."""
        low = self._numbers[..., :_LOW_BYTES].reshape(*self._numbers.shape[:2], BLOCK // 4, _HALF, 4)
        first, second = low & 15, low >> 4
        if self._bits > 4:
            fifths = _spread(self._numbers[..., _LOW_BYTES:])
            first, second = first | (fifths & 1) << 4, second | (fifths >> 1 & 1) << 4
        scales, least = self._scales.unbind(2)
        whole = FewBitWeights(
            self._bits,
            torch.cat((first, second), dim=3).permute(0, 3, 1, 2, 4).reshape(-1, scales.shape[1], BLOCK),
            scales.transpose(1, 2).flatten(0, 1),
            least.transpose(1, 2).flatten(0, 1),
        )
        return whole.plain()[: self.out_features].contiguous()


def _gathered(pairs: torch.Tensor) -> torch.Tensor:
    """Two bits of each quad, [..., quads, outputs, 4], four to a byte: [..., quads / 4 * outputs * 4]."""
    panels, blocks, quads = pairs.shape[:3]
    shifts = torch.tensor([0, 2, 4, 6], dtype=torch.uint8)[:, None, None]
    fours = pairs.reshape(panels, blocks, quads // 4, 4, _HALF, 4)
    return (fours << shifts).sum(3, dtype=torch.uint8).flatten(2)


def _spread(gathered: torch.Tensor) -> torch.Tensor:
    """The reverse; other bits than the lowest two mean nothing."""
    fours = gathered.reshape(*gathered.shape[:2], -1, 1, _HALF, 4)
    shifts = torch.tensor([0, 2, 4, 6], dtype=torch.uint8)[:, None, None]
    return (fours >> shifts).flatten(2, 3)


class FewBitsPacker:
    """Makes layers that keep the bits of weights which have four, five or six, Int8Linear layers of others.

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

    def pack(
        self, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> FewBitsLinear | SixBitsLinear | Int8Linear:
        """See LinearPacker."""
        if (few := find_few_bits(weight, self._operators)) is not None:
            return FewBitsLinear(few, bias, self._operators)
        if (six := find_six_bits(weight, self._operators)) is not None:
            return SixBitsLinear(six, bias, self._operators)
        return self._others.pack(weight, bias)

    def restore(
        self, shape: tuple[int, int], stored: Mapping[str, torch.Tensor]
    ) -> FewBitsLinear | SixBitsLinear | Int8Linear:
        """See LinearPacker."""
        if (numbers := stored["_numbers"]).dtype != torch.uint8:
            return self._others.restore(shape, stored)
        if numbers.shape[2] == BLOCK_BYTES:
            nothing = SixBitWeights.empty(0, shape[1])
            return SixBitsLinear(nothing, None, self._operators).filled(shape[0], stored)
        bits = numbers.shape[2] * 8 // (BLOCK * PANEL)
        empty = FewBitWeights.empty(bits, 0, shape[1] // BLOCK)
        return FewBitsLinear(empty, None, self._operators).filled(shape[0], stored)
