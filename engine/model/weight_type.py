"""The type that weights are held in: what the setting `dtype` means on a device, and what it needs there."""

import logging
from collections.abc import Collection
from dataclasses import dataclass, replace

import torch
from torch import nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from engine.config import DType
from engine.errors import StartupError
from engine.model.cpu_ops.build import CpuOperators
from engine.model.few_bits import FewBitsPacker
from engine.model.int8 import Int8Packer
from engine.model.linear import Float16Packer, packed_fp16_unavailable
from engine.model.packing import LinearPacker
from engine.model.rounding import RoundingPacker

logger = logging.getLogger(__name__)

_INTEGERS: dict[str, type[Int8Packer] | type[FewBitsPacker]] = {"int8": Int8Packer, "int4": FewBitsPacker}
_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


@dataclass(frozen=True, slots=True)
class WeightPlan:
    """How a model is to be held.

    Attributes:
        dtype: Type of the weights: "float32", "float16", "bfloat16", "int8" or "int4", or what they are
            quantised to.
        activations: Type of what goes from layer to layer.
        packer: Holds the linear layers' weights; None leaves them as torch has them.
        strict: The type was asked for by name, so that weights which do not fit are an error. Otherwise the
            layers that have them are held in float32.
    """

    dtype: str
    activations: torch.dtype
    packer: LinearPacker | None
    strict: bool


def choose_device(wanted: str) -> torch.device:
    """The device of that name; auto takes a GPU where there is one.

    Raises:
        StartupError: There is no such device here.
    """
    if wanted == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(wanted)
    except RuntimeError:
        raise StartupError(f"device is {wanted!r}; it must be auto, cpu, cuda or cuda:N") from None
    if device.type not in ("cpu", "cuda") or (device.type == "cpu" and device.index is not None):
        raise StartupError(f"device is {wanted!r}; it must be auto, cpu, cuda or cuda:N")
    count = torch.cuda.device_count()
    if device.type == "cuda" and (device.index or 0) >= count:
        raise StartupError(f"device is {wanted!r}, but torch sees {count} CUDA devices here; use cpu or auto")
    return device


def check_dtype(wanted: DType, device: torch.device) -> None:
    """Refuses a type that cannot be had on a device, before anything is read or built.

    Raises:
        StartupError: It cannot.
    """
    if wanted in _INTEGERS and device.type != "cpu":
        raise StartupError(
            f"dtype is {wanted}, but the device is {device}, and {wanted} is for CPUs here; use quantization "
            f"{wanted}, or dtype auto, which takes what is best here"
        )
    if wanted == "float16" and device.type == "cpu" and (reason := packed_fp16_unavailable()) is not None:
        raise StartupError(f"dtype is float16, but {reason}; {_ADVICE}")


_ADVICE = "use dtype auto, which takes what is best here"


def takes_operators(wanted: DType, device: torch.device) -> bool:
    """Whether a model held in this way runs on the C++ operators, which compute in float32."""
    return device.type == "cpu" and wanted != "bfloat16"


def plan_weights(
    wanted: DType, device: torch.device, operators: CpuOperators | None, *, rounds: bool = False
) -> WeightPlan:
    """How a model is held on a device.

    auto: on a CPU with the C++ operators int4, which is four to six bits for layers whose weights have so
    few already and int8 for others, else float16 where FBGEMM is, else float32; on a GPU bfloat16, float16 on
    one without it.

    Args:
        wanted: The setting.
        device: Where the model runs.
        operators: The C++ operators, if there are any.
        rounds: With int4: layers of five and six bits get four, for models whose results are checked.

    Raises:
        StartupError: The type cannot be had here.
    """
    check_dtype(wanted, device)
    strict = wanted != "auto"
    if device.type != "cpu":
        dtype = wanted if strict else _best_on_gpu()
        return WeightPlan(dtype, _DTYPES[dtype], None, strict)
    dtype = wanted if strict else _best_on_cpu(operators)
    if (kind := _INTEGERS.get(dtype)) is not None:
        if operators is None:
            raise StartupError(
                f"dtype is {dtype}, but there are no C++ operators here, which multiply such weights (the "
                f"log says why); {_ADVICE}"
            )
        packer = RoundingPacker(operators) if rounds and dtype == "int4" else kind(operators)
        return WeightPlan(dtype, torch.float32, packer, strict)
    if dtype == "float16":
        return WeightPlan(dtype, torch.float32, Float16Packer(operators), strict)
    return WeightPlan(dtype, _DTYPES[dtype], None, strict)


def settle(plan: WeightPlan, dtypes: Collection[str], model: str) -> WeightPlan:
    """The plan as it came out: who looks for layers of few bits may have found none.

    Args:
        plan: The plan.
        dtypes: Types of the layers that are packed.
        model: What the model is called.

    Raises:
        StartupError: int4 was asked for by name.
    """
    if plan.dtype != "int4":
        return plan
    if found := [dtype for dtype in ("int4", "int5", "int6") if dtype in dtypes]:
        return replace(plan, dtype=found[0])
    if plan.strict:
        raise StartupError(
            f"dtype is int4, but no layer of {model} has weights of four to six bits, as GGUF files of "
            "the types Q4_0, Q4_1, Q4_K, Q5_0, Q5_1, Q5_K and Q6_K hold them, and rounding others is not "
            "offered; use dtype int8 or auto"
        )
    return replace(plan, dtype="int8")


def unfit_weight(module: nn.Module) -> str | None:
    """The name of a weight that is not finite, as one is that was too large for the type it was read into.

    Weights on the meta device have no values, and those that are quantised are as finite as they were: both
    are passed over.
    """
    there = (
        (name, weight)
        for name, weight in module.named_parameters()
        if not weight.is_meta and not is_composed(weight)
    )
    return next((name for name, weight in there if not bool(weight.isfinite().all())), None)


def is_composed(weight: object) -> bool:
    """Whether a tensor is made of several, as torchao's quantised weights are."""
    return is_traceable_wrapper_subclass(weight)


def widen(plan: WeightPlan, name: str) -> WeightPlan:
    """The next safe type for a model of which a weight does not fit into the planned one.

    Args:
        plan: float16 without packing, as GPUs hold it.
        name: The weight.

    Raises:
        StartupError: The type was asked for by name.
    """
    problem = f"{name} has weights that are not finite in it"
    if plan.strict:
        raise StartupError(f"dtype is {plan.dtype}, but {problem}; use dtype bfloat16 or float32")
    logger.warning("weights are held in float32 and not in %s: %s", plan.dtype, problem)
    return replace(plan, dtype="float32", activations=torch.float32)


def _best_on_gpu() -> str:
    return "bfloat16" if torch.cuda.is_bf16_supported(including_emulation=False) else "float16"


def _best_on_cpu(operators: CpuOperators | None) -> str:
    if operators is not None:
        return "int4"
    if (reason := packed_fp16_unavailable()) is not None:
        logger.info("weights are held in float32: %s", reason)
        return "float32"
    return "float16"
