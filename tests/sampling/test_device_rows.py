"""Rows processed alike, launched anew and replayed, against what each row asks for by itself."""

import random
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from engine.model import row_graphs
from engine.model.row_graphs import RowGraphs
from engine.sampling import logits as pipeline
from engine.sampling.choosing import choose_tokens
from engine.sampling.device_rows import DeviceRows
from engine.sampling.logits import process_logits
from engine.sampling.noise import Stream
from engine.sampling.row_group import RowGroup
from engine.sampling.sampler import Sampler
from engine.sampling_params import SamplingParams
from engine.token_tree import EMPTY_TREE, TokenTree
from tests.model.tape import TapeRecorder
from tests.sampling.table_model import EOS, PROMPT, Line

VOCAB = 300
GREEDY = SamplingParams(temperature=0.0, top_k=3, top_p=0.5, min_p=0.5)
ALL = SamplingParams(temperature=0.7, top_k=40, top_p=0.95, min_p=0.02, seed=5)


def group_of(params: SamplingParams, place: int) -> RowGroup:
    return RowGroup(params, (*PROMPT, place), len(PROMPT), EOS, ((), (1,))[: 1 + place % 2])


def random_groups(count: int, draw: random.Random) -> list[RowGroup]:
    """One or two rows each."""
    return [
        group_of(
            SamplingParams(
                temperature=draw.choice([0.0, 1e-30, 0.3, 1.0, 1.7]),
                top_k=draw.choice([0, 0, 1, 7, 64, 65, 299, 300, 5000]),
                top_p=draw.choice([1.0, 1.0, 0.999, 0.6, 1e-9]),
                min_p=draw.choice([0.0, 0.0, 0.05, 1.0]),
                repetition_penalty=draw.choice([1.0, 1.3]),
                seed=draw.randrange(-(2**63), 2**63),
            ),
            place,
        )
        for place in range(count)
    ]


def rows_of(groups: Sequence[RowGroup], seed: int) -> torch.Tensor:
    """With equals, and tokens that a model rules out."""
    generator = torch.Generator().manual_seed(seed)
    rows = (4 * torch.randn(sum(map(len, groups)), VOCAB, generator=generator)).round(decimals=1)
    return rows.masked_fill_(torch.rand(rows.shape, generator=generator) < 0.1, -torch.inf)


def assert_alike(far: DeviceRows, groups: Sequence[RowGroup], seed: int) -> None:
    """To the bit: what is left of the rows, and the tokens."""
    rows = rows_of(groups, seed)
    expected, got = process_logits(rows, groups), far.process(rows, groups)
    assert torch.equal(got, expected), f"rows of batch {seed} differ"
    keys = [key for group in groups for key in group.noise_keys(Stream.TARGET)]
    assert torch.equal(far.choose(got, keys), choose_tokens(expected, keys)), f"tokens of batch {seed} differ"


@pytest.mark.parametrize("elements", [2**21, 2 * VOCAB])
def test_rows_are_what_each_asks_for(monkeypatch: pytest.MonkeyPatch, elements: int) -> None:
    monkeypatch.setattr(pipeline, "CHUNK_ELEMENTS", elements)
    draw = random.Random(elements)
    for seed in range(40):
        assert_alike(DeviceRows(), random_groups(1 + seed % 6, draw), seed)


def same_options(count: int, draw: random.Random) -> list[RowGroup]:
    """Other seeds, temperatures and limits, but the same things to launch; some rows are greedy."""
    kinds = [
        replace(ALL, temperature=draw.random() + 0.1, top_k=draw.randrange(1, 64), top_p=draw.random())
        for _ in range(count)
    ]
    kinds[count // 2 :: 3] = [GREEDY] * len(kinds[count // 2 :: 3])
    return [
        RowGroup(replace(params, seed=draw.randrange(2**63)), (*PROMPT, place), len(PROMPT), EOS)
        for place, params in enumerate([ALL, *kinds[1:]])
    ]


def assert_replays(tapes: TapeRecorder) -> None:
    far, draw = DeviceRows(RowGraphs(tapes, 8, 100)), random.Random(4)
    counts = (3, 4, 3, 9, 2, 4, 3)
    for seed, count in enumerate(counts):
        assert_alike(far, same_options(count, draw), seed)
    # Sizes of 4 and 2, truncated and chosen from, six batches of them; nine rows are too many.
    assert (len(tapes.tapes), tapes.num_replays) == (4, 2 * 6)


def test_replayed_rows_are_what_each_asks_for() -> None:
    assert_replays(TapeRecorder())


@pytest.mark.parametrize("what", ["rows", "options", "seeds"])
def test_numbers_of_another_step_are_found(monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    """The comparison would see recordings that read what the first step of a size gave them."""
    fill = row_graphs.RowGraphs._fill
    first: dict[tuple[int, torch.dtype], torch.Tensor] = {}

    def stale(graphs: RowGraphs, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        rows, others = inputs
        key = len(rows), others.dtype
        if what == "rows":
            rows = first.setdefault(key, rows.clone())
        elif (what == "seeds") is (others.dtype == torch.int64):
            others = first.setdefault(key, others.clone())
        return fill(graphs, [rows, others])

    monkeypatch.setattr(row_graphs.RowGraphs, "_fill", stale)
    with pytest.raises(AssertionError, match=f"{'tokens' if what == 'seeds' else 'rows'} of batch . differ"):
        assert_replays(TapeRecorder())


def test_padding_may_hold_anything() -> None:
    """Options of a step that looked at more, and rows without any number."""
    far = DeviceRows(RowGraphs(TapeRecorder(), 8, 100))
    wide = group_of(replace(ALL, top_k=200), 0)
    nowhere = torch.full((4, VOCAB), torch.nan)
    assert not far.process(nowhere, [wide] * 4).isfinite().any()
    draw = random.Random(4)
    for seed in range(3):
        assert_alike(far, same_options(3, draw), seed)


def test_no_more_is_recorded_than_room_is_left_for() -> None:
    tapes = TapeRecorder()
    far, draw = DeviceRows(RowGraphs(tapes, 8, 3)), random.Random(4)
    for seed, count in enumerate((4, 2, 1, 1, 2)):
        assert_alike(far, same_options(count, draw), seed)
    assert len(tapes.tapes) == 3
    assert tapes.num_replays == 3 + 1


CHAIN = TokenTree.chain((5, 6, 7, 8))
STEPS = {
    "greedy": (GREEDY, 1, 1),
    "temperature": (SamplingParams(temperature=0.7, seed=5), 34, 6),
    "top_p": (SamplingParams(temperature=0.7, top_p=0.95, seed=5), 53, 6),
    "all options": (ALL, 66, 6),
}


@pytest.mark.parametrize("tree", [EMPTY_TREE, CHAIN], ids=["plain", "chain"])
@pytest.mark.parametrize("kind", STEPS)
def test_a_step_launches_little(kind: str, tree: TokenTree) -> None:
    """Eight requests; the copies of options and seeds to the device are not counted here."""
    params, num_anew, num_recorded = STEPS[kind]
    tasks = [Line(params).task(tree)] * 8
    rows = rows_of([group_of(params, 0)] * (8 + 8 * len(tree)), 0)
    tapes = TapeRecorder()
    anew, recorded = Sampler(far=DeviceRows()), Sampler(far=DeviceRows(RowGraphs(tapes, 64, 100)))
    assert recorded(rows, tasks) == anew(rows, tasks) == Sampler()(rows, tasks)
    assert tapes.launches_in(lambda: anew(rows, tasks)) == num_anew
    assert tapes.launches_in(lambda: recorded(rows, tasks)) == num_recorded
