"""How linear layers hold their weights: which ways there are here, and the packing itself."""

import logging

import torch
from torch import nn

from engine.errors import StartupError
from engine.model.cpu_ops.build import CpuOperators
from engine.model.int8 import Int8Packer
from engine.model.linear import Float16Packer, packed_fp16_unavailable
from engine.model.packing import LinearPacker, pack_linear_layers

logger = logging.getLogger(__name__)


def choose_linear_weights(
    wanted: str, device: torch.device, dtype: torch.dtype, operators: CpuOperators | None
) -> str:
    """How linear layers hold their weights; auto packs them on a CPU that can.

    Args:
        wanted: "auto", "plain", "packed-fp16" or "packed-int8".
        device: Where the model runs.
        dtype: Type of its activations.
        operators: The C++ operators, if there are any.

    Raises:
        StartupError: Packed weights were asked for where they cannot be.
    """
    if wanted == "plain":
        return wanted
    reason = None
    if device.type != "cpu":
        reason = f"the device is {device}, and packed weights are for CPUs"
    elif dtype != torch.float32:
        reason = f"dtype is {str(dtype).removeprefix('torch.')}, and packed weights take float32 activations"
    kind = wanted
    if wanted == "auto":
        kind = "packed-fp16" if operators is None else "packed-int8"
    reason = reason or _unavailable(kind, operators)
    if reason is None:
        return kind
    if wanted != "auto":
        raise StartupError(f"linear_weights is {wanted}, but {reason}; use linear_weights=auto")
    logger.info("linear layers keep plain weights: %s", reason)
    return "plain"


def pack_weights(module: nn.Module, linear_weights: str, operators: CpuOperators | None) -> None:
    """Packs a model's linear layers in place.

    Args:
        module: A float32 model on a CPU.
        linear_weights: What `choose_linear_weights` returned.
        operators: The C++ operators, if there are any.

    Raises:
        StartupError: The weights cannot be packed in that way here.
    """
    if linear_weights == "plain":
        return
    if (reason := _unavailable(linear_weights, operators)) is not None:
        raise StartupError(f"linear_weights is {linear_weights}, but {reason}; use linear_weights=plain")
    packed = pack_linear_layers(module, _packer(linear_weights, operators))
    logger.info("%d linear layers hold their weights as %s", packed, linear_weights)


def _unavailable(kind: str, operators: CpuOperators | None) -> str | None:
    if kind == "packed-fp16":
        return packed_fp16_unavailable()
    return None if operators is not None else "there are no C++ operators here, which multiply such weights"


def _packer(kind: str, operators: CpuOperators | None) -> LinearPacker:
    if kind == "packed-fp16":
        return Float16Packer(operators)
    assert operators is not None, "checked by _unavailable"
    return Int8Packer(operators)
