"""Pages of memory: huge ones for what each step reads from end to end, and those that are free given back.

A processor looks up where a page of memory lies, and pages of 4 KiB are so many that it does hardly anything
else: a step over weights in pages of 2 MiB is an eighth faster.
"""

import ctypes
import gc
import math
import mmap
import platform
from collections.abc import Iterable
from typing import Protocol

import torch

_HUGE = 2 << 20
"""Bytes of a huge page; less than one is not worth the asking."""

_ALIGNMENT = 64
_FREED_AT_A_TIME = 256 << 20


class Movable(Protocol):
    """What holds tensors that may lie anywhere."""

    def movable(self) -> dict[str, torch.Tensor]:
        """Those tensors, under the names of their attributes."""


def empty_in_huge_pages(shape: Iterable[int], dtype: torch.dtype) -> torch.Tensor:
    """A tensor on the CPU that is not filled, in huge pages where the system lends them.

    Whether it does is the system's to say: `transparent_hugepage` under /sys/kernel/mm is to be `always` or
    `madvise`. Memory is taken as it is used, a page at a time.
    """
    sizes = tuple(shape)
    num_bytes = math.prod(sizes) * dtype.itemsize
    if num_bytes < _HUGE or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.empty(sizes, dtype=dtype)
    memory = mmap.mmap(-1, num_bytes + _HUGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE)
    whole = torch.frombuffer(memory, dtype=torch.uint8)
    begin = -whole.data_ptr() % _HUGE
    return whole[begin : begin + num_bytes].view(dtype).view(sizes)


def gather(parts: Iterable[Movable]) -> None:
    """Moves the tensors of a model's layers into one piece of memory in huge pages, one after the other."""
    parts = list(parts)
    num_bytes = sum(_room(tensor) for part in parts for tensor in part.movable().values())
    if num_bytes < _HUGE:
        return
    whole = empty_in_huge_pages((num_bytes,), torch.uint8)
    used = freed = 0
    for part in parts:
        for name, tensor in part.movable().items():
            copy = whole[used : used + tensor.nbytes].view(tensor.dtype).view(tensor.shape).copy_(tensor)
            setattr(part, name, copy)
            used += _room(tensor)
        if used - freed >= _FREED_AT_A_TIME:
            freed = used
            return_freed_memory()


def return_freed_memory() -> None:
    """Gives back to the system what the allocator of the C library keeps of memory that was freed.

    Reading and packing a model goes through many times its size in pieces that glibc would keep for later.
    """
    gc.collect()
    if platform.libc_ver()[0] == "glibc":
        ctypes.CDLL(None).malloc_trim(0)


def _room(tensor: torch.Tensor) -> int:
    return -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT
