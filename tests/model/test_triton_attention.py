"""The Triton kernels against the reference, in Triton's interpreter."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from engine.model.attention import choice
from engine.model.attention.reference import ReferenceAttention
from engine.model.attention.tiles import SplitRules
from engine.model.input_batch import SequenceSlice
from engine.model.kv_cache import PagedKVCache
from engine.model.model_runner import ModelRunner
from tests.engines import load_tiny
from tests.model.attention_steps import (
    TREE,
    Shape,
    assert_agrees,
    long_stretches,
    make_step,
    mixed,
    tables,
    wish,
)

pytest.importorskip("triton", reason="triton is not installed; it comes for Linux on x86-64 alone")

from engine.model.attention import triton as backend_module
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
        (ODD, "all", WHOLE),
        (ODD, "sinks", SPLIT),
        (EQUAL, "softcap", WHOLE),
        (SHARED, "window 40", SPLIT),
    ],
)
def test_prompts_tokens_and_trees_side_by_side(shape: Shape, name: str, rules: SplitRules) -> None:
    step = make_step(mixed(), shape, torch.float32, CPU)
    assert_agrees(TritonAttention(rules), step, wish(name, shape[0], CPU))


@pytest.mark.parametrize(("name", "rules"), [("window 3", WHOLE), ("all", SPLIT)])
def test_more_tokens_than_a_tile_holds(name: str, rules: SplitRules) -> None:
    step = make_step(long_stretches(), SHARED, torch.float32, CPU)
    assert_agrees(TritonAttention(rules), step, wish(name, SHARED[0], CPU))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("name", "rules"), [("plain", WHOLE), ("all", SPLIT)])
def test_sixteen_bits(dtype: torch.dtype, name: str, rules: SplitRules) -> None:
    a, b = tables(2)
    slices = [SequenceSlice([0] * 5, 0, a), SequenceSlice([0], 75, b, TREE)]
    assert_agrees(TritonAttention(rules), make_step(slices, EVEN, dtype, CPU), wish(name, 4, CPU))


@pytest.mark.parametrize(
    ("dtype", "cache_dtype"),
    [
        (torch.float32, torch.bfloat16),
        (torch.bfloat16, torch.float32),
        (torch.float32, torch.float8_e4m3fn),
        (torch.float16, torch.float8_e4m3fn),
        (torch.bfloat16, torch.float8_e4m3fn),
    ],
)
@pytest.mark.parametrize(("name", "rules"), [("plain", WHOLE), ("all", SPLIT)])
def test_a_cache_of_another_type(
    dtype: torch.dtype, cache_dtype: torch.dtype, name: str, rules: SplitRules
) -> None:
    """With numbers that it can hold: the interpreter rounds in ways of its own."""
    a, b = tables(2)
    slices = [SequenceSlice([0] * 5, 0, a), SequenceSlice([0], 75, b, TREE)]
    step = make_step(slices, EVEN, dtype, CPU, cache_dtype)
    assert step.cache.keys[0].dtype == cache_dtype
    assert_agrees(TritonAttention(rules), step, wish(name, 4, CPU))


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")  # Of the interpreter.
def test_what_is_not_a_number_stays_in_its_own_rows() -> None:
    a, b = tables(2)
    slices = [SequenceSlice([0] * 6, 0, a), SequenceSlice([0] * 6, 0, b)]
    step, clean = (make_step(slices, EVEN, torch.float32, CPU) for _ in range(2))
    step.key[0, :, 3] = float("nan")
    step.value[0, :, 8] = float("inf")
    out, expected = (one.attend(TritonAttention(WHOLE), wish("plain", 4, CPU)) for one in (step, clean))
    assert torch.isnan(out[3:6]).all()
    assert not torch.isfinite(out[8:12]).any()
    assert torch.equal(out[:3], expected[:3])


@pytest.mark.parametrize("arch", ["gemma2", "gpt_oss"])
def test_logits_of_a_model_are_those_of_the_reference(arch: str) -> None:
    """A prompt in chunks and a tree; layers with a window and without, a softcap, sinks."""
    model = load_tiny(arch)
    [table] = tables(1)
    tokens = [(7 * token) % 250 for token in range(20)]
    passes = [
        SequenceSlice(tokens[:9], 0, table, rows=9),
        SequenceSlice(tokens[9:], 9, table, TREE, rows=1 + len(TREE)),
    ]
    logits = []
    for backend in (ReferenceAttention(), TritonAttention(SPLIT)):
        cache = PagedKVCache(model.layers, len(table), 4, torch.float32, CPU)
        runner = ModelRunner(model.module, cache, backend, model.vocab_size)
        logits.append(torch.cat([runner.forward(runner.build([piece])) for piece in passes]))
    torch.testing.assert_close(*logits, rtol=1e-4, atol=1e-4)


FAULTS = {
    "a token sees the one behind it": ("index[None, :] < seen[:, None]", "index[None, :] <= seen[:, None]"),
    "a window counts slots": ("tl.where(index < num_committed, index, position)", "index"),
    "older blocks are not rescaled": ("result * rescale[:, None] + weighted", "result + weighted"),
    "splits are not weighted": ("parts * weight[:, None]", "parts"),
    "a node sees the one before its ancestor": ("tl.maximum(node, 0)", "tl.maximum(node + 1, 0)"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_found(fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison would see it: with the kernels as they are it passes."""
    right, wrong = FAULTS[fault]
    source = Path(triton_kernels.__file__).read_text("utf-8")
    assert source.count(right) == 1
    faulty = tmp_path / "faulty_kernels.py"
    faulty.write_text(source.replace(right, wrong), "utf-8")
    spec = importlib.util.spec_from_file_location("faulty_kernels", faulty)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    tree = TREE if "window" in fault else TREE.truncated(4)  # Deep enough to leave the window, or small.
    step = make_step([SequenceSlice([0], 70, tables(1)[0], tree)], EVEN, torch.float32, CPU)
    rules = SPLIT if "split" in fault else WHOLE
    options = wish("window 3" if "window" in fault else "plain", 4, CPU)
    assert_agrees(TritonAttention(rules), step, options)
    monkeypatch.setattr(backend_module, "kernels", module)
    with pytest.raises(AssertionError):
        assert_agrees(TritonAttention(rules), step, options)


def test_it_is_chosen_on_cuda_where_triton_is(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Properties:
        multi_processor_count = 132

    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: Properties)
    assert isinstance(choice.choose_backend(None, torch.device("cuda", 1)), TritonAttention)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert isinstance(choice.choose_backend(None, torch.device("cuda", 1)), ReferenceAttention)
    assert isinstance(choice.choose_backend(None, CPU), ReferenceAttention)
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "pip install triton" in caplog.text


@pytest.mark.parametrize(("capability", "cache_type"), [("80", "bf16"), ("89", "fp8e4nv")])
def test_the_kernels_compile_for_a_gpu(capability: str, cache_type: str, tmp_path: Path) -> None:
    """To machine code, which needs no GPU; in a process whose Triton compiles, and finds nothing compiled.

    Also over a cache of eight bits.
    """
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path)
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-m", "tests.model.compile_kernels", capability, cache_type],
        cwd=root,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["attend", "combine", "store"]
