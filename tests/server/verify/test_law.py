"""Cells of a law, and draws held against them."""

import math
import random
from collections.abc import Sequence

import pytest

from engine.sampling_params import SamplingParams
from server.verify.draws import law_of
from server.verify.law import MIN_EXPECTED, Cell, CellLaw, build_law, fit
from server.verify.subject import History, Law

# What comes behind each history, of a model with four tokens.
TABLE: dict[History, Law] = {
    (): {1: 0.6, 2: 0.3, 3: 0.099, 4: 0.001},
    (1,): {1: 0.5, 2: 0.4, 3: 0.1},
    (2,): {1: 0.97, 2: 0.03},
}
OTHERWISE: Law = {1: 0.25, 2: 0.25, 3: 0.25, 4: 0.25}


def table(histories: Sequence[History]) -> list[Law]:
    return [TABLE.get(history, OTHERWISE) for history in histories]


def drawn(num_draws: int, seed: int = 1, spoil: float = 0.0) -> list[History]:
    """Draws of three tokens; a spoilt one has the likeliest second token whatever the law says."""
    chance = random.Random(seed)
    answers: list[History] = []
    for _ in range(num_draws):
        tokens: History = ()
        for place in range(3):
            law = TABLE.get(tokens, OTHERWISE)
            [token] = chance.choices(list(law), list(law.values()))
            tokens = (*tokens, 1 if place == 1 and chance.random() < spoil else token)
        answers.append(tokens)
    return answers


def test_cells_are_a_partition_with_the_laws_mass() -> None:
    law = build_law(table, 3, 1000)
    assert sum(law.cells.values()) + law.rare == pytest.approx(1.0)
    assert all(mass * 1000 >= MIN_EXPECTED for mass in law.cells.values())
    assert law.cells[Cell((1, 2, 3))] == pytest.approx(0.6 * 0.4 * 0.25)
    assert law.reaches_drafts
    # The fourth token of four comes once in a thousand: it is counted among the rare.
    assert law.cell_of((4, 1, 1)) is None
    assert law.rare == pytest.approx(0.001)
    assert law.cell_of((1, 2, 3)) == Cell((1, 2, 3))


def test_few_draws_tell_few_cells_apart() -> None:
    law = build_law(table, 3, 20)
    assert set(law.cells) == {Cell((1,)), Cell((2,)), Cell((), is_rest=False)} - {Cell(())}
    assert not law.reaches_drafts


def test_a_rest_that_is_likely_is_a_cell() -> None:
    flat = dict.fromkeys(range(1000), 0.001)
    law = build_law(
        lambda histories: [{0: 0.5, **{t: p / 2 for t, p in flat.items() if t}} for _ in histories], 1, 100
    )
    assert set(law.cells) == {Cell((0,)), Cell((), is_rest=True)}
    assert law.cell_of((77,)) == Cell((), is_rest=True)


def test_a_law_that_is_not_known_ends_the_cells() -> None:
    law = build_law(lambda histories: [TABLE.get(history) for history in histories], 3, 1000)
    assert law.cells[Cell((3,))] == pytest.approx(0.099)
    assert law.cell_of((3, 1, 2)) == Cell((3,))
    assert sum(law.cells.values()) + law.rare == pytest.approx(1.0)


def test_draws_of_the_law_fit_it_and_the_chances_are_even() -> None:
    law = build_law(table, 3, 400)
    chances = [fit(law, drawn(400, seed)).p_value for seed in range(300)]
    assert 0.4 < sum(chances) / len(chances) < 0.6
    assert sum(chance < 0.1 for chance in chances) < 60
    assert min(chances) > 1e-5


def test_a_favoured_second_token_is_found() -> None:
    law = build_law(table, 3, 400)
    found = [fit(law, drawn(400, seed, spoil=0.5)).p_value < 1e-4 for seed in range(30)]
    assert sum(found) >= 29


def test_what_cannot_come_is_a_fault_at_once() -> None:
    law = build_law(lambda histories: [{1: 0.5, 2: 0.5} for _ in histories], 1, 100)
    assert fit(law, [(1,)] * 50 + [(2,)] * 50).p_value == 1.0
    result = fit(law, [(1,)] * 50 + [(2,)] * 49 + [(3,)])
    assert math.isinf(result.statistic)
    assert result.p_value == 0.0


def test_a_single_outcome_tests_nothing_but_that_it_comes() -> None:
    law = build_law(lambda histories: [{1: 1.0} for _ in histories], 3, 100)
    assert (law.num_cells, fit(law, [(1, 1, 1)] * 100).p_value) == (1, 1.0)
    assert fit(law, [(1, 1, 1)] * 99 + [(1, 2, 1)]).p_value == 0.0


def test_answers_that_end_early_are_rare() -> None:
    law = CellLaw({Cell((1, 1)): 0.5, Cell((1, 2)): 0.5}, 0.0, frozenset({(), (1,)}))
    assert law.cell_of((1,)) is None


@pytest.mark.parametrize(
    ("params", "expected"),
    [
        (SamplingParams(), {"a": 0.5, "b": 0.25, "c": 0.125}),
        (SamplingParams(top_k=2), {"a": 2 / 3, "b": 1 / 3}),
        (SamplingParams(top_k=2, temperature=0.5), {"a": 0.8, "b": 0.2}),
    ],
)
def test_the_law_by_the_likeliest_tokens(params: SamplingParams, expected: dict[str, float]) -> None:
    top = [("a", math.log(0.5)), ("b", math.log(0.25)), ("c", math.log(0.125))]
    assert law_of(top, params) == pytest.approx(expected)


def test_equals_at_the_border_all_stay() -> None:
    top = [("a", math.log(0.5)), ("b", math.log(0.25)), ("c", math.log(0.25))]
    assert law_of(top, SamplingParams(top_k=2)) == pytest.approx({"a": 0.5, "b": 0.25, "c": 0.25})


@pytest.mark.parametrize(
    "params", [SamplingParams(temperature=0.7), SamplingParams(top_p=0.9), SamplingParams(min_p=0.1)]
)
def test_a_law_that_does_not_follow_is_refused(params: SamplingParams) -> None:
    with pytest.raises(ValueError, match="does not follow"):
        law_of([("a", -0.1), ("b", -3.0)], params)
