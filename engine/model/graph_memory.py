"""What recorded passes take of a GPU's memory: the KV pool, which takes the rest, has to leave them that.

Passes are recorded when their bucket first comes by, long after the pool was sized, and stay. They share
memory for what they compute, so that the largest bucket counts once; each has besides what the driver keeps
of a graph. This is an estimate on the safe side, made of sizes alone.
"""

import torch
from torch import nn

from engine.model.static_batch import LARGEST, num_buckets
from engine.model.weight_type import is_composed

_BYTES_PER_GRAPH = 8 << 20
"""What the driver keeps of some hundred launches; a guess, not measured."""
WORKSPACE_BYTES = 32 << 20
"""What cuBLAS takes for itself in the memory of graphs, on the largest GPUs."""
_LIVE_TENSORS = 8
"""Activations as wide as a model's widest layer that are alive at the same time."""


def recorded_bytes(module: nn.Module, num_logits: int, dtype: torch.dtype, num_kinds: int = 1) -> int:
    """The memory of all recordings of a model.

    Args:
        module: The model, or a head.
        num_logits: Numbers in a row of its logits.
        dtype: Type of its activations.
        num_kinds: Kinds of passes: with hidden states and without.
    """
    linears = [part for part in module.modules() if isinstance(part, nn.Linear)]
    layers = [part for part in linears if part.out_features < num_logits]
    widest = max((max(part.in_features, part.out_features) for part in layers), default=0)
    # A row as the model gives it, in float32, and in what all recordings share for their results.
    per_token = num_logits * (dtype.itemsize + 4 + 4) + _LIVE_TENSORS * widest * dtype.itemsize
    # torchao unpacks some kinds of weights to multiply with them, a layer at a time.
    unpacked = max((part.weight.numel() for part in linears if is_composed(part.weight)), default=0)
    return (
        LARGEST.num_tokens * per_token
        + unpacked * dtype.itemsize
        + num_kinds * num_buckets() * _BYTES_PER_GRAPH
        + WORKSPACE_BYTES
    )


def row_graphs_bytes(num_rows: int, bytes_per_row: int, num_recordings: int) -> int:
    """The memory of recorded calls on rows of numbers.

    Args:
        num_rows: Rows of the largest.
        bytes_per_row: What a row takes: inputs, results and what is alive in between.
        num_recordings: The most there are.
    """
    return num_rows * bytes_per_row + num_recordings * _BYTES_PER_GRAPH
