"""Acceptance by rank, measured."""

import random

import pytest

from engine.speculation.growth import SequoiaGardener
from engine.speculation.rank_rates import RankRates
from engine.speculation.tree_shape import PRIOR_RATES
from engine.token_tree import Proposal, TokenTree

PAIR = TokenTree((1, 2), (0, 0))


def test_before_anything_is_known_the_prior_holds() -> None:
    assert RankRates().rates() == PRIOR_RATES


def test_what_is_measured_wins_in_the_end() -> None:
    rates = RankRates()
    rng = random.Random(0)
    for _ in range(3000):
        rates.note(PAIR, [rng.choices([1, 2, 3], [0.3, 0.25, 0.45])[0]])
    first, second, third, _ = rates.rates()
    assert first == pytest.approx(0.3, abs=0.03)
    assert second == pytest.approx(0.25, abs=0.03)
    # The third child was never there to be tried.
    assert third == PRIOR_RATES[2]


def test_a_little_says_little() -> None:
    rates = RankRates()
    rates.note(PAIR, [7])
    assert rates.rates()[0] == pytest.approx(0.6 * 50 / 51)


def test_rates_never_rise_with_the_rank() -> None:
    rates = RankRates()
    for _ in range(200):
        rates.note(PAIR, [2])
    first, second, *_ = rates.rates()
    assert first == second


@pytest.mark.parametrize(
    ("committed", "tried", "stood"),
    [
        ([1, 3, 9], [2, 1], [2, 0]),  # 9 follows a leaf: nothing was tried.
        ([2, 3], [1, 1], [0, 1]),
        ([1, 4], [2, 1], [1, 0]),
        ([8, 3], [1, 1], [0, 0]),
        ([], [0, 0], [0, 0]),
    ],
)
def test_only_what_was_reached_counts(committed: list[int], tried: list[int], stood: list[int]) -> None:
    tree = TokenTree((1, 2, 3), (0, 0, 1))
    rates = RankRates()
    assert rates.note(tree, committed) == tried[0]
    assert rates._tried[:2] == tried
    assert rates._stood[:2] == stood


def test_old_verdicts_fade() -> None:
    rates = RankRates()
    for token, times in ((1, 6000), (9, 6000)):
        for _ in range(times):
            rates.note(PAIR, [token])
    assert rates.rates()[0] < 0.3


def test_a_shape_follows_its_own_way_of_drawing() -> None:
    gardener = SequoiaGardener(8, 8)

    def depth(proposal: Proposal) -> int:
        growth, length = gardener.start(proposal, 8, 8), 0
        while growth.width(length):
            growth.drawn(length, 0)
            length += 1
        return length

    before = {proposal: depth(proposal) for proposal in Proposal}
    for _ in range(300):
        gardener.note(TokenTree((1, 2), (0, 0), Proposal.COUPLED), [1])
    assert depth(Proposal.COUPLED) == 8
    assert depth(Proposal.DETERMINISTIC) == before[Proposal.DETERMINISTIC] < 8
