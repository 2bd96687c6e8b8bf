"""Whether the kernels, and a model that runs on them, say what the reference says."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import product

import torch
from transformers import PreTrainedModel

from engine.model.attention.interface import AttentionBackend
from engine.model.attention.reference import ReferenceAttention
from engine.model.attention.tiles import SplitRules
from engine.model.attention.triton import TritonAttention
from engine.model.cache_type import EIGHT_BITS_CAPABILITY
from engine.model.input_batch import SequenceSlice
from engine.model.kv_cache import PagedKVCache, narrowed
from engine.model.loader import wrap_model
from engine.model.model_runner import ModelRunner
from engine.model.recording import CudaRecorder, Recording, Results
from tests.model.attention_steps import (
    TREE,
    WISHES,
    Shape,
    assert_agrees,
    long_stretches,
    make_cache,
    make_step,
    mixed,
    tables,
    wish,
)
from tests.tiny import tiny_model

WHOLE = SplitRules(wanted_programs=1, min_slots=16)
SPLIT = SplitRules(wanted_programs=1000, min_slots=16)
SHAPES: tuple[Shape, ...] = (
    *((32, 8, 128, 128), (16, 16, 64, 64), (14, 2, 64, 64), (12, 2, 96, 80), (8, 1, 256, 256)),
    (71, 1, 64, 64),
)
LOGITS_TOLERANCE = 1e-3
"""Relative to the largest logit, as in the trial at every start."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One comparison.

    Attributes:
        name: What was compared.
        fault: How it differs; empty where it agrees.
    """

    name: str
    fault: str


def deep() -> list[SequenceSlice]:
    """Contexts of thousands of tokens: a single token, a tree, a chunk of a prompt."""
    a, b, c = tables(3, 1300)
    return [
        SequenceSlice([0], 5000, a),
        SequenceSlice([0], 3000, b, TREE),
        SequenceSlice([0] * 300, 2000, c),
    ]


def kernel_findings(device: torch.device, *, tiny: bool) -> list[Finding]:
    """The kernels against the reference over shapes, types, wishes, batches and ways to split."""
    if tiny:
        return [_kernel_finding("mixed", mixed(), (4, 2, 16, 16), torch.float32, "all", device)]
    batches = {"mixed": mixed(), "long": long_stretches(), "deep": deep()}
    # Each kind of kernel takes a second or more to compile, most of all in float32.
    cases = [
        *product(batches, SHAPES[:1], (torch.float16, torch.bfloat16), WISHES),
        *product(batches, SHAPES[:1], (torch.float32,), ("plain", "all")),
        *product(("mixed", "deep"), SHAPES[1:], (torch.bfloat16,), ("plain", "all")),
    ]
    return [
        *(
            _kernel_finding(batch, batches[batch], shape, dtype, name, device)
            for batch, shape, dtype, name in cases
        ),
        *(
            finding
            for cache_dtype in _other_cache_types(device)
            for finding in (
                _kernel_finding("mixed", mixed(), SHAPES[0], torch.bfloat16, "all", device, cache_dtype),
                _rounding_finding(cache_dtype, device),
            )
        ),
    ]


def _other_cache_types(device: torch.device) -> tuple[torch.dtype, ...]:
    """Besides the queries', bfloat16."""
    has_eight_bits = (
        device.type == "cuda" and torch.cuda.get_device_capability(device) >= EIGHT_BITS_CAPABILITY
    )
    return (torch.float16, torch.float8_e4m3fn) if has_eight_bits else (torch.float16,)


def _rounding_finding(cache_dtype: torch.dtype, device: torch.device) -> Finding:
    """Whether numbers between those of a cache's type, and beyond them, are written as the reference does."""
    [table] = tables(1)
    step = make_step([SequenceSlice([0] * 64, 0, table)], SHAPES[0], torch.float32, device)
    cache = make_cache(step.cache.keys[0], step.cache.values[0], cache_dtype)
    # Some are small, some too large for a type of eight bits.
    scales = 4.0 ** torch.arange(-7, 9, device=device).repeat(4)[:, None]
    step = replace(step, cache=cache, key=step.key * scales, value=step.value * scales)
    step.attend(TritonAttention(WHOLE), wish("plain", SHAPES[0][0], device))
    faults = []
    for name, new, kept in (("keys", step.key, cache.keys[0]), ("values", step.value, cache.values[0])):
        rounded = narrowed(new[0].transpose(0, 1), cache_dtype).float()
        wrong = kept[step.batch.slots].float() != rounded
        if bool(wrong.any()):
            faults.append(f"{int(wrong.sum())} of {wrong.numel()} {name} are rounded otherwise")
    return Finding(f"rounding to {cache_dtype}", "; ".join(faults))


def _kernel_finding(
    batch: str,
    slices: Sequence[SequenceSlice],
    shape: Shape,
    dtype: torch.dtype,
    name: str,
    device: torch.device,
    cache_dtype: torch.dtype | None = None,
) -> Finding:
    faults = []
    for rules in (WHOLE, SPLIT):
        step = make_step(slices, shape, dtype, device, cache_dtype)
        try:
            assert_agrees(TritonAttention(rules), step, wish(name, shape[0], device))
        except AssertionError as error:
            faults.append(f"{rules}: {error}")
    return Finding(f"{batch}, {shape}, {dtype}, cache of {cache_dtype or dtype}, {name}", "; ".join(faults))


def logits_findings(device: torch.device, *, tiny: bool) -> list[Finding]:
    """Small random models in float32 on the device and its kernels against the CPU and the reference.

    On a GPU also when their passes are replayed from graphs, models with experts apart.
    """
    archs = ("llama",) if tiny else ("llama", "gemma2", "gpt_oss", "qwen3", "gpt_neox")
    findings = []
    for arch in archs:
        expected = _logits(arch, torch.device("cpu"), ReferenceAttention())
        got = _logits(arch, device, TritonAttention(SPLIT))
        error = float((got - expected).abs().max() / expected.abs().max())
        fault = "" if error <= LOGITS_TOLERANCE else f"{error:.2g} of the largest logit"
        findings.append(Finding(f"logits of {arch}", fault))
        if device.type == "cuda" and arch != "gpt_oss":
            findings.append(_replayed_finding(arch, device, expected))
    return findings


def _replayed_finding(arch: str, device: torch.device, expected: torch.Tensor) -> Finding:
    recorder = CountingRecorder(device)
    got = _logits(arch, device, TritonAttention(SPLIT, recorder), repeats=3)
    error = float((got - expected).abs().max() / expected.abs().max())
    fault = "" if error <= LOGITS_TOLERANCE else f"{error:.2g} of the largest logit"
    # Each of the two passes is tried once and then replayed twice.
    if recorder.num_replays != 6:
        fault = f"{recorder.num_replays} replays instead of 6; the log says why"
    return Finding(f"logits of {arch}, replayed", fault)


class CountingRecorder:
    """CUDA graphs, counted.

    Attributes:
        num_replays: So far.
    """

    def __init__(self, device: torch.device) -> None:
        self.num_replays = 0
        self._recorder = CudaRecorder(device)

    def record(self, call: Callable[[], Results]) -> Recording:
        return _Counted(self._recorder.record(call), self)


@dataclass(frozen=True, slots=True)
class _Counted:
    recording: Recording
    recorder: CountingRecorder

    def replay(self) -> Results:
        self.recorder.num_replays += 1
        return self.recording.replay()


def _logits(arch: str, device: torch.device, backend: AttentionBackend, repeats: int = 1) -> torch.Tensor:
    """Rows of a prompt in two chunks and of a tree, float32 on the CPU; the last of some repetitions."""
    return last_logits(tiny_model(arch).to(device), backend, repeats)


def last_logits(
    module: PreTrainedModel,
    backend: AttentionBackend,
    repeats: int = 1,
    cache_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """The same of a model where it is, over a cache of the model's type or another one."""
    model = wrap_model(module, None, name="tiny")
    [table] = tables(1)
    cache = PagedKVCache(model.layers, len(table), 4, cache_dtype or model.dtype, model.device)
    runner = ModelRunner(model.module, cache, backend, model.vocab_size)
    tokens = [(7 * token) % 250 for token in range(20)]
    passes = (
        SequenceSlice(tokens[:9], 0, table, rows=9),
        SequenceSlice(tokens[9:], 9, table, TREE, rows=1 + len(TREE)),
    )
    for _ in range(repeats):
        rows = [runner.forward(runner.build([piece])) for piece in passes]
    return torch.cat(rows).cpu()
