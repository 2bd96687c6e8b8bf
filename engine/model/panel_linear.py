"""What linear layers on packed integers have in common on a CPU: outputs in panels, and one operator."""

import copy
from collections.abc import Mapping
from typing import Self

import torch
from torch import nn

from engine.model.cpu_ops.build import CpuOperators

PANEL = 16
"""Outputs whose weights lie together, so that one vector register holds a weight of each."""


class PanelLinear(nn.Module):
    """y = x W^T + b. A row's result is the same bits in any batch.

    Subclasses fill in numbers and scales.

    Args:
        shape: (out_features, in_features).
        numbers: The weights' numbers; the type tells the operator how they are packed.
        scales: What they are multiplied by.
        bias: float32 [out_features] or None.
        operators: The C++ operators.
    """

    def __init__(
        self,
        shape: tuple[int, int],
        numbers: torch.Tensor,
        scales: torch.Tensor,
        bias: torch.Tensor | None,
        operators: CpuOperators,
    ) -> None:
        super().__init__()
        self.out_features, self.in_features = shape
        self._multiply = operators.linear_packed
        self._numbers = numbers
        self._scales = scales
        self._bias = torch.zeros(num_panels(self.out_features) * PANEL)
        if bias is not None:
            self._bias[: self.out_features] = bias

    @property
    def packed(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Numbers, scales and bias, as the operators take them."""
        return self._numbers, self._scales, self._bias

    def stored(self) -> dict[str, torch.Tensor]:
        """See PackedLayer: all the tensors it has, under the names of their attributes."""
        return {name: value for name, value in vars(self).items() if isinstance(value, torch.Tensor)}

    def filled(self, out_features: int, stored: Mapping[str, torch.Tensor]) -> Self:
        """Itself, made without outputs, with the tensors that another one has stored."""
        self.out_features = out_features
        for name, tensor in stored.items():
            setattr(self, name, tensor)
        return self

    def movable(self) -> dict[str, torch.Tensor]:
        """See PackedLayer."""
        return self.stored()

    def picked(self, panels: slice | torch.Tensor) -> Self:
        """A layer of the outputs of some panels alone.

        Args:
            panels: A slice, which shares the weights, or int64 [n] of numbers, which copies them.
        """
        part = copy.copy(self)
        part._numbers, part._scales = taken(self._numbers, panels), taken(self._scales, panels)
        part._bias = taken(self._bias.view(-1, PANEL), panels).flatten()
        part.out_features = PANEL * len(part._numbers)
        return part

    def extra_repr(self) -> str:
        """The shape, for printing a model."""
        return f"in_features={self.in_features}, out_features={self.out_features}"

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """float32 [..., in_features] to float32 [..., out_features]."""
        result: torch.Tensor = self._multiply(x, self._numbers, self._scales, self._bias, self.out_features)
        return result


def taken(rows: torch.Tensor, which: slice | torch.Tensor) -> torch.Tensor:
    """Some rows: views of a slice, copies of int64 [n]."""
    return rows[which] if isinstance(which, slice) else rows.index_select(0, which)


def num_panels(out_features: int) -> int:
    """Panels that so many outputs fill."""
    return -(-out_features // PANEL)


def in_panels(rows: torch.Tensor) -> torch.Tensor:
    """Rows filled up with zeros to whole panels."""
    missing = -len(rows) % PANEL
    return torch.cat((rows, rows.new_zeros(missing, *rows.shape[1:]))) if missing else rows
