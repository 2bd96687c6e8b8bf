"""Which nodes are admitted: the best of all sets that keep trees whole, found without trying them all."""

import math
import random
from dataclasses import replace
from itertools import product

import pytest

from engine.speculation.allotment import Bid, Tariff, admit


def speed_of(bids: list[Bid], tariff: Tariff, counts: tuple[int, ...]) -> float:
    tokens, seconds, deepest, rows = 1.0, tariff.seconds, 0, 0
    for bid, taken in zip(bids, counts, strict=True):
        tokens *= 1.0 + sum(bid.values[:taken])
        rows += taken
        drafted = [depth for depth in bid.depths[:taken] if depth]
        if drafted:
            seconds += bid.entry_seconds + tariff.per_row * len(drafted)
            deepest = max(deepest, *drafted)
    if deepest:
        seconds += tariff.start + tariff.per_pass * deepest
    return tariff.requests * math.pow(tokens, 1.0 / tariff.requests) / (seconds + tariff.rise[rows])


def steps_of_four(rows: int) -> float:
    return 0.3 * (rows // 4)


def straight(rows: int) -> float:
    return 0.12 * rows


@pytest.mark.parametrize("curve", [steps_of_four, straight])
@pytest.mark.parametrize("seed", range(12))
def test_no_other_choice_is_faster(curve: object, seed: int) -> None:
    rng = random.Random(seed)
    bids = []
    for place in range(3):
        rates = [rng.uniform(0.2, 0.99) for _ in range(4)]
        values = [rates[0]]
        for rate in rates[1:]:
            values.append(values[-1] * rate)
        bids.append(Bid(values, (0,) * 4 if place == 0 else (1, 2, 3, 4)))
    tariff = Tariff(3, 1.0, [curve(rows) for rows in range(13)], 0.02, rng.uniform(0.0, 0.1), 0.005)  # type: ignore[operator]
    best = max(speed_of(bids, tariff, counts) for counts in product(range(5), repeat=3))
    found = admit(bids, tariff)
    assert found.speed == pytest.approx(speed_of(bids, tariff, found.counts))
    assert found.speed == pytest.approx(best, rel=0.01)


def test_it_looks_beyond_the_first_step_of_a_curve() -> None:
    """The first node costs a whole step of the curve, and only with three more does it pay."""
    rise = [0.0, 0.5, 0.5, 0.5, 0.5, 1.0]
    bid = Bid((0.6, 0.5, 0.45, 0.4), (0, 0, 0, 0))
    assert admit([Bid((0.45,), (0,))], Tariff(1, 1.0, rise)).counts == (0,)
    assert admit([bid], Tariff(1, 1.0, rise)).counts == (4,)


def test_no_more_than_there_is_room_for() -> None:
    bids = [Bid((0.9, 0.8), (0, 0)), Bid((0.95, 0.7), (0, 0))]
    assert admit(bids, Tariff(2, 1.0, [0.0, 0.0, 0.0])).counts == (1, 1)
    assert admit(bids, Tariff(2, 1.0, [0.0])).counts == (0, 0)


def test_nothing_to_admit() -> None:
    assert admit([], Tariff(4, 0.5, [0.0, 0.1])).speed == 8.0
    assert admit([Bid((), ())], Tariff(4, 0.5, [0.0, 0.1])).counts == (0,)


def test_whoever_costs_more_to_begin_with_needs_more_to_gain() -> None:
    tariff = Tariff(2, 1.0, [0.0, 0.01, 0.02, 0.03, 0.04], 0.0, 0.01, 0.01)
    cheap, dear = Bid((0.5, 0.4), (1, 2)), Bid((0.5, 0.4), (1, 2), entry_seconds=2.0)
    assert admit([cheap, dear], tariff).counts[0] == 2
    assert admit([dear], tariff).counts == (0,)


def test_no_draft_takes_longer_than_it_may() -> None:
    """What is granted within the bound is the best of what is within it."""
    bid = Bid((0.9, 0.85, 0.8, 0.7), (1, 2, 3, 4))
    tariff = Tariff(1, 1.0, [0.0, 0.1, 0.2, 0.3, 0.4], 0.02, 0.05, 0.01)
    assert admit([bid], tariff).counts == (4,)
    for most, count in ((0.0, 0), (0.17, 0), (0.19, 1), (0.35, 2), (0.6, 3), (0.67, 4)):
        bounded = replace(tariff, most=most)
        found = admit([bid], bounded)
        assert found.counts == (count,), most
        assert bounded.affords_one() is (count > 0)
        assert found.speed == pytest.approx(speed_of([bid], tariff, found.counts))
