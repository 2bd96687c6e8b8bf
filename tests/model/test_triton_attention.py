"""The Triton kernels against the reference, in Triton's interpreter."""

import importlib.util
from pathlib import Path

import pytest
import torch

from engine.model.attention.tiles import SplitRules
from tests.model.attention_steps import (
    TREE,
    Shape,
    Step,
    assert_agrees,
    long_stretches,
    make_step,
    mixed,
    tables,
    wish,
)

pytest.importorskip("triton", reason="triton is not installed; it comes for Linux on x86-64 alone")

from engine.model.attention import triton_kernels
from engine.model.attention.triton import TritonAttention

CPU = torch.device("cpu")
WHOLE = SplitRules(wanted_programs=1, min_slots=16)
SPLIT = SplitRules(wanted_programs=1000, min_slots=16)
EVEN, ODD, EQUAL, SHARED = (4, 2, 16, 16), (6, 2, 24, 20), (2, 2, 32, 16), (5, 1, 11, 17)


@pytest.mark.parametrize(
    ("shape", "name", "rules"),
    [
        (EVEN, "plain", WHOLE),
        (EVEN, "window 3", SPLIT),
        (EVEN, "all", WHOLE),
        (ODD, "plain", SPLIT),
        (ODD, "window 3", WHOLE),
        (ODD, "all", SPLIT),
        (EQUAL, "softcap", WHOLE),
        (EQUAL, "sinks", SPLIT),
        (SHARED, "window 40", SPLIT),
        (SHARED, "sinks", WHOLE),
    ],
)
def test_prompts_tokens_and_trees_side_by_side(shape: Shape, name: str, rules: SplitRules) -> None:
    step = make_step(mixed(), shape, torch.float32, CPU)
    assert_agrees(TritonAttention(rules), step, wish(name, shape[0], CPU))
