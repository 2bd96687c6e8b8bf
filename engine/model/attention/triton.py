"""The Triton backend: paged attention in kernels that read keys and values where they are, for NVIDIA GPUs.

A layer takes two launches, and a third where long contexts were split. What all layers share is worked out
once per pass and kind of layer, and reaches the device in one copy. Recorded passes launch as much as any
batch of their bucket may need; what a batch does not need does nothing.
"""

from dataclasses import dataclass
from typing import Protocol

import torch
import triton

from engine.model.attention import triton_kernels as kernels
from engine.model.attention.interface import (
    AttentionPlan,
    LayerOptions,
    RecordedAttention,
    StaticPlan,
)
from engine.model.attention.tiles import SplitRules
from engine.model.attention.triton_tables import (
    MAX_ROW_BYTES,
    MIN_ROWS,
    BatchTables,
    BucketTables,
    Kind,
    Tables,
    power_of_two,
)
from engine.model.input_batch import InputBatch
from engine.model.kv_cache import PagedKVCache, as_bytes
from engine.model.recording import Recorder
from engine.model.static_batch import StaticBatch

_SLOT_BYTES = 32 << 10
"""Keys and values of a block of slots. Compiled with _STAGES, no tile needs more than a small GPU has."""
_STAGES = 3


class TritonAttention:
    """Attention in float32, float16 or bfloat16 on a CUDA device.

    The cache may be of another of these types, or of float8_e4m3fn: numbers are rounded as `narrowed` does it
    when they are written, and converted when they are read, without factors. float8_e4m3fn takes a GPU of
    compute capability 8.9.

    Args:
        rules: When contexts are split.
        recorder: What records passes; None plans each anew.
    """

    def __init__(self, rules: SplitRules, recorder: Recorder | None = None) -> None:
        self._rules = rules
        self._recorded = None if recorder is None else RecordedTriton(rules, recorder)

    @property
    def recorded(self) -> RecordedAttention | None:
        """See AttentionBackend."""
        return self._recorded

    def plan(self, batch: InputBatch, cache: PagedKVCache) -> AttentionPlan:
        """Prepares one forward pass."""
        inputs = _Inputs(
            batch.slots,
            batch.positions,
            batch.visible,
            batch.ancestors,
            torch.cat(batch.context_slots),
            # Committed slots lie in order; only nodes are looked up.
            torch.cat(batch.context_positions) if _has_trees(batch) else batch.positions,
            _has_trees(batch),
        )
        return TritonPlan(BatchTables(self._rules, batch), inputs, cache)


class RecordedTriton:
    """The same for passes that are recorded.

    Args:
        rules: When contexts are split.
        recorder: What records them.
    """

    def __init__(self, rules: SplitRules, recorder: Recorder) -> None:
        self.recorder = recorder
        self._rules = rules

    def plan(self, batch: StaticBatch, cache: PagedKVCache) -> StaticPlan:
        """See RecordedAttention."""
        inputs = _Inputs(
            *(batch.slots, batch.positions, batch.visible, batch.ancestors),
            *(batch.context_slots, batch.context_positions),
            has_trees=True,
        )
        tables = BucketTables(self._rules, batch.bucket, cache.keys[0].device)
        return StaticTritonPlan(tables, inputs, cache)


@dataclass(frozen=True, slots=True)
class _Inputs:
    """What the kernels read of a batch: see `attend` there."""

    slots: torch.Tensor
    positions: torch.Tensor
    visible: torch.Tensor
    ancestors: torch.Tensor
    context: torch.Tensor
    context_positions: torch.Tensor
    has_trees: bool


class _TablesByKind(Protocol):
    def of(self, kind: Kind) -> Tables: ...


@dataclass(frozen=True, slots=True)
class _Results:
    """Where a layer's results go: see `attend` in the kernels."""

    out: torch.Tensor
    partial_out: torch.Tensor
    partial_weight: torch.Tensor

    @classmethod
    def empty(cls, out: torch.Tensor, tables: Tables, num_kv_heads: int) -> "_Results":
        """With room for partial results."""
        partials = (tables.num_partials, num_kv_heads, tables.num_rows)
        return cls(
            out,
            out.new_empty((*partials, out.shape[2]), dtype=torch.float32),
            out.new_empty(partials, dtype=torch.float32),
        )


class TritonPlan:
    """One forward pass of TritonAttention."""

    def __init__(self, tables: _TablesByKind, inputs: _Inputs, cache: PagedKVCache) -> None:
        self._tables = tables
        self._inputs = inputs
        self._cache = cache

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, options: LayerOptions
    ) -> torch.Tensor:
        """See AttentionPlan."""
        keys, values = self._cache.keys[layer], self._cache.values[layer]
        query, key, value = (_with_dense_heads(tensor[0]) for tensor in (query, key, value))
        num_heads, num_tokens, _ = query.shape
        out = query.new_empty(1, num_tokens, num_heads, values.shape[2])
        with torch.cuda.device(query.get_device()):  # Triton launches on the current one; -1 changes nothing.
            self._store(key, value, keys, values)
            self._attend(query, keys, values, out[0], options)
        return out

    def _store(
        self, key: torch.Tensor, value: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
    ) -> None:
        _, num_kv_heads, key_dim = keys.shape
        kernels.store[(key.shape[1],)](
            *(key, value, as_bytes(keys), as_bytes(values), self._inputs.slots),
            *key.stride()[:2],
            *value.stride()[:2],
            NUM_HEADS=num_kv_heads,
            KEY_DIM=key_dim,
            VALUE_DIM=values.shape[2],
            BLOCK_H=power_of_two(num_kv_heads),
            BLOCK_K=power_of_two(key_dim),
            BLOCK_V=power_of_two(values.shape[2]),
            LIMIT=0.0 if key.dtype == keys.dtype else torch.finfo(keys.dtype).max,
        )

    def _attend(
        self,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        out: torch.Tensor,
        options: LayerOptions,
    ) -> None:
        num_heads, num_kv_heads, value_dim = query.shape[0], keys.shape[1], values.shape[2]
        number_bytes = max(query.element_size(), keys.element_size())
        tables = self._tables.of(Kind(num_heads, num_kv_heads, options.window, number_bytes))
        results = _Results.empty(out, tables, num_kv_heads)
        inputs, block_k, block_v = self._inputs, _block_of(keys.shape[2]), _block_of(value_dim)
        kernels.attend[(len(tables.tiles), num_kv_heads)](
            *(query, keys, values, results.out, results.partial_out, results.partial_weight),
            *(tables.tiles, inputs.context, inputs.context_positions),
            *(inputs.positions, inputs.visible, inputs.ancestors),
            out if options.sinks is None else options.sinks,
            *(options.scale, options.softcap or 0.0, options.window or 0),
            *query.stride()[:2],
            GROUP=num_heads // num_kv_heads,
            KEY_DIM=keys.shape[2],
            VALUE_DIM=value_dim,
            BLOCK_M=tables.num_rows,
            BLOCK_N=_slots_per_block(block_k + block_v, number_bytes),
            BLOCK_K=block_k,
            BLOCK_V=block_v,
            HAS_TREES=inputs.has_trees,
            HAS_WINDOW=options.window is not None,
            HAS_SOFTCAP=options.softcap is not None,
            HAS_SINKS=options.sinks is not None,
            WIDE_DOTS=_widens(query.dtype),
            num_stages=_STAGES,
        )
        if tables.num_partials:
            self._combine(results, tables, num_heads // num_kv_heads, options.sinks)

    def _combine(self, results: _Results, tables: Tables, group: int, sinks: torch.Tensor | None) -> None:
        _, num_heads, value_dim = results.out.shape
        kernels.combine[(len(tables.merges), num_heads)](
            *(results.out, results.partial_out, results.partial_weight, tables.merges),
            results.out if sinks is None else sinks,
            GROUP=group,
            VALUE_DIM=value_dim,
            BLOCK_M=tables.num_rows,
            BLOCK_V=_block_of(value_dim),
            BLOCK_S=tables.num_splits,
            HAS_SINKS=sinks is not None,
        )


class StaticTritonPlan(TritonPlan):
    """All passes of a bucket."""

    def __init__(self, tables: BucketTables, inputs: _Inputs, cache: PagedKVCache) -> None:
        super().__init__(tables, inputs, cache)
        self._of_bucket = tables

    def fill(self, batch: InputBatch) -> None:
        """See StaticPlan."""
        self._of_bucket.fill(batch)


def _has_trees(batch: InputBatch) -> bool:
    return any(span.has_tree for span in batch.spans)


def _with_dense_heads(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def _block_of(dim: int) -> int:
    return max(MIN_ROWS, power_of_two(dim))


def _slots_per_block(numbers: int, number_bytes: int) -> int:
    fitting = max(1, _SLOT_BYTES // (numbers * number_bytes))
    return max(MIN_ROWS, min(MAX_ROW_BYTES // number_bytes, 1 << fitting.bit_length() - 1))


def _widens(dtype: torch.dtype) -> bool:
    # Triton's interpreter holds bfloat16 as integers and multiplies those.
    return dtype == torch.bfloat16 and bool(triton.knobs.runtime.interpret)
