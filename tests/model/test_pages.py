"""Huge pages are asked for where they pay, and layers that are moved there say what they said."""

import mmap
from pathlib import Path

import pytest
import torch

from engine.model.int8 import Int8Linear
from engine.model.pages import empty_in_huge_pages, gather
from tests.operators import need_operators

HUGE = 2 << 20


def advised(tensor: torch.Tensor) -> bool:
    """Whether the kernel was told to put the memory into huge pages."""
    place, is_there = tensor.data_ptr(), False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first, _, rest = line.partition(" ")
        if "-" in first and not first.endswith(":"):
            begin, end = (int(part, 16) for part in first.split("-"))
            is_there = begin <= place < end
        elif is_there and first == "VmFlags:":
            return "hg" in rest.split()
    return False


@pytest.mark.skipif(not hasattr(mmap, "MADV_HUGEPAGE"), reason="there are no huge pages to ask for")
def test_large_tensors_lie_in_huge_pages_and_small_ones_anywhere() -> None:
    large = empty_in_huge_pages((3, HUGE // 4), torch.float32)
    assert advised(large)
    assert large.data_ptr() % HUGE == 0
    assert (large.shape, large.dtype, large.is_contiguous()) == ((3, HUGE // 4), torch.float32, True)
    large.fill_(1.0)
    assert float(large.sum()) == large.numel()
    assert not advised(empty_in_huge_pages((16,), torch.float32))


def test_a_large_tensor_without_huge_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(mmap, "MADV_HUGEPAGE", raising=False)
    assert empty_in_huge_pages((HUGE,), torch.int8).shape == (HUGE,)


def test_layers_that_were_gathered_say_what_they_said() -> None:
    operators = need_operators()
    generator = torch.Generator().manual_seed(0)
    layers = [
        Int8Linear(torch.randn(size, 1024, generator=generator), torch.randn(size), operators)
        for size in (1500, 700, 1024)
    ]
    x = torch.randn(3, 1024, generator=generator)
    before = [layer(x) for layer in layers]
    places = {layer._numbers.untyped_storage().data_ptr() for layer in layers}
    gather(layers)
    assert len(places) == 3
    assert len({layer._numbers.untyped_storage().data_ptr() for layer in layers}) == 1
    assert advised(layers[1]._numbers)
    for layer, expected in zip(layers, before, strict=True):
        assert torch.equal(layer(x), expected)


def test_what_is_smaller_than_a_huge_page_stays_where_it_is() -> None:
    class Small:
        def __init__(self) -> None:
            self.weight = torch.ones(8)

        def movable(self) -> dict[str, torch.Tensor]:
            return {"weight": self.weight}

    layer = Small()
    before = layer.weight
    gather([layer])
    assert layer.weight is before
