"""The C++ operators for tests: built once on a machine, in the cache that everything else uses too."""

import functools
from pathlib import Path

import pytest
import torch

from engine.config import ModelConfig
from engine.model.attention.cpu import CpuAttention
from engine.model.attention.interface import AttentionBackend
from engine.model.attention.reference import ReferenceAttention
from engine.model.cpu_ops.build import CpuOperators, load_operators

BACKENDS = ("reference", "cpu")


@functools.cache
def operators() -> CpuOperators | None:
    """None on a machine that cannot build them."""
    return load_operators(ModelConfig().cache_folder)


def need_operators() -> CpuOperators:
    """The operators; skips the test on a machine that cannot build them."""
    if (built := operators()) is None:
        pytest.skip("the C++ operators cannot be built on this machine")
    return built


def share_operators(cache_dir: Path) -> None:
    """Lets who has a cache of its own use the operators that are built: to build them takes a minute."""
    shared = cache_dir / "operators"
    if operators() is not None and not shared.exists():
        cache_dir.mkdir(parents=True, exist_ok=True)
        shared.symlink_to(ModelConfig().cache_folder / "operators")


def make_backend(name: str) -> AttentionBackend:
    """The backend of that name, "reference" or "cpu"."""
    return ReferenceAttention() if name == "reference" else CpuAttention(need_operators())


def rounded_to_eight_bits(x: torch.Tensor) -> torch.Tensor:
    """Activations as layers of few bits round them, a scale per row and 32 inputs: to float64."""
    blocks = x.view(len(x), -1, 32)
    peaks = blocks.abs().amax(-1, keepdim=True)
    rounded = torch.where(peaks > 0, torch.round(blocks * (torch.tensor(127.0) / peaks)), 0.0)
    return (rounded.double() * (peaks / 127).double()).flatten(1)
