"""A head's recorded passes against the same passes launched anew; a tape stands in for CUDA graphs."""

from collections.abc import Sequence

import pytest
import torch

from engine.model import static_batch
from engine.model.attention.interface import AttentionPlan
from engine.model.attention.tiles import SplitRules
from engine.model.input_batch import SequenceSlice
from engine.model.kv_cache import LayerShape, PagedKVCache
from engine.model.recording import Recorder, Results
from engine.model.static_batch import StaticBatch
from engine.speculation.head_runner import HeadOutput, HeadRunner
from engine.speculation.heads.config import EagleFamily
from engine.speculation.target_ends import TargetEnds
from engine.token_tree import TokenTree
from tests.heads import HIDDEN, eagle_config, random_eagle
from tests.model.attention_steps import BLOCK_SIZE, tables
from tests.model.tape import TapeRecorder
from tests.tiny import VOCAB_SIZE, tiny_model

pytest.importorskip("triton", reason="triton is not installed; it comes for Linux on x86-64 alone")

from engine.model.attention import triton as backend_module
from engine.model.attention import triton_kernels
from engine.model.attention.triton import TritonAttention

RULES = SplitRules(wanted_programs=1, min_slots=16)
A, B = tables(2, 6)
TREE = TokenTree((11, 12, 13), (0, 0, 1))
# What is computed of the two requests' texts, then the levels of a tree each: of one, and of both.
PASSES: tuple[Sequence[SequenceSlice], ...] = (
    [SequenceSlice([5, 6, 7, 8, 9, 10], 1, A)],  # Larger than any bucket of these tests.
    [SequenceSlice([4, 3], 7, A), SequenceSlice([9, 8], 1, B)],  # A bucket of four tokens, recorded.
    [SequenceSlice([], 9, A, TREE.truncated(2), rows=2), SequenceSlice([], 3, B, TREE.truncated(1))],
    [SequenceSlice([], 9, A, TREE, num_cached_nodes=2), SequenceSlice([6, 5], 3, B, rows=0)],
    [SequenceSlice([1], 9, A)],
    [SequenceSlice([2], 5, B)],
)


def runner_of(family: EagleFamily, recorder: Recorder | None) -> HeadRunner:
    config = eagle_config(family, num_heads=2, num_kv_heads=1)
    cache = PagedKVCache([LayerShape(1, 8, 8)], 12, BLOCK_SIZE, torch.float32, torch.device("cpu"))
    for tensor in (*cache.keys, *cache.values):
        tensor.zero_()
    ends = TargetEnds(tiny_model(), VOCAB_SIZE)
    return HeadRunner(random_eagle(config), cache, TritonAttention(RULES, recorder), ends)


def outputs(runner: HeadRunner) -> list[HeadOutput]:
    """Of all passes, each fed with numbers of its own."""
    generator = torch.Generator().manual_seed(2)
    given = []
    for slices in PASSES:
        count = sum(map(len, slices))
        given.append(runner.extend(slices, torch.randn(count, HIDDEN, generator=generator)))
    return given


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> TapeRecorder:
    monkeypatch.setattr(static_batch, "_ROWS", (1, 2, 4))
    recorder = TapeRecorder(triton_kernels)
    monkeypatch.setattr(backend_module, "kernels", recorder)
    return recorder


@torch.inference_mode()
def assert_replays(family: EagleFamily, recorder: TapeRecorder) -> None:
    plain, recorded = (runner_of(family, each) for each in (None, recorder))
    for index, (expected, got) in enumerate(zip(outputs(plain), outputs(recorded), strict=True)):
        for name in ("logits", "carried"):
            ours, theirs = getattr(got, name), getattr(expected, name)
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4, msg=f"{name} of pass {index}")
    torch.testing.assert_close(recorded.cache.keys, plain.cache.keys, rtol=1e-4, atol=1e-4)
    # Two buckets are tried once each; three passes follow.
    assert (len(recorder.tapes), recorder.num_replays) == (2, 5)


@pytest.mark.parametrize("family", ["eagle", "eagle3"])
def test_replayed_passes_are_what_passes_are(family: EagleFamily, recorder: TapeRecorder) -> None:
    """Committed tokens of several requests, levels of their trees, and passes that nobody wants rows of."""
    assert_replays(family, recorder)


def test_features_of_another_pass_are_found(recorder: TapeRecorder, monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison would see recorded passes that read what the first one was given."""
    kept: dict[int, torch.Tensor] = {}

    def stale(self: HeadRunner, batch: StaticBatch, plan: AttentionPlan) -> Results:
        hidden = self._hidden[: len(batch.input_ids)]
        first = kept[len(hidden)] if len(hidden) in kept else kept.setdefault(len(hidden), hidden.clone())
        output = self._output(batch, self._forward(batch, plan, first))
        return output.logits, output.carried

    monkeypatch.setattr(HeadRunner, "_forward_kept", stale)
    with pytest.raises(AssertionError, match="of pass 2"):
        assert_replays("eagle3", recorder)
