"""The type that keys and values are held in: what the setting `kv_cache_dtype` means for a model."""

import importlib.util

import torch
from torch import nn

from engine.config import KVCacheDType
from engine.errors import StartupError
from engine.model.loaded_model import LoadedModel

_DTYPES = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "fp8": torch.float8_e4m3fn,
}
EIGHT_BITS_CAPABILITY = (8, 9)
"""Compute capability of the first GPUs with numbers of eight bits."""


def check_cache_type(wanted: KVCacheDType, device: torch.device) -> None:
    """Refuses a type that cannot be had on a device, before anything is read.

    Args:
        wanted: The setting.
        device: Where the model will run.

    Raises:
        StartupError: It cannot.
    """
    if wanted != "fp8":
        return
    if device.type == "cpu":
        raise StartupError(
            "kv_cache_dtype is fp8, which is for GPUs, but the device is cpu: use kv_cache_dtype float16, or "
            "auto, which takes what is best there"
        )
    capability = torch.cuda.get_device_capability(device)
    if capability < EIGHT_BITS_CAPABILITY:
        raise StartupError(
            "kv_cache_dtype is fp8, which needs a GPU of compute capability {}.{} or more, but {} has {}.{}: "
            "use kv_cache_dtype auto".format(*EIGHT_BITS_CAPABILITY, device, *capability)
        )
    if importlib.util.find_spec("triton") is None:
        raise StartupError(
            "kv_cache_dtype is fp8, which needs the package triton: pip install triton, or use "
            "kv_cache_dtype auto"
        )


def choose_cache_type(wanted: KVCacheDType, model: LoadedModel) -> torch.dtype:
    """The type of a model's cache.

    auto: float16 where the C++ operators attend and a row's bits do not depend on its batch, elsewhere the
    model's own type. A cache of fewer bits than the activations rounds them, and two sums that differ in the
    last bit of a float32 may round to neighbours, a thousand times further apart: speculation would then
    change a text at every near-tie of a thousandth. Who asks for such a cache by name gets it.

    Args:
        wanted: The setting.
        model: Whose keys and values they are; for a draft head its target.

    Raises:
        StartupError: The model cannot attend over keys and values of that type.
    """
    check_cache_type(wanted, model.device)
    if wanted == "auto":
        return torch.float16 if has_exact_rows(model) else model.dtype
    return _DTYPES[wanted]


def has_exact_rows(model: LoadedModel) -> bool:
    """Whether no matrix product is left to torch, whose sums depend on how many rows there are.

    The C++ operators and packed linear layers work on each row by itself.
    """
    if model.operators is None:
        return False
    multiplied = (part for part in model.module.modules() if not isinstance(part, nn.Embedding))
    weights = (weight for part in multiplied for weight in part.parameters(recurse=False))
    return all(weight.dim() < 2 for weight in weights)


def rounding_type(model: LoadedModel, cache: torch.dtype) -> torch.dtype:
    """The type whose rounding makes the most of a difference in the last bit of an activation.

    Args:
        model: A model.
        cache: Type of its keys and values.
    """
    is_coarser = torch.finfo(cache).eps > torch.finfo(model.dtype).eps
    return cache if is_coarser and not has_exact_rows(model) else model.dtype
