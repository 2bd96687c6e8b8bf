"""Linear layers that read the same input become one matrix: one call instead of several.

Where the layer around them is replaced too (`fusion`), it takes the merged matrix as it is. Elsewhere the
model's own code goes on calling each layer, and LinearPart stands in for it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import nn

GATE_UP = ("gate_proj", "up_proj")
QKV = ("q_proj", "k_proj", "v_proj")
"""Names of layers that read the same input, in the architectures that follow Llama."""

_GROUPS = {"qkv_proj": QKV, "gate_up_proj": GATE_UP}


def find_linears(parent: nn.Module, names: Sequence[str]) -> list[nn.Linear] | None:
    """The children of those names, if all are there and are plain linear layers, and no subclass of them."""
    children = dict(parent.named_children())
    layers = [child for name in names if type(child := children.get(name)) is nn.Linear]
    return layers if len(layers) == len(names) else None


def merge_linear(layers: Sequence[nn.Linear]) -> nn.Linear | None:
    """Layers as one, one below the other; None if their inputs differ in size."""
    if len({layer.in_features for layer in layers}) > 1:
        return None
    has_bias = any(layer.bias is not None for layer in layers)
    # Made without weights of its own, which would take memory and random numbers.
    merged = nn.Linear(1, 1, bias=has_bias, device="meta")
    merged.in_features = layers[0].in_features
    merged.out_features = sum(layer.out_features for layer in layers)
    merged.weight = nn.Parameter(torch.cat([layer.weight.detach() for layer in layers]), requires_grad=False)
    if has_bias:
        parts = [
            layer.weight.new_zeros(layer.out_features) if layer.bias is None else layer.bias.detach()
            for layer in layers
        ]
        merged.bias = nn.Parameter(torch.cat(parts), requires_grad=False)
    return merged


def merge_groups(module: nn.Module) -> None:
    """Merges every group inside `module` in place, one at a time, so that memory stays low."""
    # By name: a list of the layers would keep the replaced ones and their weights until the end.
    for path in [path for path, _ in module.named_modules()]:
        parent = module.get_submodule(path)
        for name, parts in _GROUPS.items():
            layers = find_linears(parent, parts)
            if layers is None or name in dict(parent.named_children()):
                continue
            if (linear := merge_linear(layers)) is None:
                continue
            merged = MergedLinear(linear, [layer.out_features for layer in layers])
            setattr(parent, name, merged)
            for part, part_name in zip(merged.parts, parts, strict=True):
                setattr(parent, part_name, part)


@dataclass(slots=True)
class _Results:
    """What has been computed and not been asked for yet."""

    source: torch.Tensor | None
    waiting: dict[int, torch.Tensor]


class MergedLinear(nn.Module):
    """Several layers that read the same input as one matrix.

    The first part that is called computes all; the others hand out what they find. It holds for the very
    same input tensor only, and each result is handed out once: a part that is called with another tensor,
    or again, computes anew. An input that its caller changes in between is not noticed.

    Args:
        linear: All layers, one below the other; it may be replaced by a packed one.
        sizes: Output features of each part.

    Attributes:
        parts: The layers that stand where the separate ones stood.
    """

    def __init__(self, linear: nn.Module, sizes: Sequence[int]) -> None:
        super().__init__()
        self.linear = linear
        self._sizes = list(sizes)
        self._results = _Results(None, {})
        # A tuple, so that torch does not count the parts as children: they belong to the layer around.
        self.parts = tuple(LinearPart(self, index, size) for index, size in enumerate(sizes))

    def result(self, index: int, x: torch.Tensor) -> torch.Tensor:
        """What part `index` gives for x."""
        results = self._results
        if results.source is not x or index not in results.waiting:
            pieces = torch.split(self.linear(x), self._sizes, -1)
            results.source = x
            results.waiting = dict(enumerate(pieces))
        piece = results.waiting.pop(index)
        if not results.waiting:
            results.source = None
        return piece

    def weight(self, index: int) -> torch.Tensor:
        """The weights of a part, unpacked; a copy where they are packed."""
        whole = cast("torch.Tensor", self.linear.weight)
        return torch.split(whole, self._sizes)[index]


class LinearPart(nn.Module):
    """One of the layers of a MergedLinear.

    Args:
        merged: All of them.
        index: Which one this is.
        out_features: Its outputs.
    """

    def __init__(self, merged: MergedLinear, index: int, out_features: int) -> None:
        super().__init__()
        self.out_features = out_features
        # In a tuple, so that torch does not count all of them as a child of each.
        self._merged = (merged,)
        self._index = index

    @property
    def weight(self) -> torch.Tensor:
        """The weights unpacked again, float32 [out_features, in_features]."""
        return self._merged[0].weight(self._index)

    def extra_repr(self) -> str:
        """The shape, for printing a model."""
        return f"out_features={self.out_features}, merged"

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """float32 [..., in_features] to float32 [..., out_features]."""
        return self._merged[0].result(self._index, x)
