"""Shapes of fixed trees: widths as SpecInfer has them, Sequoia's optimum against its own dynamic program."""

import random
from collections.abc import Sequence
from functools import cache

import pytest

from engine.speculation.tree_shape import PRIOR_RATES, TreeShape, likeliest_shape


def value(shape: TreeShape, rates: Sequence[float]) -> float:
    """Tokens that a step is expected to commit: 1, and per node the product of the rates along its path."""
    worths = [1.0]
    ranks: dict[int, int] = {}
    for parent in shape.parents:
        rank = ranks[parent] = ranks.get(parent, -1) + 1
        worths.append(worths[parent] * rates[rank])
    return sum(worths)


def best_value(rates: Sequence[float], num_nodes: int, max_depth: int) -> float:
    """Sequoia's dynamic program (Chen et al. 2024, section 3.1) over trees of so many nodes and a root."""

    @cache
    def best(size: int, depth: int, num_children: int) -> float:
        # Trees of `size` nodes, the root among them, that has exactly so many children.
        if num_children == 0:
            return 1.0 if size == 1 else float("-inf")
        if depth == 0:
            return float("-inf")
        # The last child's subtree has y nodes.
        return max(
            (
                best(size - y, depth, num_children - 1) + rates[num_children - 1] * best_of(y, depth - 1)
                for y in range(1, size)
            ),
            default=float("-inf"),
        )

    @cache
    def best_of(size: int, depth: int) -> float:
        return max(best(size, depth, num_children) for num_children in range(len(rates) + 1))

    return max(best_of(size, max_depth) for size in range(1, num_nodes + 2))


@pytest.mark.parametrize("seed", range(20))
def test_the_likeliest_nodes_are_what_the_dynamic_program_finds(seed: int) -> None:
    rng = random.Random(seed)
    rates = sorted((rng.random() for _ in range(rng.randint(1, 4))), reverse=True)
    num_nodes, max_depth = rng.randint(1, 12), rng.randint(1, 5)
    shape = likeliest_shape(rates, num_nodes, (len(rates),) * max_depth)
    assert value(shape, rates) == pytest.approx(best_value(rates, num_nodes, max_depth), abs=1e-12)
    assert len(shape) <= num_nodes
    assert max(shape.depths()) <= max_depth


def test_a_good_draft_gets_a_chain_and_a_poor_one_siblings() -> None:
    assert likeliest_shape((0.95, 0.02), 6, (2,) * 8) == TreeShape.chain(6)
    assert likeliest_shape((0.2, 0.19, 0.18), 3, (3,) * 8).parents == (0, 0, 0)


@pytest.mark.parametrize(
    ("widths", "per_level"), [((3, 2, 1, 1), (3, 6, 6, 6)), ((1, 1, 3), (1, 1, 3)), ((4,), (4,))]
)
def test_widths_count_the_children_of_every_node(widths: tuple[int, ...], per_level: tuple[int, ...]) -> None:
    shape = likeliest_shape(PRIOR_RATES, sum(per_level), widths)
    depths = shape.depths()
    assert tuple(depths.count(depth + 1) for depth in range(len(widths))) == per_level
    children = shape.children()
    assert all(
        len(children[node]) == (widths[depth] if depth < len(widths) else 0)
        for node, depth in enumerate(depths)
    )


def test_with_less_room_a_tree_keeps_what_is_worth_most() -> None:
    shape = likeliest_shape(PRIOR_RATES, 21, (3, 2, 1, 1))
    # The likeliest path first, and another first token before its fourth.
    assert shape.fitted(3, 9) == TreeShape.chain(3)
    assert shape.fitted(4, 9).parents == (0, 1, 2, 0)
    for num_nodes in range(1, 22):
        assert shape.fitted(num_nodes, 9) == likeliest_shape(PRIOR_RATES, num_nodes, (3, 2, 1, 1))


@pytest.mark.parametrize("max_depth", [1, 2, 3, 4, 5])
def test_with_less_depth_a_tree_loses_levels_and_not_siblings(max_depth: int) -> None:
    shape = likeliest_shape(PRIOR_RATES, 21, (3, 2, 1, 1)).fitted(63, max_depth)
    depths = shape.depths()
    assert [depths.count(depth) for depth in range(1, 5)] == [3, 6, 6, 6][:max_depth] + [0] * (4 - max_depth)
    assert all(parent < node for node, parent in enumerate(shape.parents, start=1))
