"""Draws for a device that it takes long to hear from, launched anew and replayed, against plain ones."""

import random
from itertools import chain
from typing import Any

import pytest
import torch

from engine.model import recordings
from engine.model.row_graphs import RowGraphs
from engine.sampling.device_rows import DeviceRows
from engine.sampling.logits import process_logits
from engine.sampling.noise import NoiseKey, Stream
from engine.sampling.row_group import RowGroup
from engine.sampling_params import Acceptance, SamplingParams, SpeculationParams
from engine.speculation import factory
from engine.speculation.draft_ids import DraftIds
from engine.speculation.drawing import Child, RowWish, draw_children
from engine.speculation.growing import DRAWING_LIMITS, TreeGrower
from engine.token_tree import Proposal
from tests.engines import build_llm
from tests.model.tape import TapeRecorder
from tests.sampling.waits import waits_in

SIZE = 50
IDS = DraftIds(torch.randperm(2 * SIZE, generator=torch.Generator().manual_seed(1))[:SIZE], 2 * SIZE)
OTHER_IDS = DraftIds(IDS.to_target.flip(0), IDS.vocab_size)
PROPOSALS = (Proposal.DETERMINISTIC, Proposal.COUPLED, Proposal.SAMPLED_DISTINCT)
PARAMS = {
    "greedy": SamplingParams(temperature=0.0, max_tokens=24),
    "coupled": SamplingParams(temperature=0.8, top_p=0.9, seed=4, max_tokens=24),
    "rejection": SamplingParams(
        temperature=0.8, seed=4, max_tokens=24, speculation=SpeculationParams(acceptance=Acceptance.REJECTION)
    ),
}


def wish(draw: random.Random) -> RowWish:
    proposal = draw.choice(PROPOSALS)
    stream = Stream.TARGET if proposal is Proposal.COUPLED else Stream.DRAFT
    key = None if proposal is Proposal.DETERMINISTIC else NoiseKey(draw.randrange(99), 0, 7, stream)
    return RowWish(proposal, draw.choice([1, 3]), key, draw.random() < 0.5)


def assert_alike(far: DeviceRows, wishes: list[RowWish], ids: DraftIds | None, seed: int) -> None:
    rows = torch.randn(len(wishes), SIZE, generator=torch.Generator().manual_seed(seed)).log_softmax(dim=-1)
    rows[:, seed % SIZE :: 2] = -torch.inf
    expected, got = draw_children(rows, wishes, None, ids), draw_children(rows, wishes, None, ids, far)
    assert tokens_of(got) == tokens_of(expected), f"draws of batch {seed} differ"
    for ours, theirs in zip(chain(*got), chain(*expected), strict=True):
        assert ours.log_probability == pytest.approx(theirs.log_probability, abs=1e-5)
        assert (ours.distribution is None) is (theirs.distribution is None)
        if ours.distribution is not None and theirs.distribution is not None:
            assert torch.equal(ours.distribution, theirs.distribution)


def tokens_of(drawn: list[list[Child]]) -> list[list[int]]:
    return [[child.token_id for child in children] for children in drawn]


@pytest.mark.parametrize("ids", [None, IDS], ids=["tokens", "a vocabulary of their own"])
def test_draws_are_what_they_are_elsewhere(ids: DraftIds | None) -> None:
    draw, tapes = random.Random(2), TapeRecorder()
    recorded = DeviceRows(RowGraphs(tapes, 8, 100))
    for seed in range(60):
        wishes = [wish(draw) for _ in range(draw.randrange(1, 7))]
        assert_alike(DeviceRows(), wishes, ids, seed)
        assert_alike(recorded, wishes, ids, seed)
    # Two widths, with noise and without, in four sizes.
    assert len(tapes.tapes) <= 16
    assert tapes.num_replays == 60


def test_another_vocabulary_is_another_draw() -> None:
    """A recording reads that of its first; rows of another length are others whatever is done with them."""
    draw = random.Random(3)
    far = DeviceRows(RowGraphs(TapeRecorder(), 8, 100))
    wishes = [wish(draw) for _ in range(4)]
    for seed, ids in enumerate((IDS, OTHER_IDS, None, IDS, OTHER_IDS)):
        assert_alike(far, wishes, ids, seed)
    groups = [RowGroup(PARAMS["coupled"], (1, 2), 2, frozenset())]
    for size in (SIZE, SIZE - 7, SIZE):
        rows = torch.randn(1, size)
        assert torch.equal(far.process(rows, groups), process_logits(rows, groups))


def test_noise_of_another_draw_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    shared = recordings.Recordings.shared
    starts = torch.zeros(8, dtype=torch.int64)

    def stale(self: recordings.Recordings, place: object, like: torch.Tensor) -> torch.Tensor:
        return starts.clone() if like.dtype == torch.int64 and place == 1 else shared(self, place, like)

    monkeypatch.setattr(recordings.Recordings, "shared", stale)
    far = DeviceRows(RowGraphs(TapeRecorder(), 8, 100))
    with pytest.raises(AssertionError, match="draws of batch"):
        assert_coupled(far)


def assert_coupled(far: DeviceRows) -> None:
    for seed in range(20):
        key = NoiseKey(seed, 0, 7, Stream.TARGET)
        assert_alike(far, [RowWish(Proposal.COUPLED, 1, key)] * 4, None, seed)


@pytest.mark.parametrize("proposal", PROPOSALS)
def test_a_draw_waits_once(proposal: Proposal) -> None:
    key = None if proposal is Proposal.DETERMINISTIC else NoiseKey(1, 0, 7, Stream.DRAFT)
    wishes = [RowWish(proposal, 3, key, needs_probabilities=True)] * 4
    rows = torch.randn(4, SIZE)
    waits = waits_in(lambda: draw_children(rows, wishes, None, IDS, DeviceRows()))
    # What is behind the copy is on the host already.
    assert waits == ["cpu", "tolist", "tolist", "tolist"]


CASES = [
    (method, kind)
    for method in ("draft_model", "draft_model 2,1,1", "eagle3", "eagle3 dynamic", "medusa")
    for kind in PARAMS
    if (method, kind) != ("eagle3 dynamic", "rejection")
]


@pytest.mark.parametrize(("method", "kind"), CASES)
def test_whole_answers_are_drafted_alike(monkeypatch: pytest.MonkeyPatch, method: str, kind: str) -> None:
    prompts, params = [[5, 6, 7] * 6, [5, 6, 7] * 5], PARAMS[kind]
    tapes = TapeRecorder()
    plain = build_llm(method).generate(prompts, params)
    draws = DeviceRows(RowGraphs(tapes, *DRAWING_LIMITS))

    def far_grower(gardener: Any, style: Any, eos_token_ids: Any, *_: Any) -> TreeGrower:
        return TreeGrower(gardener, style, eos_token_ids, None, draws)

    monkeypatch.setattr(factory, "TreeGrower", far_grower)
    far = build_llm(method).generate(prompts, params)
    assert [output.token_ids for output in far] == [output.token_ids for output in plain]
    assert [output.speculation for output in far] == [output.speculation for output in plain]
    assert tapes.num_replays > 10
