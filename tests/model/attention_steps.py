"""Passes over one layer of attention with random numbers, and how two backends agree on them."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from engine.model.attention.interface import AttentionBackend, LayerOptions
from engine.model.attention.reference import ReferenceAttention
from engine.model.input_batch import InputBatch, SequenceSlice
from engine.model.kv_cache import LayerShape, PagedKVCache
from engine.token_tree import TokenTree

BLOCK_SIZE = 4
BLOCKS_PER_SEQUENCE = 24
TREE = TokenTree(tuple(range(1, 9)), (0, 0, 1, 2, 3, 3, 6, 7))
WISHES = ("plain", "window 3", "window 40", "softcap", "sinks", "all")
# Relative to values around one; the rounding of weights to the type is what is left of it.
TOLERANCES = {torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}

Shape = tuple[int, int, int, int]
"""Heads, key/value heads, key dimension, value dimension."""


def wish(name: str, num_heads: int, device: torch.device) -> LayerOptions:
    """What a layer asks of attention, by a name of WISHES."""
    plain = LayerOptions(scale=0.3, window=None, softcap=None, sinks=None)
    sinks = torch.linspace(-3, 6, num_heads, device=device)
    return {
        "plain": plain,
        "window 3": replace(plain, window=3),
        "window 40": replace(plain, window=40),
        "softcap": replace(plain, softcap=0.7),
        "sinks": replace(plain, sinks=sinks),
        "all": LayerOptions(scale=0.3, window=7, softcap=1.5, sinks=sinks),
    }[name]


def tables(count: int, length: int = BLOCKS_PER_SEQUENCE) -> list[list[int]]:
    """Scattered block tables of `count` sequences."""
    blocks = list(range(count * length))
    random.Random(3).shuffle(blocks)
    return [blocks[begin : begin + length] for begin in range(0, len(blocks), length)]


def mixed() -> list[SequenceSlice]:
    """A prompt, a later chunk of one, single tokens, a tree, a tree that grows, one on the second token."""
    a, b, c, d, e, f, g = tables(7)
    return [
        SequenceSlice([0] * 9, 0, a),
        SequenceSlice([0] * 4, 25, b),
        SequenceSlice([0], 88, c),
        SequenceSlice([0], 33, d, TREE),
        SequenceSlice([], 30, e, TREE, num_cached_nodes=5),
        SequenceSlice([0], 0, f),
        SequenceSlice([0] * 2, 0, g, TREE.truncated(3)),
    ]


def long_stretches() -> list[SequenceSlice]:
    """More tokens of a sequence than a tile holds, with a tree across the border of two tiles."""
    a, b = tables(2)
    return [SequenceSlice([0] * 23, 5, a), SequenceSlice([0] * 9, 60, b, TREE)]


@dataclass(frozen=True, slots=True)
class Step:
    """One pass over one layer: what goes in, and a cache that holds what earlier passes left."""

    batch: InputBatch
    cache: PagedKVCache
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor

    def widened(self) -> "Step":
        """The same numbers in float32, in a cache of its own."""
        cache = make_cache(self.cache.keys[0], self.cache.values[0], torch.float32)
        return Step(self.batch, cache, self.query.float(), self.key.float(), self.value.float())

    def attend(self, backend: AttentionBackend, options: LayerOptions) -> torch.Tensor:
        """Runs it: [T, num_heads, value_dim]."""
        plan = backend.plan(self.batch, self.cache)
        return plan.attend(0, self.query, self.key, self.value, options)[0]


def make_cache(keys: torch.Tensor, values: torch.Tensor, dtype: torch.dtype) -> PagedKVCache:
    """A cache of one layer with copies of what is given."""
    num_slots, num_heads, key_dim = keys.shape
    layer = LayerShape(num_heads, key_dim, values.shape[2])
    cache = PagedKVCache([layer], num_slots // BLOCK_SIZE, BLOCK_SIZE, dtype, keys.device)
    cache.keys[0].copy_(keys)
    cache.values[0].copy_(values)
    return cache


def make_step(
    slices: Sequence[SequenceSlice],
    shape: Shape,
    dtype: torch.dtype,
    device: torch.device,
    cache_dtype: torch.dtype | None = None,
) -> Step:
    """Random numbers; slots that no sequence has written, or writes now, hold what is not a number.

    Keys and values are numbers of the cache's type, if that is another one.
    """
    generator = torch.Generator().manual_seed(len(slices) + sum(shape))

    def numbers(*sizes: int) -> torch.Tensor:
        return torch.randn(*sizes, generator=generator).to(device, dtype)

    num_heads, num_kv_heads, key_dim, value_dim = shape
    batch = InputBatch.build(slices, BLOCK_SIZE, device)
    num_slots = BLOCK_SIZE * (1 + max(block for piece in slices for block in piece.block_table))
    keys, values = (
        torch.full((num_slots, num_kv_heads, dim), float("nan"), device=device)
        for dim in (key_dim, value_dim)
    )
    for tensor in (keys, values):
        for slots in batch.context_slots:
            tensor[slots] = numbers(len(slots), *tensor.shape[1:]).float()
        tensor[batch.slots] = float("nan")
    num_tokens = len(batch.input_ids)
    # Laid out as transformers hands them over: heads are a transposed view.
    query, key, value = (
        numbers(1, num_tokens, heads, dim).transpose(1, 2)
        for heads, dim in ((num_heads, key_dim), (num_kv_heads, key_dim), (num_kv_heads, value_dim))
    )
    if cache_dtype is not None:
        key, value = (tensor.to(cache_dtype).to(dtype) for tensor in (key, value))
    return Step(batch, make_cache(keys, values, cache_dtype or dtype), query, key, value)


def assert_agrees(backend: AttentionBackend, step: Step, options: LayerOptions) -> None:
    """A backend gives what the reference gives in float32, and leaves the same in the cache."""
    wide = step.widened()
    expected = wide.attend(ReferenceAttention(), options)
    got = step.attend(backend, options)
    assert got.dtype == step.query.dtype
    tolerance = TOLERANCES[got.dtype]
    torch.testing.assert_close(got.float(), expected, rtol=tolerance, atol=tolerance)
    for ours, theirs in ((step.cache.keys, wide.cache.keys), (step.cache.values, wide.cache.values)):
        assert torch.equal(ours[0].float().nan_to_num(9e9), theirs[0].nan_to_num(9e9))
