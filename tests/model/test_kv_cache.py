"""The paged cache: layers of several shapes, written one by one and moved all at once."""

import torch

from engine.model.kv_cache import LayerShape, PagedKVCache

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
