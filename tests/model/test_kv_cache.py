"""The paged cache: layers of several shapes, written one by one and moved all at once."""

import pytest
import torch

from engine.model.kv_cache import LayerShape, PagedKVCache, as_bytes, narrowed

SHAPES = [LayerShape(2, 8, 8), LayerShape(1, 8, 6), LayerShape(2, 8, 8), LayerShape(2, 6, 8)]


def filled() -> PagedKVCache:
    cache = PagedKVCache(SHAPES, 4, 4, torch.float32, torch.device("cpu"))
    for layer, tensor in enumerate((*cache.keys, *cache.values)):
        tensor.copy_(torch.arange(tensor.numel()).view(tensor.shape) + 1000 * layer)
    return cache


def test_every_layer_has_tensors_of_its_own() -> None:
    cache = filled()
    assert [tuple(keys.shape) for keys in cache.keys] == [(16, 2, 8), (16, 1, 8), (16, 2, 8), (16, 2, 6)]
    assert [tuple(values.shape) for values in cache.values] == [
        (16, 2, 8),
        (16, 1, 6),
        (16, 2, 8),
        (16, 2, 8),
    ]
    tensors = (*cache.keys, *cache.values)
    assert all(tensor.is_contiguous() for tensor in tensors)
    for layer, tensor in enumerate(tensors):
        assert tensor.flatten().tolist() == [1000 * layer + place for place in range(tensor.numel())]


def test_slots_are_moved_as_if_all_were_read_first() -> None:
    cache, before = filled(), filled()
    cache.move([5, 6, 2], [6, 5, 9])
    for tensor, old in zip((*cache.keys, *cache.values), (*before.keys, *before.values), strict=True):
        expected = old.clone()
        expected[[6, 5, 9]] = old[[5, 6, 2]]
        assert torch.equal(tensor, expected)
    cache.move([], [])


def test_slots_of_eight_bits_are_moved_bit_by_bit() -> None:
    """All there are, those that are not numbers included."""
    cache, before = (PagedKVCache(SHAPES, 4, 4, torch.float8_e4m3fn, torch.device("cpu")) for _ in range(2))
    for tensor in (*cache.keys, *cache.values, *before.keys, *before.values):
        as_bytes(tensor).copy_(torch.arange(tensor.numel()).view(tensor.shape) % 256)
    cache.move([5, 6, 2], [6, 5, 9])
    for tensor, old in zip((*cache.keys, *cache.values), (*before.keys, *before.values), strict=True):
        assert tensor.dtype == torch.float8_e4m3fn
        expected = as_bytes(old).clone()
        expected[[6, 5, 9]] = as_bytes(old)[[5, 6, 2]]
        assert torch.equal(as_bytes(tensor), expected)
    cache.clear(3)
    assert not as_bytes(cache.keys[1])[:3].any()
    assert torch.equal(as_bytes(cache.keys[1])[3:5], as_bytes(before.keys[1])[3:5])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_eight_bits_are_written_rounded_and_read_widened(dtype: torch.dtype) -> None:
    """1.1 has 1.125 and 1 beside it; a tie goes to the even one; 448 is the largest."""
    cache = PagedKVCache([LayerShape(1, 6, 2)], 1, 4, torch.float8_e4m3fn, torch.device("cpu"))
    slots = torch.tensor([2])
    keys = torch.tensor([[[1.1, -1.0625, 1.1875, 30000.0, -(2.0**-9), 2.0**-10]]], dtype=dtype)
    values = torch.tensor([[[float("nan"), float("-inf")]]], dtype=dtype)
    cache.write(0, slots, keys, values)
    kept, not_numbers = cache.read(0, slots, dtype)
    assert kept.dtype == dtype
    assert kept.flatten().tolist() == [1.125, -1.0, 1.25, 448.0, -(2.0**-9), 0.0]
    assert not_numbers.isnan().all()


def test_what_has_no_room_becomes_the_largest_number() -> None:
    """Also of bfloat16, which has no number between that and what has none."""
    large = torch.tensor([1e5, -1e5, float("inf"), float("nan")])
    for numbers in (large, large.bfloat16()):
        assert narrowed(numbers, torch.float16)[:3].tolist() == [65504.0, -65504.0, float("inf")]
        assert narrowed(numbers, torch.float16)[3].isnan()
