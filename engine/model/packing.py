"""Replaces a model's linear layers by packed ones, and embeddings by ones of 16 bits where that is exact."""

import logging
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Protocol, cast

import torch
from torch import nn
from torch.nn import functional
from transformers.pytorch_utils import Conv1D

from engine.errors import StartupError
from engine.model.merging import merge_groups

logger = logging.getLogger(__name__)

NOT_FINITE = "it has weights that are not finite"

_NARROW = (torch.bfloat16, torch.float16)
_ROWS_AT_A_TIME = 4096


class PackedLayer(Protocol):
    """A linear layer, a torch module, that holds its weights in a form of its own."""

    @property
    def dtype(self) -> str:
        """The type of the weights, as settings name it."""

    @property
    def weight(self) -> torch.Tensor:
        """The weights unpacked again, float32 [out_features, in_features]; a copy, made on each access."""

    def stored(self) -> dict[str, torch.Tensor]:
        """The tensors that LinearPacker.restore makes an equal layer of."""

    def movable(self) -> dict[str, torch.Tensor]:
        """Those of its tensors that may lie anywhere in memory, under the names of their attributes."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """float32 [..., in_features] to float32 [..., out_features]."""


class LinearPacker(Protocol):
    """A way to hold the weights of a linear layer."""

    @property
    def dtype(self) -> str:
        """The type of the weights, as settings name it; single layers may have another one."""

    def refuses(self, weight: torch.Tensor) -> str | None:
        """Why these weights, [out_features, in_features], cannot be held; None if they can."""

    def pack(self, weight: torch.Tensor, bias: torch.Tensor | None) -> PackedLayer:
        """A layer of these weights; they are copied, so that the caller may free them.

        Args:
            weight: float32, or a narrower type that a checkpoint has, which gives the same layer.
            bias: float32 [out_features] or None.
        """

    def restore(self, shape: tuple[int, int], stored: Mapping[str, torch.Tensor]) -> PackedLayer:
        """A layer of what `stored()` gave; shape is (out_features, in_features)."""


def pack_linear_layers(module: nn.Module, packer: LinearPacker, *, strict: bool = False) -> tuple[str, ...]:
    """Packs every nn.Linear and Conv1D inside `module` in place, those that read the same input as one.

    A head that shares its weight with the embedding gets a packed copy; the embedding keeps its own.
    Weights of experts that are kept as one three-dimensional parameter are not linear layers and stay.

    Args:
        module: A float32 model on a CPU.
        packer: How weights are held.
        strict: A layer that the packer refuses is an error; otherwise it stays as it is, and the log names
            it.

    Returns:
        The names of the packed layers, the largest first: what a layer needs on the side while it is packed
        is then needed while the others are still small, or not there yet.

    Raises:
        StartupError: The packer refuses a layer.
    """
    packed = pack_within(module, "", packer, strict=strict)
    log_packed(module, packed)
    return tuple(packed)


def pack_within(module: nn.Module, part: str, packer: LinearPacker, *, strict: bool) -> dict[str, int]:
    """Does what `pack_linear_layers` does to one part of a module.

    Args:
        module: A model on a CPU.
        part: Name of the part, which has its weights; empty for the whole model.
        packer: How weights are held.
        strict: See `pack_linear_layers`.

    Returns:
        The weights of each packed layer by its name in the model, the largest first.

    Raises:
        StartupError: The packer refuses a layer.
    """
    merge_groups(module.get_submodule(part))
    packed = {}
    for name, size in _linear_layers(module, part).items():
        weight, bias = _weight_and_bias(module.get_submodule(name))
        if (reason := packer.refuses(weight)) is None:
            # Through the protocol's eyes it is a layer; torch wants to see a module.
            replacement = packer.pack(weight, bias)
            assert isinstance(replacement, nn.Module)
            module.set_submodule(name, replacement)
            packed[name] = size
        elif strict:
            raise StartupError(
                f"dtype is {packer.dtype}, but the layer {name} cannot be held in it: {reason}; use dtype "
                "float32, or auto, which holds such layers in float32"
            )
        else:
            logger.warning("layer %s stays in float32: %s", name, reason)
    return packed


def log_packed(module: nn.Module, names: Collection[str]) -> None:
    """Says how many layers are packed, and how."""
    counts = Counter(packed_dtypes(module, names)).most_common()
    said = ", ".join(f"{count} as {dtype}" for dtype, count in counts)
    logger.info("%d linear layers are packed: %s", len(names), said or "none could be")


def packed_dtypes(module: nn.Module, names: Iterable[str]) -> list[str]:
    """The types of the weights of packed layers."""
    return [cast("PackedLayer", module.get_submodule(name)).dtype for name in names]


def _linear_layers(module: nn.Module, part: str) -> dict[str, int]:
    """The linear layers of a part that can be packed, by name, with their weights, the largest first.

    Names and not layers: a list of those would keep all plain weights until the last layer is packed.
    """
    # Exactly these classes: a subclass may do more in its forward than multiply.
    sizes = {
        name: layer.weight.numel()
        for name, layer in module.get_submodule(part).named_modules(prefix=part)
        if type(layer) in (nn.Linear, Conv1D)
    }
    return dict(sorted(sizes.items(), key=lambda item: -item[1]))


def restore_linear_layer(
    module: nn.Module, name: str, packer: LinearPacker, stored: Mapping[str, torch.Tensor]
) -> None:
    """Puts a packed layer of stored tensors where a linear layer without weights stands."""
    rows, columns = _weight_and_bias(module.get_submodule(name))[0].shape
    replacement = packer.restore((rows, columns), stored)
    assert isinstance(replacement, nn.Module)
    module.set_submodule(name, replacement)


def largest_magnitude(weight: torch.Tensor) -> float:
    """The largest absolute value; not-a-number if there is one among them."""
    smallest, biggest = (bound.item() for bound in torch.aminmax(weight))
    return max(-smallest, biggest)


def _weight_and_bias(layer: nn.Module) -> tuple[torch.Tensor, torch.Tensor | None]:
    assert isinstance(layer, nn.Linear | Conv1D)
    weight = (layer.weight if isinstance(layer, nn.Linear) else layer.weight.T).detach()
    return weight, None if layer.bias is None else layer.bias.detach()


class NarrowEmbedding(nn.Module):
    """An embedding that holds its rows in 16 bits and hands them out in float32.

    Args:
        weight: bfloat16 or float16 [rows, size].
    """

    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        # A buffer: transformers takes the type of a model's first parameter for that of its activations.
        self.register_buffer("weight", weight)
        self.weight: torch.Tensor

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """int64 [...] to float32 [..., size]."""
        return functional.embedding(ids, self.weight).float()


def narrow_embeddings(module: nn.Module) -> tuple[str, ...]:
    """Replaces embeddings whose weights fit into 16 bits exactly, as those of published checkpoints do.

    Returns:
        The names of the replaced ones.
    """
    narrowed = []
    for name, embedding in list(_embeddings(module)):
        for dtype in _NARROW:
            if (narrow := _narrowed(embedding.weight.detach(), dtype)) is not None:
                module.set_submodule(name, NarrowEmbedding(narrow))
                narrowed.append(name)
                break
    return tuple(narrowed)


def _embeddings(module: nn.Module) -> Iterator[tuple[str, nn.Embedding]]:
    for name, embedding in module.named_modules():
        # Exactly this class: a subclass may do more than look up.
        if type(embedding) is nn.Embedding and embedding.max_norm is None:
            yield name, embedding


def _narrowed(weight: torch.Tensor, dtype: torch.dtype) -> torch.Tensor | None:
    """The weight in a type of 16 bits, or None if that would change it; itself if it is of that type."""
    narrow = weight if weight.dtype == dtype else torch.empty(weight.shape, dtype=dtype)
    # Piece by piece: an embedding may be a large part of the memory that there is.
    for begin in range(0, len(weight), _ROWS_AT_A_TIME):
        piece = weight[begin : begin + _ROWS_AT_A_TIME]
        if narrow is not weight:
            narrow[begin : begin + _ROWS_AT_A_TIME] = piece
        if not torch.equal(narrow[begin : begin + _ROWS_AT_A_TIME].float(), piece.float()):
            return None
    return narrow
