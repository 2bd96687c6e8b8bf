"""Trees of Medusa heads."""

from itertools import product
from math import prod

import pytest

from engine.errors import StartupError
from engine.speculation.heads.medusa_tree import PRIOR_HEAD_RATES, check_choices, likeliest_choices, shape_of

RATES = ((0.5, 0.2, 0.1), (0.4, 0.3), (0.25, 0.2, 0.05))


def worth(path: tuple[int, ...]) -> float:
    return prod(RATES[head][rank] for head, rank in enumerate(path))


@pytest.mark.parametrize("num_nodes", [1, 4, 9, 20])
def test_the_tree_holds_the_likeliest_paths(num_nodes: int) -> None:
    every = [path for depth in (1, 2, 3) for path in product(*(range(len(ranks)) for ranks in RATES[:depth]))]
    best = sorted((worth(path) for path in every), reverse=True)[:num_nodes]
    chosen = likeliest_choices(RATES, num_nodes)
    assert [worth(path) for path in chosen] == pytest.approx(best)
    assert len(set(chosen)) == num_nodes


def test_a_smaller_tree_is_the_beginning_of_a_larger_one() -> None:
    large = likeliest_choices(PRIOR_HEAD_RATES, 63)
    assert likeliest_choices(PRIOR_HEAD_RATES, 20) == large[:20]
    assert len(large) == 63
    assert {len(path) for path in large} == {1, 2, 3, 4}


def test_no_more_nodes_than_candidates() -> None:
    assert likeliest_choices(((0.5, 0.2),), 9) == ((0,), (1,))


def test_a_tree_as_a_shape() -> None:
    shape = shape_of(((0,), (1,), (0, 0), (0, 0, 0), (1, 0), (0, 1)))
    assert shape.parents == (0, 0, 1, 3, 2, 1)
    assert shape.children() == ((1, 2), (3, 6), (5,), (4,), (), (), ())


@pytest.mark.parametrize(
    ("choices", "message"),
    [
        (((0,), (0, 0), (0, 0, 0)), r"path \[0, 0, 0\], but 2 heads are there"),
        (((0,), (0, 40)), r"path \[0, 40\], but a head scores 40 tokens"),
        (((0,), (1, 0)), r"path \[1, 0\] without \[1\]"),
        (((0,), (2,)), r"path \[2\], but not the better candidate"),
    ],
)
def test_a_tree_that_is_none_is_refused(choices: tuple[tuple[int, ...], ...], message: str) -> None:
    with pytest.raises(StartupError, match=message):
        check_choices(choices, 2, 40, "config.json")
