"""Replaces a model's linear layers by packed ones, and several that read the same input by one."""

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

logger = logging.getLogger(__name__)

NOT_FINITE = "it has weights that are not finite"

_GROUPS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Names of layers that read the same input, in the architectures that follow Llama."""


class PackedLayer(Protocol):
    """A linear layer, a torch module, that holds its weights in a form of its own."""

    @property
    def weight(self) -> torch.Tensor:
        """The weights unpacked again, float32 [out_features, in_features]; a copy, made on each access."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """float32 [..., in_features] to float32 [..., out_features]."""


class LinearPacker(Protocol):
    """A way to hold the weights of a linear layer."""

    def refuses(self, weight: torch.Tensor) -> str | None:
        """Why these weights, float32 [out_features, in_features], cannot be held; None if they can."""

    def pack(self, weight: torch.Tensor, bias: torch.Tensor | None) -> PackedLayer:
        """A layer of these weights; they are copied, so that the caller may free them."""


def pack_linear_layers(module: nn.Module, packer: LinearPacker) -> int:
    """Replaces every nn.Linear and Conv1D inside `module`, one group at a time, so that memory stays low.

    A head that shares its weight with the embedding gets a packed copy; the embedding keeps its own. A
    layer with weights that the packer refuses stays as it is, and the log names it. Weights of experts
    that are kept as one three-dimensional parameter are not linear layers and stay as well.

    Returns:
        How many layers are packed, each part of a merged one counted.
    """
    packed = sum(_merge(parent, names, packer) for parent, names in list(_groups(module)))
    for name, parent, attribute, layer in list(_linear_layers(module)):
        weight, bias = _weight_and_bias(layer)
        reason = packer.refuses(weight)
        if reason is not None:
            logger.warning("layer %s keeps its plain weights: %s", name, reason)
            continue
        setattr(parent, attribute, packer.pack(weight, bias))
        packed += 1
    return packed


def largest_magnitude(weight: torch.Tensor) -> float:
    """The largest absolute value; not-a-number if there is one among them."""
    smallest, biggest = (bound.item() for bound in torch.aminmax(weight))
    return max(-smallest, biggest)


def _linear_layers(module: nn.Module) -> Iterator[tuple[str, nn.Module, str, nn.Linear | Conv1D]]:
    for prefix, parent in module.named_modules():
        for attribute, child in parent.named_children():
            # Exactly these classes: a subclass may do more in its forward than multiply.
            if type(child) in (nn.Linear, Conv1D):
                yield f"{prefix}.{attribute}".lstrip("."), parent, attribute, child


def _weight_and_bias(layer: nn.Linear | Conv1D) -> tuple[torch.Tensor, torch.Tensor | None]:
    weight = (layer.weight if isinstance(layer, nn.Linear) else layer.weight.T).detach()
    return weight, None if layer.bias is None else layer.bias.detach()


def _groups(module: nn.Module) -> Iterator[tuple[nn.Module, tuple[str, ...]]]:
    for parent in module.modules():
        children = dict(parent.named_children())
        for names in _GROUPS:
            layers = [children.get(name) for name in names]
            if all(type(layer) is nn.Linear for layer in layers):
                yield parent, names


def _merge(parent: nn.Module, names: Sequence[str], packer: LinearPacker) -> int:
    """Packs a group as one matrix; returns how many layers that are, none if they do not fit together."""
    layers = [parent.get_submodule(name) for name in names]
    weights, biases = zip(*(_weight_and_bias(layer) for layer in layers), strict=True)
    if len({weight.shape[1] for weight in weights}) > 1 or any(map(packer.refuses, weights)):
        return 0
    bias = None
    if any(each is not None for each in biases):
        bias = torch.cat(
            [
                weight.new_zeros(weight.shape[0]) if each is None else each
                for weight, each in zip(weights, biases, strict=True)
            ]
        )
    merged = MergedLinear(packer.pack(torch.cat(weights), bias), [weight.shape[0] for weight in weights])
    for part, name in zip(merged.parts, names, strict=True):
        setattr(parent, name, part)
    return len(names)


@dataclass(slots=True)
class _Results:
    """What has been computed and not been asked for yet."""

    source: torch.Tensor | None
    waiting: dict[int, torch.Tensor]


class MergedLinear:
    """Several layers that read the same input as one matrix: one call instead of several.

    The first part that is called computes all; the others hand out what they find. It holds for the very
    same input tensor only, and each result is handed out once: a part that is called with another tensor,
    or again, computes anew. An input that its caller changes in between is not noticed.

    Args:
        linear: The packed layer.
        sizes: Output features of each part.

    Attributes:
        parts: The layers that stand where the separate ones stood.
    """

    def __init__(self, linear: PackedLayer, sizes: Sequence[int]) -> None:
        self._linear = linear
        self._sizes = list(sizes)
        self._results = _Results(None, {})
        self.parts = [LinearPart(self, index, size) for index, size in enumerate(sizes)]

    def result(self, index: int, x: torch.Tensor) -> torch.Tensor:
        """What part `index` gives for x."""
        results = self._results
        if results.source is not x or index not in results.waiting:
            pieces = torch.split(self._linear(x), self._sizes, -1)
            results.source = x
            results.waiting = dict(enumerate(pieces))
        piece = results.waiting.pop(index)
        if not results.waiting:
            results.source = None
        return piece

    def weight(self, index: int) -> torch.Tensor:
        """The weights of a part, unpacked; a copy."""
        return torch.split(self._linear.weight, self._sizes)[index]


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
        self._merged = merged
        self._index = index

    @property
    def weight(self) -> torch.Tensor:
        """The weights unpacked again, float32 [out_features, in_features]; a copy, made on each access."""
        return self._merged.weight(self._index)

    def extra_repr(self) -> str:
        """The shape, for printing a model."""
        return f"out_features={self.out_features}, merged"

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """float32 [..., in_features] to float32 [..., out_features]."""
        return self._merged.result(self._index, x)
