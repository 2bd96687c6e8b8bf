"""The Triton backend: paged attention in kernels that read keys and values where they are, for NVIDIA GPUs.

A layer takes two launches, and a third where long contexts were split. What all layers share is worked out
once per pass and kind of layer, and reaches the device in one copy.
"""

from dataclasses import dataclass

import torch
import triton

from engine.model.attention import triton_kernels as kernels
from engine.model.attention.interface import AttentionPlan, LayerOptions
from engine.model.attention.tiles import SplitRules, TileShape, cut
from engine.model.input_batch import InputBatch
from engine.model.kv_cache import PagedKVCache

_MIN_ROWS = 16
"""Rows, and slots, of the smallest matrix product that Triton knows."""
_MAX_ROW_BYTES = 128
"""A column of a block: 64 rows or slots of 16 bits, 32 in float32, which has no matrix unit to lean on."""
_SLOT_BYTES = 32 << 10
"""Keys and values of a block of slots. Compiled with _STAGES, no tile needs more than a small GPU has."""
_STAGES = 3


class TritonAttention:
    """Attention for caches in float32, float16 or bfloat16 on a CUDA device.

    Args:
        rules: When contexts are split.
    """

    def __init__(self, rules: SplitRules) -> None:
        self._rules = rules

    def plan(self, batch: InputBatch, cache: PagedKVCache) -> AttentionPlan:
        """Prepares one forward pass."""
        return TritonPlan(self._rules, batch, cache)


@dataclass(frozen=True, slots=True)
class _Kind:
    """Layers with the same of these share their tables."""

    num_heads: int
    num_kv_heads: int
    window: int | None


@dataclass(frozen=True, slots=True)
class _Tables:
    """A batch cut for one kind of layer.

    Attributes:
        tiles: int32 [num_tiles, 7].
        merges: int32 [num_merges, 4].
        num_partials: Partial results in all.
        num_rows: Rows of a tile, a power of two.
        num_splits: Most partial results of one merge, up to a power of two.
    """

    tiles: torch.Tensor
    merges: torch.Tensor
    num_partials: int
    num_rows: int
    num_splits: int


@dataclass(frozen=True, slots=True)
class _Results:
    """Where a layer's results go: see `attend` in the kernels."""

    out: torch.Tensor
    partial_out: torch.Tensor
    partial_weight: torch.Tensor

    @classmethod
    def empty(cls, out: torch.Tensor, tables: _Tables, num_kv_heads: int) -> "_Results":
        """With room for partial results."""
        partials = (tables.num_partials, num_kv_heads, tables.num_rows)
        return cls(
            out,
            out.new_empty((*partials, out.shape[2]), dtype=torch.float32),
            out.new_empty(partials, dtype=torch.float32),
        )


class TritonPlan:
    """One forward pass of TritonAttention."""

    def __init__(self, rules: SplitRules, batch: InputBatch, cache: PagedKVCache) -> None:
        self._rules = rules
        self._batch = batch
        self._cache = cache
        self._context = torch.cat(batch.context_slots)
        self._has_trees = any(span.has_tree for span in batch.spans)
        # Committed slots lie in order; only nodes are looked up.
        self._positions = torch.cat(batch.context_positions) if self._has_trees else self._context
        self._tables: dict[_Kind, _Tables] = {}

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
            *(key, value, keys, values, self._batch.slots),
            *key.stride()[:2],
            *value.stride()[:2],
            NUM_HEADS=num_kv_heads,
            KEY_DIM=key_dim,
            VALUE_DIM=values.shape[2],
            BLOCK_H=_power_of_two(num_kv_heads),
            BLOCK_K=_power_of_two(key_dim),
            BLOCK_V=_power_of_two(values.shape[2]),
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
        tables = self._tables_for(_Kind(num_heads, num_kv_heads, options.window))
        results = _Results.empty(out, tables, num_kv_heads)
        batch, block_k, block_v = self._batch, _block_of(keys.shape[2]), _block_of(value_dim)
        kernels.attend[(len(tables.tiles), num_kv_heads)](
            *(query, keys, values, results.out, results.partial_out, results.partial_weight),
            *(tables.tiles, self._context, self._positions),
            *(batch.positions, batch.visible, batch.ancestors),
            out if options.sinks is None else options.sinks,
            *(options.scale, options.softcap or 0.0, options.window or 0),
            *query.stride()[:2],
            GROUP=num_heads // num_kv_heads,
            KEY_DIM=keys.shape[2],
            VALUE_DIM=value_dim,
            BLOCK_M=tables.num_rows,
            BLOCK_N=_slots_per_block(block_k + block_v, keys.element_size()),
            BLOCK_K=block_k,
            BLOCK_V=block_v,
            HAS_TREES=self._has_trees,
            HAS_WINDOW=options.window is not None,
            HAS_SOFTCAP=options.softcap is not None,
            HAS_SINKS=options.sinks is not None,
            WIDE_DOTS=_widens(keys.dtype),
            num_stages=_STAGES,
        )
        if tables.num_partials:
            self._combine(results, tables, num_heads // num_kv_heads, options.sinks)

    def _combine(self, results: _Results, tables: _Tables, group: int, sinks: torch.Tensor | None) -> None:
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

    def _tables_for(self, kind: _Kind) -> _Tables:
        if kind not in self._tables:
            self._tables[kind] = self._build(kind)
        return self._tables[kind]

    def _build(self, kind: _Kind) -> _Tables:
        group = kind.num_heads // kind.num_kv_heads
        longest = max(span.end - span.begin for span in self._batch.spans)
        smallest = max(_MIN_ROWS, _power_of_two(group))
        most_rows = _MAX_ROW_BYTES // self._cache.keys[0].element_size()
        num_rows = max(smallest, min(most_rows, _power_of_two(group * longest)))
        shape = TileShape(kind.num_kv_heads, num_rows // group, kind.window)
        table = cut(self._batch.spans, shape, self._rules)
        flat = [number for row in (*table.tiles, *table.merges) for number in row]
        numbers = torch.tensor(flat, dtype=torch.int32, device=self._context.device)
        tiles, merges = torch.split(numbers, [7 * len(table.tiles), 4 * len(table.merges)])
        most = max((count for *_, count in table.merges), default=1)
        return _Tables(
            tiles.view(-1, 7),
            merges.view(-1, 4),
            table.num_partials,
            num_rows,
            _power_of_two(most),
        )


def _with_dense_heads(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def _power_of_two(number: int) -> int:
    """The next one, or the number itself."""
    return 1 << (number - 1).bit_length()


def _block_of(dim: int) -> int:
    return max(_MIN_ROWS, _power_of_two(dim))


def _slots_per_block(numbers: int, number_bytes: int) -> int:
    fitting = max(1, _SLOT_BYTES // (numbers * number_bytes))
    return max(_MIN_ROWS, min(_MAX_ROW_BYTES // number_bytes, 1 << fitting.bit_length() - 1))


def _widens(dtype: torch.dtype) -> bool:
    # Triton's interpreter holds bfloat16 as integers and multiplies those.
    return dtype == torch.bfloat16 and bool(triton.knobs.runtime.interpret)
