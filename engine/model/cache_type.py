"""The type that keys and values are held in: what the setting `kv_cache_dtype` means for a model."""

import torch
from torch import nn

from engine.config import KVCacheDType
from engine.errors import StartupError
from engine.model.loaded_model import LoadedModel

_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


def choose_cache_type(wanted: KVCacheDType, model: LoadedModel) -> torch.dtype:
    """The type of a model's cache.

    auto: float16 where the C++ operators attend and a row's bits do not depend on its batch, elsewhere the
    model's own type. A cache of fewer bits than the activations rounds them, and two sums that differ in the
    last bit of a float32 may round to neighbours, a thousand times further apart: speculation would then
    change a text at every near-tie of a thousandth.

    Args:
        wanted: The setting.
        model: Whose keys and values they are; for a draft head its target.

    Raises:
        StartupError: The model cannot attend over keys and values of that type.
    """
    if wanted == "auto":
        return torch.float16 if has_exact_rows(model) else model.dtype
    dtype = _DTYPES[wanted]
    if model.device.type != "cpu" and dtype != model.dtype:
        own = str(model.dtype).removeprefix("torch.")
        raise StartupError(
            f"kv_cache_dtype is {wanted}, but {model.name} runs on {model.device} in {own}, and keys and "
            f"values there are of the model's own type; use kv_cache_dtype auto, or dtype {wanted}"
        )
    return dtype


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
