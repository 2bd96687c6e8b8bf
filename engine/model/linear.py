"""Linear layers on a CPU: weights packed as float16, activations and sums in float32.

Reading weights is what a decoding step on a CPU waits for. FBGEMM's float16 kernel reads half the bytes of
float32 and, unlike float32 GEMM, costs nearly the same for one row as for a few: the room in which checking
a draft is cheap.

Its rows are not all computed alike. The kernel splits a call of M rows into groups, and a row in a group of
one or two is summed in another order than a row in a larger group, which changes its last bits. A draft
must not change a row, so calls are padded to row counts that leave no such group. Which those are depends
on the instruction set and is measured on this machine when the first layer is packed.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from engine.model.cpu_ops.build import CpuOperators
from engine.model.packing import NOT_FINITE, largest_magnitude

FLOAT16_MAX = torch.finfo(torch.float16).max
MAX_ROWS = 120
"""Rows per kernel call: what FBGEMM itself takes at a time, so that larger calls lose nothing in pieces."""


def packed_fp16_unavailable() -> str | None:
    """Why this machine cannot hold packed float16 weights; None when it can."""
    engine = torch.backends.quantized.engine
    if engine not in ("fbgemm", "x86"):
        return f"torch's quantized engine here is {engine!r}, and packing needs FBGEMM (x86)"
    capability = torch.backends.cpu.get_cpu_capability()
    if not capability.startswith(("AVX2", "AVX512")):
        return f"the CPU offers {capability}, and FBGEMM needs AVX2"
    return None


@dataclass(frozen=True, slots=True)
class RowPadding:
    """How many rows a packed layer computes for M rows, so that all rows belong to one class.

    Attributes:
        sizes: For each M from 0 on the smallest row count of at least M that is of the class. The last is
            the most rows of one call; larger inputs are cut.
    """

    sizes: tuple[int, ...]

    @classmethod
    def measure(cls) -> "RowPadding":
        """Finds the row counts whose rows all come out with the same bits, whichever counts those are here.

        One row is computed in calls of every size; the class that covers most sizes is kept.
        """
        in_features = 256
        generator = torch.Generator().manual_seed(0)
        packed = torch.ops.quantized.linear_prepack_fp16(
            torch.randn(64, in_features, generator=generator), None
        )
        row = torch.randn(1, in_features, generator=generator)
        classes: dict[bytes, list[int]] = {}
        for rows in range(1, MAX_ROWS + 1):
            result = torch.ops.quantized.linear_dynamic_fp16(row.repeat(rows, 1), packed)
            if torch.equal(result, result[:1].expand_as(result)):
                classes.setdefault(result[0].numpy().tobytes(), []).append(rows)
        usable = max(classes.values(), key=len)
        return cls(tuple(min(size for size in usable if size >= rows) for rows in range(usable[-1] + 1)))


class PackedLinear(nn.Module):
    """y = x W^T + b with W packed as float16. A row's result is the same bits in any batch.

    Args:
        weight: float32 [out_features, in_features]; copied, so that the caller may free it.
        bias: float32 [out_features] or None.
        padding: The row counts of this machine.
        operators: The C++ operators, which do the same in one call; None does it in torch.
    """

    dtype = "float16"

    def __init__(
        self,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        padding: RowPadding,
        operators: CpuOperators | None = None,
    ) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self._packed = torch.ops.quantized.linear_prepack_fp16(weight.contiguous(), bias)
        self._row_sizes = torch.tensor(padding.sizes)
        self._multiply = _multiply_padded if operators is None else operators.linear_fp16

    @property
    def weight(self) -> torch.Tensor:
        """The weights unpacked again, float32 [out_features, in_features]; a copy, made on each access."""
        weight: torch.Tensor = torch.ops.quantized.linear_unpack_fp16(self._packed)[0]
        return weight

    def stored(self) -> dict[str, torch.Tensor]:
        """See PackedLayer: the weights as float16, which is exact, since that is what is packed."""
        weight, bias = torch.ops.quantized.linear_unpack_fp16(self._packed)
        return {"weight": weight.half()} | ({} if bias is None else {"bias": bias})

    def movable(self) -> dict[str, torch.Tensor]:
        """See PackedLayer: what FBGEMM has packed stays where it is."""
        return {}

    def extra_repr(self) -> str:
        """The shape, for printing a model."""
        return f"in_features={self.in_features}, out_features={self.out_features}"

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """float32 [..., in_features] to float32 [..., out_features]."""
        result: torch.Tensor = self._multiply(x, self._packed, self._row_sizes)
        return result


def _multiply_padded(x: torch.Tensor, packed: Any, row_sizes: torch.Tensor) -> torch.Tensor:
    """What the C++ operator does, in torch.

    Args:
        x: float32 [..., in_features].
        packed: Weights packed as float16.
        row_sizes: RowPadding.sizes, int64.

    Returns:
        float32 [..., out_features].
    """
    flat = x.reshape(-1, x.shape[-1])
    parts = []
    for piece in torch.split(flat, len(row_sizes) - 1):
        rows = piece.shape[0]
        missing = int(row_sizes[rows]) - rows
        padded = nn.functional.pad(piece, (0, 0, 0, missing)) if missing else piece
        parts.append(torch.ops.quantized.linear_dynamic_fp16(padded, packed)[:rows])
    result = parts[0] if len(parts) == 1 else torch.cat(parts)
    return result.reshape(*x.shape[:-1], result.shape[-1])


class Float16Packer:
    """Makes PackedLinear layers.

    Args:
        operators: The C++ operators, if there are any.
    """

    dtype = "float16"

    def __init__(self, operators: CpuOperators | None = None) -> None:
        self._operators = operators
        self._padding = RowPadding.measure()

    def refuses(self, weight: torch.Tensor) -> str | None:
        """See LinearPacker."""
        largest = largest_magnitude(weight)
        if largest <= FLOAT16_MAX:
            return None
        if not math.isfinite(largest):
            return NOT_FINITE
        return f"its largest weight is {largest:g}, and float16 ends at {FLOAT16_MAX:g}"

    def pack(self, weight: torch.Tensor, bias: torch.Tensor | None) -> PackedLinear:
        """See LinearPacker."""
        return PackedLinear(weight.float(), bias, self._padding, self._operators)

    def restore(self, shape: tuple[int, int], stored: Mapping[str, torch.Tensor]) -> PackedLinear:
        """See LinearPacker. FBGEMM has no way to store what it packed, so it packs again."""
        return self.pack(stored["weight"].view(shape).float(), stored.get("bias"))
