"""PagedKVCache: the keys and values of one model, in slots that block tables point to."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from engine.model.pages import empty_in_huge_pages


@dataclass(frozen=True, slots=True)
class LayerShape:
    """The cache of one attention layer per token.

    Attributes:
        num_kv_heads: Key/value heads.
        key_dim, value_dim: Size of one head; they differ in some architectures.
    """

    num_kv_heads: int
    key_dim: int
    value_dim: int

    @property
    def numbers_per_token(self) -> int:
        """Keys and values together."""
        return self.num_kv_heads * (self.key_dim + self.value_dim)


def narrowed(numbers: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Numbers in the type of a cache, rounded to nearest, ties to even.

    A finite number that the type has no room for becomes the largest that it has: a score that is off by a
    little is better than one that is not a number. What is infinite or not a number stays so; float8_e4m3fn
    has no infinity, and what is infinite is not a number there.
    """
    if numbers.dtype == dtype:
        return numbers
    # In 32 bits: bfloat16 has nothing between float16's largest number and what that has no room for.
    wide = numbers.float()
    limit = torch.finfo(dtype).max
    beyond = torch.nan if dtype == torch.float8_e4m3fn else wide
    return torch.where(wide.isinf(), beyond, wide.clamp(-limit, limit)).to(dtype)


def as_bytes(numbers: torch.Tensor) -> torch.Tensor:
    """The same memory as bytes where a number is one: torch moves bytes, and hardly knows such numbers."""
    return numbers.view(torch.uint8) if numbers.dtype.itemsize == 1 else numbers


class PagedKVCache:
    """Key and value tensors of every layer of one model.

    A slot holds one token: block b covers slots b * block_size to (b + 1) * block_size - 1. Who owns which
    block is not known here; that is the block pool's business, and all models of an engine share its ids.

    Attributes:
        keys: Per layer a tensor [num_slots, num_kv_heads, key_dim].
        values: Per layer a tensor [num_slots, num_kv_heads, value_dim].
        block_size: Slots per block.
        dtype: Type of the tensors.
    """

    def __init__(
        self,
        layers: Sequence[LayerShape],
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.block_size = block_size
        self.dtype = dtype
        # Layers of one shape lie in one stack, so that one operator moves the slots of them all. Not filled:
        # attention reads only slots that were written, and a CPU's pool takes real memory only as its pages
        # are used.
        shapes = [(layer.num_kv_heads, dim) for layer in layers for dim in (layer.key_dim, layer.value_dim)]
        self._stacks = {
            shape: _empty((count, num_blocks * block_size, *shape), dtype, device)
            for shape, count in Counter(shapes).items()
        }
        parts = {shape: iter(stack.unbind()) for shape, stack in self._stacks.items()}
        tensors = [next(parts[shape]) for shape in shapes]
        self.keys, self.values = tensors[::2], tensors[1::2]

    def write(self, layer: int, slots: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Stores one layer's new tokens.

        Args:
            layer: Index of the layer.
            slots: Where each token goes, int64 [num_tokens].
            keys: [num_tokens, num_kv_heads, key_dim].
            values: [num_tokens, num_kv_heads, value_dim].
        """
        for kept, new in ((self.keys[layer], keys), (self.values[layer], values)):
            as_bytes(kept).index_copy_(0, slots, as_bytes(narrowed(new, self.dtype)))

    def read(self, layer: int, slots: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """One layer's keys and values of some tokens.

        Args:
            layer: Index of the layer.
            slots: Where they are, int64 [num_tokens].
            dtype: Type to give them in.

        Returns:
            [num_tokens, num_kv_heads, key_dim] and [num_tokens, num_kv_heads, value_dim].
        """
        keys, values = (
            as_bytes(kept).index_select(0, slots).view(self.dtype).to(dtype)
            for kept in (self.keys[layer], self.values[layer])
        )
        return keys, values

    def clear(self, num_slots: int) -> None:
        """Fills the first slots of all layers with zeros."""
        for stack in self._stacks.values():
            as_bytes(stack)[:, :num_slots] = 0

    def move(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copies slots in every layer at once, as if all were read before any is written.

        After a tree was verified, its accepted nodes lie scattered in scratch slots; this puts them in line.
        """
        if not sources:
            return
        device = self.keys[0].device
        slots = torch.tensor((sources, targets), dtype=torch.int64)
        if (
            device.type == "cuda"
        ):  # From ordinary memory the copy would wait for all that was launched before.
            slots = slots.pin_memory()
        source, target = slots.to(device, non_blocking=True)
        for stack in map(as_bytes, self._stacks.values()):
            stack.index_copy_(1, target, stack.index_select(1, source))


def _empty(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    if device.type == "cpu":
        return empty_in_huge_pages(shape, dtype)
    return torch.empty(shape, dtype=dtype, device=device)
