"""How much memory is free, and how many KV blocks that makes."""

import logging
import os
import platform
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from engine.config import CacheConfig, SchedulerConfig
from engine.errors import StartupError
from engine.model.kv_cache import LayerShape

logger = logging.getLogger(__name__)

GIB = 1 << 30
CPU_SHARE = 0.5
GPU_SHARE = 0.9
"""Shares of the free memory that the KV pool takes unasked; the rest is left to activations and others."""

_NO_LIMIT = 1 << 60


@dataclass(frozen=True, slots=True)
class CacheFootprint:
    """What one model keeps per token: target, draft model and heads each have a cache of their own.

    Attributes:
        layers: Cache shape of each attention layer.
        dtype: Type of its keys and values.
        extra_bytes_per_block: What it keeps besides, once per block.
    """

    layers: tuple[LayerShape, ...]
    dtype: torch.dtype
    extra_bytes_per_block: int = 0

    def bytes_per_block(self, block_size: int) -> int:
        """Keys and values of all layers for so many tokens, and what is kept once."""
        per_token = sum(layer.numbers_per_token for layer in self.layers)
        return block_size * per_token * self.dtype.itemsize + self.extra_bytes_per_block


@dataclass(frozen=True, slots=True)
class BlockPlan:
    """The size of the KV pool.

    Attributes:
        num_blocks: Blocks in the pool.
        bytes_per_block: Of all caches together.
        total_bytes: num_blocks times bytes_per_block.
        reason: Why this many, for the start log.
    """

    num_blocks: int
    bytes_per_block: int
    total_bytes: int
    reason: str


@dataclass(frozen=True, slots=True)
class _Demand:
    """Blocks that sequences can need."""

    one_sequence: int
    all_sequences: int


def plan_blocks(
    config: CacheConfig,
    scheduler: SchedulerConfig,
    caches: Sequence[CacheFootprint],
    max_model_len: int,
    device: torch.device,
    reserved: int = 0,
) -> BlockPlan:
    """Decides how many KV blocks there are.

    The size that is asked for, else a share of the free memory, but never more than all sequences together
    can fill.

    Args:
        config: Block size, and the pool's size if it is given.
        scheduler: How many sequences run at once.
        caches: Every cache that is indexed by the blocks.
        max_model_len: Tokens of the longest sequence.
        device: Where the caches lie.
        reserved: Bytes of the free memory that recorded passes will take.

    Raises:
        StartupError: The pool cannot hold one sequence of max_model_len, or is larger than what is free.
    """
    per_block = sum(cache.bytes_per_block(config.block_size) for cache in caches)
    longest = -(-max_model_len // config.block_size)
    demand = _Demand(longest, longest * scheduler.max_num_seqs)
    free = max(0, available_bytes(device) - reserved)
    place = f"{device} beside {_gib(reserved)} for graphs" if reserved else str(device)
    if config.num_kv_blocks is not None:
        wanted, reason = config.num_kv_blocks, "num_kv_blocks"
    elif config.kv_cache_gb is not None:
        wanted, reason = int(config.kv_cache_gb * GIB) // per_block, f"kv_cache_gb = {config.kv_cache_gb:g}"
    else:
        share = CPU_SHARE if device.type == "cpu" else GPU_SHARE
        wanted = int(free * share) // per_block
        reason = f"{share:.0%} of the {_gib(free)} free on {place}"
    if wanted * per_block > free:
        raise StartupError(
            f"a KV pool of {wanted} blocks ({reason}) takes {_gib(wanted * per_block)}, "
            f"but only {_gib(free)} are free on {place}; lower kv_cache_gb or num_kv_blocks, or free memory"
        )
    if wanted > demand.all_sequences and config.num_kv_blocks is None:
        wanted = demand.all_sequences
        sequences = f"max_num_seqs = {scheduler.max_num_seqs} sequences of {max_model_len} tokens"
        reason = f"all that {sequences} can fill, less than {reason}"
    _check_longest(wanted, demand, per_block, config, reason)
    return BlockPlan(wanted, per_block, wanted * per_block, reason)


def _check_longest(wanted: int, demand: _Demand, per_block: int, config: CacheConfig, reason: str) -> None:
    if wanted >= demand.one_sequence:
        return
    needed = _gib(demand.one_sequence * per_block)
    fitting = wanted * config.block_size
    # A sequence is a token of prompt and one of answer at least.
    shorten = f"set max_model_len to at most {fitting}, or " if fitting >= 2 else ""
    setting = "kv_cache_gb" if config.num_kv_blocks is None else "num_kv_blocks"
    raise StartupError(
        f"the KV pool has room for {wanted} blocks of {config.block_size} tokens ({reason}), but one "
        f"sequence of max_model_len needs {demand.one_sequence} ({needed}); "
        f"{shorten}give the pool more with {setting}"
    )


def available_bytes(device: torch.device) -> int:
    """Memory that can still be taken on a device without pushing anything out."""
    if device.type == "cuda":
        # torch keeps what loading has freed, in pieces that are too small for a pool.
        torch.cuda.empty_cache()
        return torch.cuda.mem_get_info(device)[0]
    if platform.system() == "Linux":
        return linux_available_bytes(Path("/"))
    # Elsewhere (macOS) the system names no such figure; half of all memory is a cautious stand-in.
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2


def linux_available_bytes(root: Path) -> int:
    """What the kernel counts as available, or what control groups leave of it, whichever is less.

    Args:
        root: Where proc and sys lie; "/" outside of tests.
    """
    return min(_meminfo_available(root), _cgroup_available(root))


def _meminfo_available(root: Path) -> int:
    for line in (root / "proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise StartupError("/proc/meminfo has no MemAvailable; set kv_cache_gb to size the KV pool by hand")


def _cgroup_available(root: Path) -> int:
    """The least that any control group above this process leaves; each level may set a limit."""
    membership = root / "proc/self/cgroup"
    if not membership.is_file():
        return _NO_LIMIT
    least = _NO_LIMIT
    for line in membership.read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            mount, files = root / "sys/fs/cgroup", ("memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            mount = root / "sys/fs/cgroup/memory"
            files = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        else:
            continue
        group = mount / path.lstrip("/")
        for folder in (group, *group.parents):
            least = min(least, _group_available(folder, *files))
            if folder == mount:
                break
    return least


def _group_available(folder: Path, limit: str, usage: str, cache: str) -> int:
    """What one control group leaves; file pages that it could drop do not count as used."""
    if not (folder / limit).is_file() or not (folder / usage).is_file():
        return _NO_LIMIT
    text = (folder / limit).read_text().strip()
    if text == "max" or int(text) >= _NO_LIMIT:
        return _NO_LIMIT
    droppable = 0
    if (folder / "memory.stat").is_file():
        for line in (folder / "memory.stat").read_text().splitlines():
            name, _, value = line.partition(" ")
            if name == cache:
                droppable = int(value)
    return max(0, int(text) - int((folder / usage).read_text()) + droppable)


def _gib(size: int) -> str:
    return f"{size / GIB:.2f} GiB"
