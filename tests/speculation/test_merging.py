"""Several drafts in one tree."""

import random

import pytest
import torch

from engine.speculation.merging import merge_trees
from engine.token_tree import EMPTY_TREE, Proposal, TokenTree


def paths(tree: TokenTree) -> set[tuple[int, ...]]:
    return {tree.path_tokens(node) for node in range(len(tree) + 1)}


def test_common_beginnings_are_stored_once() -> None:
    merged = merge_trees([TokenTree.chain((1, 2, 3)), TokenTree.chain((1, 2, 4)), TokenTree.chain((5,))])
    assert len(merged) == 5
    assert paths(merged) == {(), (1,), (1, 2), (1, 2, 3), (1, 2, 4), (5,)}


@pytest.mark.parametrize("seed", range(10))
def test_every_path_of_every_draft_is_there(seed: int) -> None:
    rng = random.Random(seed)
    trees = []
    for _ in range(3):
        size = rng.randint(0, 12)
        parents = tuple(rng.randint(0, node) for node in range(size))
        trees.append(TokenTree(tuple(rng.randrange(4) for _ in range(size)), parents))
    merged = merge_trees(trees)
    assert paths(merged) == set().union(*map(paths, trees))
    # No two siblings say the same.
    assert len(set(zip(merged.parents, merged.tokens, strict=True))) == len(merged)


def test_with_little_room_each_has_its_first_nodes_in() -> None:
    merged = merge_trees([TokenTree.chain((1, 2, 3, 4)), TokenTree.chain((5, 6, 7, 8))], 5)
    assert paths(merged) == {(), (1,), (1, 2), (1, 2, 3), (5,), (5, 6)}


def test_more_than_a_tree_holds_is_cut() -> None:
    assert len(merge_trees([TokenTree.chain(range(60)), TokenTree.chain(range(60, 120))])) == 63


def test_nothing_of_nothing() -> None:
    assert merge_trees([EMPTY_TREE, EMPTY_TREE]) == EMPTY_TREE
    assert merge_trees([]) == EMPTY_TREE


def test_a_coupled_draft_makes_it_a_coupled_tree() -> None:
    looked_up, coupled = TokenTree.chain((1,)), TokenTree.chain((2,), Proposal.COUPLED)
    assert merge_trees([looked_up, coupled]).proposal is Proposal.COUPLED
    assert merge_trees([looked_up, looked_up]).proposal is Proposal.DETERMINISTIC


def test_drawn_drafts_are_refused() -> None:
    drawn = TokenTree.chain((1,), Proposal.SAMPLED, (torch.ones(3) / 3,))
    with pytest.raises(ValueError, match="cannot be merged"):
        merge_trees([drawn, TokenTree.chain((2,))])
