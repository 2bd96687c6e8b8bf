"""Recorded passes against the same passes launched anew; a tape stands in for CUDA graphs."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import pytest
import torch

from engine.model import static_batch
from engine.model.attention.tiles import EMPTY_TILE, SplitRules, TileLimits, TileShape, TileTable, cut
from engine.model.hidden_states import HiddenSelection
from engine.model.input_batch import InputBatch, SequenceSlice
from engine.model.kv_cache import PagedKVCache
from engine.model.model_runner import ModelRunner
from engine.model.recording import Recorder, Recording, Results
from engine.model.static_batch import NOWHERE, Bucket, StaticBatch
from tests.engines import load_tiny
from tests.model.attention_steps import BLOCK_SIZE, TREE, long_stretches, mixed, tables
from tests.model.tape import TapeRecorder
from tests.model.test_tiles import random_slices

pytest.importorskip("triton", reason="triton is not installed; it comes for Linux on x86-64 alone")

from engine.model.attention import triton as backend_module
from engine.model.attention import triton_kernels, triton_tables
from engine.model.attention.triton import TritonAttention

CPU = torch.device("cpu")
RULES = SplitRules(wanted_programs=3, min_slots=8)
NUM_BLOCKS = 3 * 24
A, B, C = tables(3)
SMALL = TREE.truncated(3)


def tokens(count: int, first: int = 3) -> list[int]:
    return [(7 * index + first) % 250 for index in range(count)]


PROMPTS = [SequenceSlice(tokens(5), 0, A), SequenceSlice(tokens(3), 0, B), SequenceSlice(tokens(12), 0, C)]
FIRST = [
    SequenceSlice([5], 5, A, TREE, rows=9),
    SequenceSlice([6], 3, B),
    SequenceSlice(tokens(4), 12, C, rows=4),
]
PASSES = [
    PROMPTS,  # Larger than any bucket of these tests.
    FIRST,  # A bucket of 16 tokens, recorded: a tree, a token, a chunk. Then replayed with others elsewhere.
    [
        SequenceSlice([7], 6, A),
        SequenceSlice([8], 4, B, SMALL, rows=4),
        SequenceSlice(tokens(5, 9), 16, C, rows=2),
    ],
    # A bucket of 4 tokens: three requests, then in another order.
    [SequenceSlice([9], 21, C), SequenceSlice([1], 7, A), SequenceSlice([2], 5, B)],
    [SequenceSlice([3], 6, B), SequenceSlice([4], 22, C), SequenceSlice([5], 8, A)],
    # The first again: a chunk without rows, and nodes that a draft model adds to a tree.
    [
        SequenceSlice([6], 9, A, TREE, rows=0),
        SequenceSlice(tokens(3, 4), 7, B, rows=0),
        SequenceSlice([7], 23, C, rows=1),
    ],
    [
        SequenceSlice([], 10, A, TREE, rows=3, num_cached_nodes=5),
        SequenceSlice(tokens(4, 2), 10, B, rows=1),
        SequenceSlice([8], 24, C, SMALL, rows=4),
    ],
]
LAYERS = {"llama": 1, "gemma2": 2}
"""One with a window, and one without."""


@pytest.fixture(autouse=True)
def small_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(static_batch, "_ROWS", (1, 2, 4, 8, 16))


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> TapeRecorder:
    recorder = TapeRecorder(triton_kernels)
    monkeypatch.setattr(backend_module, "kernels", recorder)
    return recorder


@dataclass(frozen=True)
class Seen:
    """What a pass that is not recorded gives, and the keys and values behind it."""

    logits: torch.Tensor
    cache: tuple[torch.Tensor, ...]


def runner_of(arch: str, recorder: Recorder | None) -> ModelRunner:
    model = load_tiny(arch, num_hidden_layers=LAYERS[arch], num_attention_heads=2, num_key_value_heads=1)
    cache = PagedKVCache(model.layers, NUM_BLOCKS, BLOCK_SIZE, torch.float32, CPU)
    for tensor in (*cache.keys, *cache.values):
        tensor.zero_()
    return ModelRunner(model.module, cache, TritonAttention(RULES, recorder), model.vocab_size)


def passes_of(arch: str) -> list[list[SequenceSlice]]:
    return PASSES if arch == "llama" else [*PASSES[:3], PASSES[-1]]


@cache
def plain(arch: str) -> list[Seen]:
    """All passes one after the other, launched anew."""
    runner = runner_of(arch, None)
    seen = []
    for slices in passes_of(arch):
        logits = runner.forward(runner.build(slices))
        seen.append(Seen(logits, tuple(map(torch.clone, (*runner.cache.keys, *runner.cache.values)))))
    return seen


def assert_agrees(runner: ModelRunner, arch: str, passes: range) -> None:
    """Pass by pass the same results, and the same keys and values in the end."""
    for index in passes:
        got = runner.forward(runner.build(passes_of(arch)[index]))
        assert_close(got, plain(arch)[index].logits, f"pass {index} differs")
    for ours, theirs in zip(
        (*runner.cache.keys, *runner.cache.values), plain(arch)[passes[-1]].cache, strict=True
    ):
        assert_close(ours, theirs)


def assert_close(got: torch.Tensor, expected: torch.Tensor, text: str | None = None) -> None:
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4, msg=text)


@pytest.mark.parametrize("arch", LAYERS)
def test_replayed_passes_are_what_passes_are(arch: str, recorder: TapeRecorder) -> None:
    """Chains, trees, growing trees and chunks of several requests, and prompts too large for a bucket."""
    assert_replays(arch, recorder)


def assert_replays(arch: str, recorder: TapeRecorder) -> None:
    """In each bucket the trial, and every pass after it."""
    passes = range(len(passes_of(arch)))
    assert_agrees(runner_of(arch, recorder), arch, passes)
    assert recorder.num_replays == len(passes) - 1


def test_a_recording_gives_hidden_states_too(recorder: TapeRecorder) -> None:
    anew, recorded = runner_of("llama", None), runner_of("llama", recorder)
    taps = {runner: runner.tap(HiddenSelection((0, 1), last=True)) for runner in (anew, recorded)}
    for index, slices in enumerate(PASSES[:3]):
        batch = recorded.build(slices)
        expected, got = (runner.forward_tapped(batch, taps[runner]) for runner in (anew, recorded))
        assert len(got.features) == len(batch.input_ids)
        assert_close(got.features, expected.features, f"pass {index} differs")
        assert_close(got.logits, plain("llama")[index].logits, f"pass {index} differs")
    # Passes that want no hidden states are others.
    assert_agrees(recorded, "llama", range(3, 5))
    assert recorder.num_replays == 4


def test_results_stay_when_the_next_pass_comes(recorder: TapeRecorder) -> None:
    recorded = runner_of("llama", recorder)
    assert_agrees(recorded, "llama", range(2))
    kept = recorded.forward(recorded.build(PASSES[2]))
    copy = kept.clone()
    recorded.forward(recorded.build(FIRST))
    assert torch.equal(kept, copy)


def stale_tables(tables: triton_tables.BucketTables, batch: InputBatch) -> None:
    """The tables stay those of the batch that was recorded."""
    if tables._batch is None:
        tables._batch = batch


def stale_tiles(table: TileTable, first: int, end: int, tokens_per_tile: int, limits: TileLimits) -> None:
    """The tiles of padding are those of the first token."""
    table.tiles.extend([(0, 1, 0, 0, 1, 1, -1)] * (limits.num_tiles - len(table.tiles)))
    table.merges.extend([(0, 0, 0, 0)] * (limits.num_merges - len(table.merges)))


def stale_columns(static: StaticBatch, batch: InputBatch) -> None:
    """Padding tokens are what the last batch had in their place."""
    of_batch = (batch.input_ids, batch.positions, batch.slots, batch.visible, batch.ancestors)
    static.logits_rows[:] = 0
    for column, values in zip(static.columns, (*of_batch, batch.logits_rows), strict=True):
        column[: len(values)] = values
    for parts, target in (
        (batch.context_slots, static.context_slots),
        (batch.context_positions, static.context_positions),
    ):
        target[: sum(map(len, parts))] = torch.cat(parts)


def stale_positions(static: StaticBatch, batch: InputBatch) -> None:
    fill(static, batch)
    static.context_positions[:] = 0


fill = StaticBatch.fill
FAULTS = {
    "tables": (triton_tables.BucketTables, "fill", stale_tables),
    "tiles of padding": (TileTable, "pad", stale_tiles),
    "columns": (StaticBatch, "fill", stale_columns),
    "positions of the context": (StaticBatch, "fill", stale_positions),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_what_is_left_of_another_batch_is_found(
    fault: str, recorder: TapeRecorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The comparison would see it."""
    owner, name, wrong = FAULTS[fault]
    monkeypatch.setattr(owner, name, wrong)
    arch = "gemma2" if "positions" in fault else "llama"
    with pytest.raises(AssertionError):
        assert_replays(arch, recorder)


class Wrong:
    """Records, and says something else when it replays."""

    def __init__(self, error: Exception | None = None) -> None:
        self.num_recorded = 0
        self._error = error

    def record(self, call: Callable[[], Results]) -> Recording:
        self.num_recorded += 1
        if self._error is not None:
            raise self._error
        self._results = call()
        return self

    def replay(self) -> Results:
        return tuple(torch.full_like(result, float("nan")) for result in self._results)


@pytest.mark.parametrize("error", [None, RuntimeError("operation not permitted when stream is capturing")])
def test_what_does_not_replay_is_launched_as_before(
    error: Exception | None, caplog: pytest.LogCaptureFixture
) -> None:
    recorder = Wrong(error)
    assert_agrees(runner_of("llama", recorder), "llama", range(3))
    assert recorder.num_recorded == 1
    [record] = caplog.records
    assert record.levelname == "WARNING"
    assert "Bucket(num_tokens=16, num_sequences=4)" in caplog.text
    assert ("stream is capturing" if error else "differed by [nan]") in caplog.text


def test_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    def of(*lengths: int) -> Bucket | None:
        slices = [SequenceSlice([0] * length, 0, range(300)) for length in lengths]
        return Bucket.of(InputBatch.build(slices, BLOCK_SIZE, CPU))

    monkeypatch.undo()
    assert of(1) == Bucket(1, 1)
    assert of(5) == Bucket(8, 1)
    assert of(1, 1, 1) == Bucket(4, 4)
    assert of(9, 1, 4) == Bucket(16, 4)
    assert of(128) == Bucket(128, 1)
    assert of(129) is None
    assert of(*[4] * 32) == Bucket(128, 32)
    assert of(*[1] * 33) is None


def test_contexts_beyond_the_room_belong_to_no_bucket() -> None:
    static = StaticBatch.allocate(40, CPU)
    for start, fits in ((38, True), (39, False)):
        batch = InputBatch.build([SequenceSlice([0], start, A), SequenceSlice([0], 0, B)], BLOCK_SIZE, CPU)
        assert static.holds(batch) is fits


def test_padding_sees_and_writes_nothing() -> None:
    static = StaticBatch.allocate(100, CPU).cut(Bucket(8, 2))
    static.columns[:] = 77
    batch = InputBatch.build([SequenceSlice([4, 5], 1, A), SequenceSlice([6], 0, B)], BLOCK_SIZE, CPU)
    static.fill(batch)
    assert static.input_ids.tolist() == [4, 5, 6, 0, 0, 0, 0, 0]
    assert static.slots.tolist() == [*batch.slots.tolist(), *[NOWHERE] * 5]
    assert static.visible.tolist() == [2, 3, 1, 0, 0, 0, 0, 0]
    assert static.ancestors.tolist() == [0] * 8
    assert static.logits_rows.tolist() == [1, 2, 0, 0, 0, 0, 0, 0]
    assert static.context_slots[:4].tolist() == torch.cat(batch.context_slots).tolist()


@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("wanted_programs", [1, 40, 1000])
@pytest.mark.parametrize("tokens_per_tile", [1, 4, 16])
def test_no_batch_exceeds_the_limits_of_its_bucket(
    tokens_per_tile: int, wanted_programs: int, window: int | None
) -> None:
    shape, rules = TileShape(2, tokens_per_tile, window), SplitRules(wanted_programs, 16)
    for slices in (mixed(), long_stretches(), *map(random_slices, range(20))):
        batch = InputBatch.build(slices, BLOCK_SIZE, CPU)
        size = len(batch.input_ids) + 3
        limits = TileLimits.of(size, len(slices), shape, rules)
        table = cut(batch.spans, shape, rules)
        most = max((count for *_, count in table.merges), default=1)
        assert most <= limits.num_splits
        assert table.num_partials <= limits.num_tiles
        table.pad(size - 3, size, tokens_per_tile, limits)
        assert (len(table.tiles), len(table.merges)) == (limits.num_tiles, limits.num_merges)
        covered = {token for first, end, *_ in table.tiles for token in range(first, end)}
        assert covered == set(range(size))
        assert EMPTY_TILE[:2] == (0, 0)
