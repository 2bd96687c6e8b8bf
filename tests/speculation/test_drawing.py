"""How children are drawn from a row: laws by exact enumeration and by counting over seeds, and ties."""

from itertools import permutations

import pytest
import torch

from engine.sampling.noise import NoiseKey, Stream, gumbel_noise, uniform_rows
from engine.speculation.drawing import Child, RowWish, draw_children
from engine.token_tree import Proposal

Q = torch.tensor([0.4, 0.3, 0.2, 0.1])
NUM_SEEDS = 4000


def key(seed: int, position: int = 3, stream: Stream = Stream.DRAFT) -> NoiseKey:
    return NoiseKey(seed, 0, position, stream)


def tokens(children: list[Child]) -> tuple[int, ...]:
    return tuple(child.token_id for child in children)


def draw_many(proposal: Proposal, width: int) -> list[tuple[int, ...]]:
    wishes = [RowWish(proposal, width, key(seed)) for seed in range(NUM_SEEDS)]
    return [tokens(children) for children in draw_children(Q.log().expand(NUM_SEEDS, -1), wishes)]


def assert_law(drawn: list[tuple[int, ...]], law: dict[tuple[int, ...], float]) -> None:
    """Each share within five standard deviations; the noise is fixed, so this always or never holds."""
    assert sum(law.values()) == pytest.approx(1)
    for outcome, probability in law.items():
        deviation = (probability * (1 - probability) / len(drawn)) ** 0.5
        assert drawn.count(outcome) / len(drawn) == pytest.approx(probability, abs=5 * deviation), outcome


def test_distinct_siblings_have_the_law_of_draws_without_replacement() -> None:
    q = Q.tolist()
    law: dict[tuple[int, ...], float] = {
        (a, b): q[a] * q[b] / (1 - q[a]) for a, b in permutations(range(4), 2)
    }
    assert_law(draw_many(Proposal.SAMPLED_DISTINCT, 2), law)


def test_independent_siblings_may_say_the_same() -> None:
    q = Q.tolist()
    assert_law(draw_many(Proposal.SAMPLED, 2), {(a, b): q[a] * q[b] for a in range(4) for b in range(4)})


@pytest.mark.parametrize("proposal", [Proposal.SAMPLED, Proposal.SAMPLED_DISTINCT])
def test_siblings_share_what_they_were_drawn_from(proposal: Proposal) -> None:
    [children] = draw_children(Q.log()[None], [RowWish(proposal, 3, key(1))])
    assert len(children) == 3
    for child in children:
        assert child.distribution is children[0].distribution
        assert child.distribution is not None
        torch.testing.assert_close(child.distribution, Q)


@pytest.mark.parametrize("proposal", [Proposal.COUPLED, Proposal.SAMPLED_DISTINCT])
def test_children_are_the_highest_scores_in_order(proposal: Proposal) -> None:
    generator = torch.Generator().manual_seed(2)
    rows = torch.randn(5, 50, generator=generator)
    stream = Stream.TARGET if proposal is Proposal.COUPLED else Stream.DRAFT
    keys = [key(seed, stream=stream) for seed in range(5)]
    drawn = draw_children(rows, [RowWish(proposal, 4, row_key) for row_key in keys])
    scores = rows.double() + gumbel_noise(keys, 50, rows.device)
    assert [list(tokens(children)) for children in drawn] == scores.topk(4).indices.tolist()
    assert all((child.distribution is None) == (proposal is Proposal.COUPLED) for child in drawn[0])


def test_a_depth_shares_one_row_of_noise() -> None:
    rows = torch.zeros(3, 40)
    wishes = [RowWish(Proposal.COUPLED, 2, key(9, stream=Stream.TARGET))] * 3
    assert len({tokens(children) for children in draw_children(rows, wishes)}) == 1


def test_the_lowest_id_goes_first_among_equals() -> None:
    row = torch.tensor([[1.0, 3.0, 3.0, 0.0, 3.0]])
    assert tokens(draw_children(row, [RowWish(Proposal.DETERMINISTIC, 4, None)])[0]) == (1, 2, 4, 0)


def test_what_cannot_be_chosen_is_not_drawn() -> None:
    row = torch.tensor([[-torch.inf, 2.0, -torch.inf, 1.0]])
    for proposal, row_key in (
        (Proposal.DETERMINISTIC, None),
        (Proposal.COUPLED, key(1, stream=Stream.TARGET)),
        (Proposal.SAMPLED_DISTINCT, key(1)),
    ):
        assert set(tokens(draw_children(row, [RowWish(proposal, 4, row_key)])[0])) == {1, 3}
    independent = [RowWish(Proposal.SAMPLED, 8, key(seed)) for seed in range(50)]
    for children in draw_children(row.expand(50, -1), independent):
        assert len(children) == 8
        assert set(tokens(children)) <= {1, 3}


def test_rows_of_all_kinds_and_widths_side_by_side() -> None:
    rows = torch.randn(4, 30, generator=torch.Generator().manual_seed(0))
    wishes = [
        RowWish(Proposal.DETERMINISTIC, 1, None),
        RowWish(Proposal.COUPLED, 3, key(1, stream=Stream.TARGET)),
        RowWish(Proposal.SAMPLED, 2, key(2)),
        RowWish(Proposal.SAMPLED_DISTINCT, 4, key(3)),
    ]
    together = draw_children(rows, wishes)
    assert [len(children) for children in together] == [1, 3, 2, 4]
    alone = [draw_children(row[None], [wish])[0] for row, wish in zip(rows, wishes, strict=True)]
    assert [tokens(children) for children in together] == [tokens(children) for children in alone]


def test_large_vocabularies_are_drawn_from_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = torch.randn(6, 30, generator=torch.Generator().manual_seed(1))
    wishes = [RowWish(Proposal.COUPLED, 2, key(seed, stream=Stream.TARGET)) for seed in range(6)]
    whole = draw_children(rows, wishes)
    monkeypatch.setattr("engine.sampling.logits.CHUNK_ELEMENTS", 70)
    assert draw_children(rows, wishes) == whole


def test_probabilities_are_shares_of_the_scores() -> None:
    [children] = draw_children(
        Q.log()[None], [RowWish(Proposal.DETERMINISTIC, 4, None, needs_probabilities=True)]
    )
    shares = torch.tensor([child.log_probability for child in children]).exp()
    torch.testing.assert_close(shares, Q)
    noisy = RowWish(Proposal.COUPLED, 4, key(5, stream=Stream.TARGET), needs_probabilities=True)
    [children] = draw_children(Q.log()[None], [noisy])
    assert sum(torch.tensor(child.log_probability).exp() for child in children) == pytest.approx(1)


def test_an_independent_draw_falls_where_its_number_lies() -> None:
    [children] = draw_children(Q.log()[None], [RowWish(Proposal.SAMPLED, 3, key(8))])
    numbers = uniform_rows([key(8)], 3, Q.device)[0].tolist()
    borders = Q.double().cumsum(0).tolist()
    assert list(tokens(children)) == [sum(border <= u for border in borders) for u in numbers]


@pytest.mark.parametrize("nothing", [-torch.inf, torch.nan])
@pytest.mark.parametrize("proposal", Proposal)
def test_where_nothing_can_be_chosen_nothing_is_drawn(proposal: Proposal, nothing: float) -> None:
    rows = torch.stack((torch.full((4,), nothing), Q.log()))
    wishes = [
        RowWish(proposal, 2, None if proposal is Proposal.DETERMINISTIC else key(seed)) for seed in (1, 2)
    ]
    none, some = draw_children(rows, wishes)
    assert none == []
    assert len(some) == 2
