"""Linear layers on a CPU that hold weights of six bits as they are: those of GGUF's type Q6_K.

Such a file gives each weight a number of -32 to 31, each output and 16 inputs a step of eight bits, and each
output and 256 inputs a scale. Half of the values and of the last feed-forward matrices are of this type in
files of four and five bits, and the output layer is. All three are found again in weights that have become
plain numbers: such as make each weight exactly, or round to it in float16. Where the largest of a scale's
steps is 128, as llama.cpp writes them, they are the file's own. So nothing is rounded but activations: to 8
bits, as `few_bits` does it.
"""

from dataclasses import dataclass

import torch

from engine.model.cpu_ops.build import CpuOperators
from engine.model.panel_linear import PANEL, PanelLinear, in_panels, num_panels

BLOCK = 32
"""Inputs that activations have one scale for."""

HALF = 16
"""Inputs that share a step."""

MANY = 256
"""Inputs that share a scale."""

CENTRE = 32
"""The number of a weight of zero."""

_NUMBERS = BLOCK * PANEL * 6 // 8
BLOCK_BYTES = _NUMBERS + 2 * PANEL
"""Bytes of a panel's block: numbers, and steps behind them. No other layer's blocks take as many."""

_FIRST_LOOK = 4 * PANEL
"""Outputs that are looked at before the whole layer is."""

_OUTPUTS_AT_A_TIME = 64 * PANEL
"""Packing takes a few copies in float32; of this many outputs they are small."""

_FAR = 8
"""Weights of this many steps and more need the bits that they are given."""

_STEP_ORDER = (0, 1, 2, 3, 8, 9, 10, 11, 4, 5, 6, 7, 12, 13, 14, 15)
"""Outputs of a panel as their steps lie: unpacked within halves of a register they are in line."""


@dataclass(frozen=True, slots=True)
class SixBitWeights:
    """Weights (number - CENTRE) * step * scale.

    Attributes:
        numbers: uint8 [outputs, inputs / HALF, HALF], 0 to 63.
        steps: int8 [outputs, inputs / HALF].
        scales: float16 [outputs, inputs / MANY].
    """

    numbers: torch.Tensor
    steps: torch.Tensor
    scales: torch.Tensor

    @classmethod
    def empty(cls, outputs: int, inputs: int) -> "SixBitWeights":
        """Weights to be filled in."""
        return cls(
            torch.empty(outputs, inputs // HALF, HALF, dtype=torch.uint8),
            torch.empty(outputs, inputs // HALF, dtype=torch.int8),
            torch.empty(outputs, inputs // MANY, dtype=torch.float16),
        )

    def plain(self) -> torch.Tensor:
        """float32 [outputs, inputs]."""
        scales = self.steps * self.scales.float().repeat_interleave(MANY // HALF, 1)
        return ((self.numbers.float() - CENTRE) * scales[..., None]).flatten(1)

    def are_used(self) -> bool:
        """Whether most steps are taken many times: zeros and weights of few values say nothing of a file."""
        lowest, highest = self.numbers.aminmax(dim=-1)
        far = (lowest <= CENTRE - _FAR) | (highest >= CENTRE + _FAR)
        return int(far.sum()) * 2 > far.numel()


def find_six_bits(weight: torch.Tensor, operators: CpuOperators) -> SixBitWeights | None:
    """The weights of six bits that a matrix was made of.

    Args:
        weight: float32 or narrower [outputs, inputs].
        operators: The C++ operators.

    Returns:
        None unless each weight is where such numbers, steps and scales put it, but for what float16 rounds,
        and most steps are taken more than a few times.
    """
    outputs, inputs = weight.shape
    if inputs % MANY or _find(weight[:_FIRST_LOOK], operators) is None:
        return None
    whole = SixBitWeights.empty(outputs, inputs)
    for begin in range(0, outputs, _OUTPUTS_AT_A_TIME):
        rows = slice(begin, begin + _OUTPUTS_AT_A_TIME)
        if (found := _find(weight[rows], operators)) is None:
            return None
        whole.numbers[rows], whole.steps[rows], whole.scales[rows] = found.numbers, found.steps, found.scales
    return whole if whole.are_used() else None


def _find(weight: torch.Tensor, operators: CpuOperators) -> SixBitWeights | None:
    """Those of a piece, whatever it uses."""
    numbers, steps, scales, others = operators.find_six_bits(weight.float())
    return None if others else SixBitWeights(numbers.view(*steps.shape, HALF), steps, scales.half())


class SixBitsLinear(PanelLinear):
    """y = x W^T + b with W as integers of six bits.

    Args:
        weight: The weights.
        bias: float32 [out_features] or None.
        operators: The C++ operators.
    """

    dtype = "int6"

    def __init__(self, weight: SixBitWeights, bias: torch.Tensor | None, operators: CpuOperators) -> None:
        rows, many = weight.scales.shape
        panels, blocks = num_panels(rows), many * MANY // BLOCK
        numbers = torch.empty(panels, blocks, BLOCK_BYTES, dtype=torch.uint8)
        scales = in_panels(weight.scales).view(panels, PANEL, many).transpose(1, 2).contiguous()
        super().__init__((rows, blocks * BLOCK), numbers, scales, bias, operators)
        by_twos = in_panels(weight.numbers).view(panels, 2, PANEL // 2, blocks, BLOCK // 8, 2, 4)
        # First outputs and those of eight on, of a quad and of the next one.
        four = by_twos.permute(5, 1, 0, 3, 4, 2, 6).flatten(0, 1).flatten(4)
        triples = [four[place] | (four[3] >> 2 * place & 3) << 6 for place in range(3)]
        numbers[..., :_NUMBERS] = torch.stack(triples, dim=3).flatten(2)
        steps = in_panels(weight.steps).view(torch.uint8).view(panels, PANEL, blocks, 2)
        numbers[..., _NUMBERS:] = steps[:, _STEP_ORDER].permute(0, 2, 3, 1).flatten(2)

    @property
    def weight(self) -> torch.Tensor:
        """The weights unpacked again, float32 [out_features, in_features]; a copy, made on each access."""
        panels, blocks = self._numbers.shape[:2]
        triples = self._numbers[..., :_NUMBERS].view(panels, blocks, BLOCK // 8, 3, PANEL // 2, 4).unbind(3)
        first, second, third = (triple >> 6 for triple in triples)
        four = torch.stack([*(triple & 63 for triple in triples), first | second << 2 | third << 4])
        steps = torch.empty(panels, PANEL, blocks, 2, dtype=torch.uint8)
        stored = self._numbers[..., _NUMBERS:].view(panels, blocks, 2, PANEL)
        steps[:, _STEP_ORDER] = stored.permute(0, 3, 1, 2)
        whole = SixBitWeights(
            four.view(2, 2, *four.shape[1:]).permute(2, 1, 5, 3, 4, 0, 6).reshape(panels * PANEL, -1, HALF),
            steps.view(torch.int8).view(panels * PANEL, -1),
            self._scales.transpose(1, 2).flatten(0, 1),
        )
        return whole.plain()[: self.out_features].contiguous()
