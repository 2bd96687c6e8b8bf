"""Which attention backend a model runs on: the only place that knows the classes."""

import importlib.util
import logging

import torch

from engine.model.attention.cpu import CpuAttention
from engine.model.attention.interface import AttentionBackend
from engine.model.attention.reference import ReferenceAttention
from engine.model.attention.tiles import SplitRules
from engine.model.cpu_ops.build import CpuOperators
from engine.model.recording import CudaRecorder

logger = logging.getLogger(__name__)

PROGRAMS_PER_PROCESSOR = 2
MIN_SLOTS_PER_SPLIT = 256


def choose_backend(
    operators: CpuOperators | None, device: torch.device, *, records: bool = False
) -> AttentionBackend:
    """The fastest backend there is.

    Args:
        operators: The C++ operators, for a model that may use them: one in float32 on a CPU.
        device: Where the model is.
        records: Whether a GPU's passes are to be recorded, which pays for a model that is to serve.
    """
    if device.type == "cuda":
        return _on_cuda(device, records=records)
    return ReferenceAttention() if operators is None else CpuAttention(operators)


def _on_cuda(device: torch.device, *, records: bool) -> AttentionBackend:
    if importlib.util.find_spec("triton") is None:
        logger.warning("attention: plain torch, since triton is not installed; pip install triton is faster")
        return ReferenceAttention()
    # Not installed everywhere, and half a second to import where it is not needed.
    from engine.model.attention.triton import TritonAttention

    processors = torch.cuda.get_device_properties(device).multi_processor_count
    rules = SplitRules(PROGRAMS_PER_PROCESSOR * processors, MIN_SLOTS_PER_SPLIT)
    return TritonAttention(rules, CudaRecorder(device) if records else None)
