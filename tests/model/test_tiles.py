"""How batches are cut into tiles: every token meets every slot it sees, once."""

import random
from collections import Counter

import pytest
import torch

from engine.model.attention.reference import visibility
from engine.model.attention.tiles import MAX_SPLITS, SplitRules, TileShape, cut
from engine.model.input_batch import InputBatch, SequenceSlice
from engine.token_tree import TokenTree
from tests.model.attention_steps import BLOCK_SIZE, long_stretches, mixed

CPU = torch.device("cpu")


def random_slices(seed: int) -> list[SequenceSlice]:
    rng = random.Random(seed)
    slices = []
    for _ in range(rng.randint(1, 6)):
        parents = tuple(rng.randint(0, node) for node in range(rng.choice([0, 0, 1, 5, 20])))
        tree = TokenTree(tuple(range(len(parents))), parents)
        cached = rng.randint(0, len(tree) - 1) if len(tree) and rng.random() < 0.5 else 0
        tokens = 0 if cached else rng.choice([1, 1, 3, 40])
        start = rng.choice([1, 7, 64, 300])
        slices.append(SequenceSlice([0] * tokens, start, range(100), tree, num_cached_nodes=cached))
    return slices


@pytest.mark.parametrize("window", [None, 5, 100])
@pytest.mark.parametrize("wanted_programs", [1, 40, 100000])
@pytest.mark.parametrize("tokens_per_tile", [1, 4, 16])
def test_every_visible_slot_is_in_one_tile(
    tokens_per_tile: int, wanted_programs: int, window: int | None
) -> None:
    for slices in (mixed(), long_stretches(), *map(random_slices, range(10))):
        batch = InputBatch.build(slices, BLOCK_SIZE, CPU)
        table = cut(batch.spans, TileShape(2, tokens_per_tile, window), SplitRules(wanted_programs, 16))
        met = Counter(
            (token, offset + slot)
            for first, end, offset, begin, slot_end, _, _ in table.tiles
            for token in range(first, end)
            for slot in range(begin, slot_end)
        )
        assert max(met.values()) == 1
        offset = 0
        for index, span in enumerate(batch.spans):
            mask = visibility(batch, index, span, window)
            wide = torch.ones(1, span.num_slots, dtype=torch.bool) if mask is None else mask
            for row, slot in wide.nonzero().tolist():
                assert met[span.begin + row, offset + slot], (span, row, slot)
            offset += span.num_slots


@pytest.mark.parametrize("window", [None, 5])
def test_partial_results_are_merged_once(window: int | None) -> None:
    for slices in (mixed(), long_stretches(), *map(random_slices, range(10))):
        spans = InputBatch.build(slices, BLOCK_SIZE, CPU).spans
        table = cut(spans, TileShape(2, 4, window), SplitRules(1000, 16))
        partials = {partial: (first, end) for first, end, *_, partial in table.tiles if partial >= 0}
        assert sorted(partials) == list(range(table.num_partials))
        merged: Counter[tuple[int, int]] = Counter()
        for token, place, first_partial, count in table.merges:
            assert 2 <= count <= MAX_SPLITS
            for partial in range(first_partial, first_partial + count):
                first, end = partials[partial]
                assert (first + place, first <= token < end) == (token, True)
                merged[token, partial] += 1
        expected = {(token, partial) for partial, own in partials.items() for token in range(*own)}
        assert set(merged) == expected
        assert set(merged.values()) <= {1}
        whole = [
            token for first, end, *_, partial in table.tiles if partial < 0 for token in range(first, end)
        ]
        assert len(whole) == len(set(whole))
        assert not set(whole) & {token for token, _ in merged}


@pytest.mark.parametrize(("wanted_programs", "tiles"), [(8, 1), (9, 2), (64, 8), (10000, MAX_SPLITS)])
def test_a_single_request_keeps_the_device_busy(wanted_programs: int, tiles: int) -> None:
    slices = [SequenceSlice([0], 16383, range(1024))]
    spans = InputBatch.build(slices, 16, CPU).spans
    table = cut(spans, TileShape(8, 4, None), SplitRules(wanted_programs, 256))
    assert len(table.tiles) == tiles


def test_short_contexts_and_full_devices_are_not_split() -> None:
    short = InputBatch.build([SequenceSlice([0], 300, range(30))], 16, CPU).spans
    assert cut(short, TileShape(8, 4, None), SplitRules(1000, 256)).merges == []
    many = InputBatch.build([SequenceSlice([0], 2000, range(200))] * 32, 16, CPU).spans
    assert cut(many, TileShape(8, 4, None), SplitRules(256, 256)).merges == []


def test_slots_behind_every_window_are_left_out() -> None:
    spans = InputBatch.build([SequenceSlice([0] * 4, 1000, range(100))], 16, CPU).spans
    [(_, _, _, begin, end, _, _)] = cut(spans, TileShape(1, 4, 10), SplitRules(1, 256)).tiles
    assert (begin, end) == (1000 - 9, 1004)
