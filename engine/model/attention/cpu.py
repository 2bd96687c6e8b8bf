"""The CPU backend: one C++ operator per layer that reads keys and values where they are.

Each row and head is computed on its own, in the order of the row's sequence, so that a row's result has
the same bits alone, in a batch, in a chunk, or as a draft node. The cost is linear in the context.
"""

import torch

from engine.model.attention.interface import AttentionPlan, LayerOptions
from engine.model.cpu_ops.build import CpuOperators
from engine.model.input_batch import InputBatch
from engine.model.kv_cache import PagedKVCache


class CpuAttention:
    """Attention of float32 models on a CPU, over caches of float32, float16 or bfloat16.

    Args:
        operators: The built operators.
    """

    def __init__(self, operators: CpuOperators) -> None:
        self._operators = operators

    @property
    def recorded(self) -> None:
        """Each pass is planned anew."""

    def plan(self, batch: InputBatch, cache: PagedKVCache) -> AttentionPlan:
        """Prepares one forward pass."""
        return CpuPlan(self._operators, batch, cache)


class CpuPlan:
    """One forward pass of CpuAttention: the batch as flat tables of integers, made once for all layers.

    Attributes:
        cache: Keys and values of all layers.
    """

    def __init__(self, operators: CpuOperators, batch: InputBatch, cache: PagedKVCache) -> None:
        self._attend = operators.attend
        self.cache = cache
        self._slots = batch.slots
        self._visible = batch.visible
        self._ancestors = batch.ancestors
        self._context = batch.context.table_slots
        # A row a sequence: what it holds is told in operators.cpp.
        self._spans = torch.tensor(
            [
                (span.begin, span.end, span.num_committed, span.num_slots, begin)
                for span, begin in zip(batch.spans, batch.context.begins, strict=True)
            ],
            dtype=torch.int64,
        )

    @property
    def tables(self) -> tuple[torch.Tensor, ...]:
        """What an operator needs, besides keys and values, that attends for several layers."""
        return self._slots, self._spans, self._context, self._visible, self._ancestors

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, options: LayerOptions
    ) -> torch.Tensor:
        """See AttentionPlan."""
        out: torch.Tensor = self._attend(
            query,
            key,
            value,
            self.cache.keys[layer],
            self.cache.values[layer],
            self._slots,
            self._spans,
            self._context,
            self._visible,
            self._ancestors,
            options.scale,
            options.window or 0,
            options.softcap or 0.0,
            options.sinks,
        )
        return out
