"""Counts what would make the host wait for a device: looks at numbers, copies, results of unknown size."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

# Read the memory of a tensor without an operator that a dispatch mode would see.
_READS = {torch.Tensor.tolist, torch.Tensor.numpy, torch.Tensor.__array__}
_WAITS = {
    "_local_scalar_dense",
    "nonzero",
    "masked_select",
    "_unique2",
    "unique_dim",
    "repeat_interleave",
    "equal",
}
_INDEXES = {"index", "index_put_", "index_put", "_index_put_impl_"}


class _Operators(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, found: list[str]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._found = found

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        name = func.overloadpacket.__name__
        if name in _WAITS or (name in _INDEXES and any(map(_is_mask, args[1]))):
            self._found.append(name)
        return func(*args, **(kwargs or {}))


class _Reads(TorchFunctionMode):
    def __init__(self, found: list[str]) -> None:
        super().__init__()
        self._found = found

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func in _READS or func is torch.Tensor.cpu:
            self._found.append(func.__name__)
        return func(*args, **(kwargs or {}))


def _is_mask(index: object) -> bool:
    # Each mask among the indices is turned into a list of places, whose length the host has to know.
    return isinstance(index, torch.Tensor) and index.dtype in (torch.bool, torch.uint8)


def waits_in(call: Callable[[], object]) -> list[str]:
    """The names of what would wait, in order."""
    found: list[str] = []
    with _Operators(found), _Reads(found):
        call()
    return found
