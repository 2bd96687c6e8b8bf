"""Quantised weights on a GPU: torchao holds a model's linear layers in eight or four bits.

Weights alone are quantised; activations and sums stay what `dtype` says. int8 and fp8 have a factor per row
of a layer, int4 one per group of a row. The output layer and the embedding, which often are the same weights,
stay as they are, and so does what is not `nn.Linear`: norms, routers, experts that are held as one tensor.
"""

import importlib.util
import logging
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from engine.config import DType, Quantization
from engine.errors import StartupError
from engine.model.weight_type import is_composed

logger = logging.getLogger(__name__)

_CAPABILITY = {"int8": (0, 0), "int4": (8, 0), "fp8": (8, 9)}
"""The least compute capability: that of tinygemm (int4), and of the first GPUs with numbers of eight bits."""

_GROUP_SIZES = (128, 64, 32)
"""Weights that share a factor with int4: tinygemm knows these, and a row has to be made of whole groups."""


def check_quantization(wanted: Quantization | None, dtype: DType, device: torch.device) -> None:
    """Refuses what cannot be had on a device, before anything is read.

    Args:
        wanted: The setting.
        dtype: The type of the rest.
        device: Where the model will run.

    Raises:
        StartupError: It cannot.
    """
    if wanted is None:
        return
    what = f"quantization is {wanted}"
    if device.type == "cpu":
        raise StartupError(
            f"{what}, which is for GPUs, but the device is cpu: leave quantization out; there dtype auto "
            "holds weights in 8 bits where it can, or in the 4 that a GGUF file has"
        )
    if importlib.util.find_spec("torchao") is None:
        raise StartupError(
            f"{what}, which needs the package torchao: pip install 'outrider[quantization]', "
            "or leave quantization out"
        )
    capability = torch.cuda.get_device_capability(device)
    if capability < (least := _CAPABILITY[wanted]):
        raise StartupError(
            f"{what}, which needs a GPU of compute capability {_dotted(least)} or more, but {device} has "
            f"{_dotted(capability)}: use quantization int8, or leave quantization out"
        )
    if wanted == "int4" and dtype not in ("auto", "bfloat16"):
        raise StartupError(f"{what}, which multiplies in bfloat16 alone, but dtype is {dtype}: use bfloat16")


def check_plain(wanted: Quantization | None, config: PreTrainedConfig) -> None:
    """Refuses to quantise what has been quantised.

    Raises:
        StartupError: The checkpoint is quantised.
    """
    if wanted is not None and getattr(config, "quantization_config", None):
        raise StartupError(
            f"quantization is {wanted}, but the checkpoint is quantised already: leave quantization out, or "
            "choose the unquantised model"
        )


def move_quantized(module: PreTrainedModel, device: torch.device, scheme: Quantization) -> tuple[str, ...]:
    """Moves a model to a device and quantises its linear layers there, in place.

    One layer after the other goes over, so that the device never holds more than one as it was.

    Args:
        module: In the memory of the host, in evaluation mode and without gradients.
        device: Where it is to run.
        scheme: How weights are held.

    Returns:
        The names of the quantised layers.

    Raises:
        StartupError: There is nothing to quantise.
    """
    linears = _linears(module)
    weights = {name: linear.weight for name, linear in linears.items()}
    for linear in linears.values():
        linear.register_parameter("weight", None)
    module.to(device)
    num_bytes = num_quantized_bytes = 0
    done = []
    for name, linear in linears.items():
        weight = weights.pop(name)
        num_bytes += weight.nbytes
        linear.weight = nn.Parameter(weight.to(device), requires_grad=False)
        if quantize(linear, scheme):
            done.append(name)
        num_quantized_bytes += _held_bytes(linear.weight)
    if not done:
        raise StartupError(
            f"quantization is {scheme}, but {type(module).__name__} has no linear layer that can be held so: "
            "leave quantization out"
        )
    logger.info(
        "%d of %d linear layers are held in %s: %.2f GiB instead of %.2f",
        *(len(done), len(linears), scheme, num_quantized_bytes / 2**30, num_bytes / 2**30),
    )
    return tuple(done)


def quantize(linear: nn.Linear, scheme: Quantization) -> bool:
    """Quantises a layer's weights in place, on the device where they are.

    Args:
        linear: The layer.
        scheme: How its weights are to be held.

    Returns:
        Whether it can be held so; if not, it stays as it is.
    """
    # Not installed everywhere, and seconds to import.
    from torchao.quantization import quantize_

    config = _torchao_config(scheme, linear.in_features)
    if config is None:
        return False
    quantize_(linear, config)
    return True


def _torchao_config(scheme: Quantization, in_features: int) -> Any:
    """How torchao is told; None for rows that are not made of whole groups."""
    from torchao.quantization import Float8WeightOnlyConfig, Int4WeightOnlyConfig, Int8WeightOnlyConfig

    # Without settings for torch's compiler, which would hold for the process and take seconds to import.
    match scheme:
        case "int8":
            return Int8WeightOnlyConfig(set_inductor_config=False)
        case "fp8":
            return Float8WeightOnlyConfig(set_inductor_config=False)
        case "int4":
            group = next((size for size in _GROUP_SIZES if in_features % size == 0), None)
            if group is None:
                return None
            # The format of tinygemm, which comes with torch; the others need packages besides.
            return Int4WeightOnlyConfig(
                group_size=group, int4_packing_format="tile_packed_to_4d", set_inductor_config=False
            )


def _linears(module: PreTrainedModel) -> dict[str, nn.Linear]:
    head = module.get_output_embeddings()
    return {
        name: part
        for name, part in module.named_modules()
        if isinstance(part, nn.Linear) and type(part) is nn.Linear and part is not head
    }


def _held_bytes(weight: Any) -> int:
    """What a weight takes."""
    if not is_composed(weight):
        return int(weight.nbytes)
    names, _ = weight.__tensor_flatten__()
    return sum(_held_bytes(getattr(weight, name)) for name in names)


def _dotted(capability: tuple[int, int]) -> str:
    return ".".join(map(str, capability))
