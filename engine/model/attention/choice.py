"""Which attention backend a model runs on: the only place that knows the classes."""

from engine.model.attention.cpu import CpuAttention
from engine.model.attention.interface import AttentionBackend
from engine.model.attention.reference import ReferenceAttention
from engine.model.cpu_ops.build import CpuOperators


def choose_backend(operators: CpuOperators | None) -> AttentionBackend:
    """The fastest backend there is.

    Args:
        operators: The C++ operators, for a model that may use them: one in float32 on a CPU.
    """
    return ReferenceAttention() if operators is None else CpuAttention(operators)
