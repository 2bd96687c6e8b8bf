"""The Triton kernels against the reference, in Triton's interpreter."""

import importlib.util
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from engine.model.attention import choice
from engine.model.attention.reference import ReferenceAttention
from engine.model.attention.tiles import SplitRules
from engine.model.input_batch import InputBatch, SequenceSlice
from engine.model.kv_cache import LayerShape, PagedKVCache
from engine.model.model_runner import ModelRunner
from tests.engines import load_tiny
from tests.model.attention_steps import (
    TOLERANCES,
    TREE,
    Shape,
    assert_agrees,
    long_stretches,
    make_cache,
    make_step,
    mixed,
    tables,
    wish,
)

pytest.importorskip("triton", reason="triton is not installed; it comes for Linux on x86-64 alone")

from engine.model.attention import triton as backend_module
from engine.model.attention import triton_kernels, triton_rounding
from engine.model.attention.triton import TritonAttention, TritonPlan

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
    """With numbers that it can hold: the interpreter rounds to bfloat16 in a way of its own."""
    a, b = tables(2)
    slices = [SequenceSlice([0] * 5, 0, a), SequenceSlice([0], 75, b, TREE)]
    step = make_step(slices, EVEN, dtype, CPU, cache_dtype)
    assert step.cache.keys[0].dtype == cache_dtype
    assert_agrees(TritonAttention(rules), step, wish(name, 4, CPU))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("name", "rules"), [("plain", WHOLE), ("all", SPLIT)])
def test_any_numbers_are_rounded_to_eight_bits(dtype: torch.dtype, name: str, rules: SplitRules) -> None:
    """What comes out is what rounded keys and values give, those that are new in the pass included."""
    a, b = tables(2)
    slices = [SequenceSlice([0] * 5, 0, a), SequenceSlice([0], 75, b, TREE)]
    step = make_step(slices, EVEN, dtype, CPU)
    step = replace(step, cache=make_cache(step.cache.keys[0], step.cache.values[0], torch.float8_e4m3fn))
    rounded = [tensor.to(torch.float8_e4m3fn).to(dtype) for tensor in (step.key, step.value)]
    assert not torch.equal(step.key, rounded[0])
    expected = replace(step.widened(), key=rounded[0].float(), value=rounded[1].float())
    options = wish(name, EVEN[0], CPU)
    got = step.attend(TritonAttention(rules), options).float()
    tolerance = TOLERANCES[dtype]
    torch.testing.assert_close(
        got, expected.attend(ReferenceAttention(), options), rtol=tolerance, atol=tolerance
    )
    written = step.batch.slots
    assert torch.equal(step.cache.keys[0][written].float(), expected.cache.keys[0][written])
    assert torch.equal(step.cache.values[0][written].float(), expected.cache.values[0][written])


def numbers_of_all_sizes(dtype: torch.dtype) -> torch.Tensor:
    """[2, 16, 128]: among them those halfway between two of eight bits, and those that none has room for."""
    generator = torch.Generator().manual_seed(0)
    small = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    halves = (small[:-1] + small[1:]) / 2
    beyond = torch.tensor([464.0, 465.0, 480.0, 6e4, 1e30, float("inf"), float("nan"), 1e-30])
    known = torch.cat([small, halves, halves * 1.001, halves * 0.999, beyond])
    random = torch.randn(2048 - len(known), generator=generator)
    random *= 2.0 ** torch.randint(-12, 10, random.shape, generator=generator)
    numbers = torch.cat([known, random])
    return torch.stack([numbers, -numbers]).view(2, 16, 128).to(dtype)


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")  # Of the interpreter.
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("cache_dtype", [torch.float16, torch.float8_e4m3fn])
def test_what_is_written_is_rounded_as_by_the_reference(dtype: torch.dtype, cache_dtype: torch.dtype) -> None:
    """Bit by bit, and what is not a number stays none."""
    assert_rounds(numbers_of_all_sizes(dtype), cache_dtype)


def assert_rounds(numbers: torch.Tensor, cache_dtype: torch.dtype) -> None:
    """Two tokens' keys, which are each other's values."""
    ours, theirs = (PagedKVCache([LayerShape(16, 128, 128)], 1, 2, cache_dtype, CPU) for _ in range(2))
    batch = InputBatch.build([SequenceSlice([0, 0], 0, [0])], 2, CPU)
    keys, values = numbers, numbers.flip(0)
    theirs.write(0, batch.slots, keys, values)
    plan = TritonAttention(WHOLE).plan(batch, ours)
    assert isinstance(plan, TritonPlan)
    plan._store(keys.transpose(0, 1), values.transpose(0, 1), ours.keys[0], ours.values[0])
    for mine, other in ((ours.keys[0], theirs.keys[0]), (ours.values[0], theirs.values[0])):
        assert torch.equal(mine.float().isnan(), other.float().isnan())
        assert torch.equal(mine.float().nan_to_num(9e9), other.float().nan_to_num(9e9))


ROUNDING_FAULTS = {
    "halves go up": ("((size >> 20) & 1)", "1"),
    "what is cut off is lost": ("size + 0x7FFFF + ((size >> 20) & 1)", "size"),
    "the smallest numbers have exponents": ("size < 0x3C800000", "size < 0x3C000000"),
    "there is no limit": ('(new > LIMIT) & (new < float("inf"))', "new > 1e38"),
    "an infinity is a number": ("size >= 0x7F800000", "size > 0x7F800000"),
    "there is no sign": ("number | ((bits >> 24) & 0x80)", "number"),
}


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
@pytest.mark.parametrize("fault", ROUNDING_FAULTS)
def test_a_planted_fault_of_rounding_is_found(
    fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    faulty = load_faulty(triton_rounding, *ROUNDING_FAULTS[fault], tmp_path)
    monkeypatch.setattr(triton_kernels, "narrowed_numbers", faulty.narrowed_numbers)
    with pytest.raises(AssertionError):
        assert_rounds(numbers_of_all_sizes(torch.float32), torch.float8_e4m3fn)


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
    module = load_faulty(triton_kernels, *FAULTS[fault], tmp_path)
    tree = TREE if "window" in fault else TREE.truncated(4)  # Deep enough to leave the window, or small.
    step = make_step([SequenceSlice([0], 70, tables(1)[0], tree)], EVEN, torch.float32, CPU)
    rules = SPLIT if "split" in fault else WHOLE
    options = wish("window 3" if "window" in fault else "plain", 4, CPU)
    assert_agrees(TritonAttention(rules), step, options)
    monkeypatch.setattr(backend_module, "kernels", module)
    with pytest.raises(AssertionError):
        assert_agrees(TritonAttention(rules), step, options)


def load_faulty(module: ModuleType, right: str, wrong: str, folder: Path) -> Any:
    """A module of kernels with something else in one place."""
    assert module.__file__ is not None
    source = Path(module.__file__).read_text("utf-8")
    assert source.count(right) == 1
    file = folder / "faulty_kernels.py"
    file.write_text(source.replace(right, wrong), "utf-8")
    spec = importlib.util.spec_from_file_location("faulty_kernels", file)
    assert spec is not None
    assert spec.loader is not None
    faulty = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(faulty)
    return faulty


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


def test_the_kernels_compile_for_gpus(tmp_path: Path) -> None:
    """To machine code, which needs no GPU; in a process whose Triton compiles, and finds nothing compiled.

    Also over a cache of eight bits.
    """
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path)
    root = Path(__file__).parents[2]
    cases = ["80:bf16", "89:fp8e4nv"]
    done = subprocess.run(
        [sys.executable, "-m", "tests.model.compile_kernels", *cases],
        cwd=root,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    kernels = ("attend", "combine", "store")
    assert done.stdout.splitlines() == [f"{case} {kernel}" for case in cases for kernel in kernels]
