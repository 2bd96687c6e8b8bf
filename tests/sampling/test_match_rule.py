"""The match rule, proven by enumeration: any tree, however it was made, leaves the law as it is."""

import itertools
import math
from collections.abc import Callable, Mapping

import pytest
import torch

from engine.sampling.verification import follow_choices
from engine.token_tree import TokenTree
from tests.sampling.enumeration import TOLERANCE, Chance, RunLaw, random_tables

NUM_PAIRS = 200


def random_tree(generator: torch.Generator, num_nodes: int, vocab_size: int) -> TokenTree:
    tokens = torch.randint(vocab_size, (num_nodes,), generator=generator).tolist()
    parents = [int(torch.randint(node, (), generator=generator)) for node in range(1, num_nodes + 1)]
    return TokenTree(tuple(tokens), tuple(parents))


Walk = Callable[[TokenTree, Mapping[int, int]], tuple[int, ...]]


def by_choices(tree: TokenTree, choices: Mapping[int, int]) -> tuple[int, ...]:
    """What is emitted."""
    accepted, token = follow_choices(tree, choices)
    assert token is not None
    return (*(tree.tokens[node - 1] for node in accepted), token)


def tree_distances(walk: Walk) -> list[float]:
    """Enumerates the target's choice at every node of random trees, siblings and duplicates included."""
    generator = torch.Generator().manual_seed(7)
    distances = []
    for pair in range(NUM_PAIRS):
        vocab_size, num_nodes = ((3, 1 + pair % 4), (4, 1 + pair % 3), (5, 1 + pair % 2))[pair % 3]
        tree = random_tree(generator, num_nodes, vocab_size)
        target = random_tables(vocab_size, max(tree.depths()) + 1, generator)
        rows = [target[depth][tree.path_tokens(node)] for node, depth in enumerate(tree.depths())]
        law = RunLaw(target)
        for choices in itertools.product(range(vocab_size), repeat=num_nodes + 1):
            weight = math.prod(float(row[choice]) for row, choice in zip(rows, choices, strict=True))
            law.add(walk(tree, dict(enumerate(choices))), weight)
        distances.append(law.distance())
    return distances


def test_the_law_is_exactly_the_targets_for_any_tree() -> None:
    assert max(tree_distances(by_choices)) <= TOLERANCE


@pytest.mark.parametrize("width", [1, 2, 3])
@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("vocab_size", [3, 5])
def test_full_trees_chosen_from_only_where_the_walk_comes(vocab_size: int, depth: int, width: int) -> None:
    """Trees of the likeliest tokens, the target's choice drawn at the nodes that the walk asks for."""
    generator = torch.Generator().manual_seed(10 * depth + width)
    target = random_tables(vocab_size, depth + 1, generator)
    draft = random_tables(vocab_size, depth, generator)
    tokens: list[int] = []
    parents: list[int] = []
    paths: list[tuple[int, ...]] = [()]
    for node, path in enumerate(paths):
        if len(path) < depth:
            best = draft[len(path)][path].topk(width).indices.tolist()
            tokens += best
            parents += [node] * width
            paths += [(*path, token) for token in best]
    tree = TokenTree(tuple(tokens), tuple(parents))
    law = RunLaw(target)
    chance = Chance()
    for _ in chance.outcomes():
        accepted: tuple[int, ...] = ()
        token = None
        while token is None:
            node = accepted[-1] if accepted else 0
            choice = chance.draws(target[len(accepted)][tree.path_tokens(node)])
            accepted, token = follow_choices(tree, {node: choice}, accepted)
        law.add((*(tree.tokens[node - 1] for node in accepted), token), chance.probability)
    assert law.distance() <= TOLERANCE


def test_enumeration_catches_an_unchecked_first_node() -> None:
    def unchecked(tree: TokenTree, choices: Mapping[int, int]) -> tuple[int, ...]:
        return by_choices(tree, {**choices, 0: tree.tokens[0]})

    assert sum(tree_distances(unchecked)) / NUM_PAIRS > 0.1


def test_enumeration_catches_a_walk_that_reads_the_wrong_row() -> None:
    def shifted(tree: TokenTree, choices: Mapping[int, int]) -> tuple[int, ...]:
        return by_choices(tree, {node: choices[max(node - 1, 0)] for node in choices})

    assert sum(tree_distances(shifted)) / NUM_PAIRS > 0.02


def test_enumeration_catches_a_row_of_the_wrong_branch() -> None:
    """The last of the siblings is read wherever one of them was accepted."""

    def crossed(tree: TokenTree, choices: Mapping[int, int]) -> tuple[int, ...]:
        last = {node: tree.children(tree.parents[node - 1])[-1] for node in range(1, len(tree) + 1)}
        return by_choices(tree, {node: choices[last.get(node, 0)] for node in choices})

    assert sum(tree_distances(crossed)) / NUM_PAIRS > 0.005


def test_it_holds_for_drafts_that_look_at_the_targets_noise() -> None:
    """Each candidate may depend in any way on the target's choice at its place, as coupled drafts do."""
    generator = torch.Generator().manual_seed(11)
    for _ in range(20):
        target = random_tables(3, 3, generator)
        kernels = random_tables(3, 4, generator)  # law of a candidate, given its prefix and the choice there
        law = RunLaw(target)
        for t1, c1, t2, c2, t3 in itertools.product(range(3), repeat=5):
            weight = target[0][t1] * kernels[1][t1, c1] * target[1][c1, t2]
            weight *= kernels[2][c1, t2, c2] * target[2][c1, c2, t3]
            law.add(by_choices(TokenTree.chain([c1, c2]), {0: t1, 1: t2, 2: t3}), float(weight))
        assert law.distance() <= TOLERANCE


def test_the_walk_takes_the_branch_that_was_chosen() -> None:
    #  root ── a(1) ── c(3) ── e(5)
    #      └── b(2) ── d(4)
    tree = TokenTree((10, 20, 30, 40, 50), (0, 0, 1, 2, 3))

    def followed(*choices: int) -> tuple[int, ...]:
        return follow_choices(tree, dict(enumerate(choices)))[0]

    assert followed(20, 0, 40, 0, 7, 0) == (2, 4)
    assert followed(10, 30, 0, 50, 0, 7) == (1, 3, 5)
    assert followed(10, 40, 0, 0, 0, 0) == (1,)
    assert followed(7, 30, 40, 50, 0, 0) == ()
    assert follow_choices(TokenTree(), {0: 7}) == ((), 7)


def test_the_walk_waits_where_the_target_has_not_chosen() -> None:
    tree = TokenTree.chain([10, 20])
    assert follow_choices(tree, {}) == ((), None)
    assert follow_choices(tree, {0: 10}) == ((1,), None)
    assert follow_choices(tree, {1: 20}, (1,)) == ((1, 2), None)
    assert follow_choices(tree, {2: 5}, (1, 2)) == ((1, 2), 5)
