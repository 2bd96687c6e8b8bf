import random

import pytest

from engine.token_tree import EMPTY_TREE, MAX_NODES, Proposal, TokenTree

#   root ─┬─ 10 ─── 30
#         └─ 20 ─┬─ 40 ─── 60
#                └─ 50
TREE = TokenTree(tokens=(10, 20, 30, 40, 50, 60), parents=(0, 0, 1, 2, 2, 4))


def random_tree(rng: random.Random, num_nodes: int) -> TokenTree:
    return TokenTree(
        tuple(rng.randrange(100) for _ in range(num_nodes)),
        tuple(rng.randrange(node) for node in range(1, num_nodes + 1)),
    )


def test_depths_children_paths_of_a_tree() -> None:
    assert len(TREE) == 6
    assert TREE.depths() == (0, 1, 1, 2, 2, 2, 3)
    assert [TREE.children(node) for node in range(7)] == [(1, 2), (3,), (4, 5), (), (6,), (), ()]
    assert [TREE.path(node) for node in range(7)] == [(), (1,), (2,), (1, 3), (2, 4), (2, 5), (2, 4, 6)]
    assert [TREE.path_tokens(node) for node in (0, 3, 6)] == [(), (10, 30), (20, 40, 60)]


def test_ancestor_words_of_a_tree() -> None:
    assert TREE.ancestor_words() == (0, 0b1, 0b10, 0b101, 0b1010, 0b10010, 0b101010)


def test_chain_is_a_tree_with_one_child_per_node() -> None:
    chain = TokenTree.chain([7, 8, 9])
    assert chain == TokenTree((7, 8, 9), (0, 1, 2))
    assert chain.depths() == (0, 1, 2, 3)
    assert [chain.children(node) for node in range(4)] == [(1,), (2,), (3,), ()]
    assert chain.path_tokens(3) == (7, 8, 9)
    assert chain.ancestor_words() == (0, 0b1, 0b11, 0b111)


def test_empty_tree_is_the_root_alone() -> None:
    assert len(EMPTY_TREE) == 0
    assert TokenTree.chain([]) == EMPTY_TREE
    assert EMPTY_TREE.depths() == EMPTY_TREE.ancestor_words() == (0,)
    assert EMPTY_TREE.children(0) == EMPTY_TREE.path(0) == EMPTY_TREE.path_tokens(0) == ()
    assert EMPTY_TREE.truncated(0) == EMPTY_TREE.truncated(3) == EMPTY_TREE


@pytest.mark.parametrize("seed", range(20))
def test_views_agree_with_each_other(seed: int) -> None:
    rng = random.Random(seed)
    tree = random_tree(rng, rng.randrange(MAX_NODES + 1))
    depths, words = tree.depths(), tree.ancestor_words()
    for node in range(len(tree) + 1):
        path = tree.path(node)
        assert len(path) == depths[node]
        assert words[node] == sum(1 << (step - 1) for step in path)
        assert tree.path_tokens(node) == tuple(tree.tokens[step - 1] for step in path)
        for before, after in zip((0, *path), path, strict=False):
            assert after in tree.children(before)
    assert sorted(child for node in range(len(tree) + 1) for child in tree.children(node)) == list(
        range(1, len(tree) + 1)
    )


@pytest.mark.parametrize("seed", range(10))
def test_any_prefix_of_the_nodes_is_the_same_tree_cut_off(seed: int) -> None:
    tree = random_tree(random.Random(seed), 12)
    for count in range(15):
        cut = tree.truncated(count)
        kept = min(count, 12)
        assert len(cut) == kept
        assert cut.depths() == tree.depths()[: kept + 1]
        assert cut.ancestor_words() == tree.ancestor_words()[: kept + 1]
        assert [cut.path_tokens(node) for node in range(kept + 1)] == [
            tree.path_tokens(node) for node in range(kept + 1)
        ]


def test_truncation_keeps_how_the_tokens_were_proposed() -> None:
    tree = TokenTree.chain([1, 2, 3], Proposal.SAMPLED, ["p1", "p2", "p3"])
    assert tree.truncated(2) == TokenTree.chain([1, 2], Proposal.SAMPLED, ["p1", "p2"])
    assert tree.truncated(0) == TokenTree.chain([], Proposal.SAMPLED)
    assert TokenTree.chain([1, 2], Proposal.COUPLED).truncated(1).proposal is Proposal.COUPLED


def test_most_nodes_fit_a_word_of_63_bits() -> None:
    assert TokenTree.chain(range(MAX_NODES)).ancestor_words()[-1] == 2**63 - 1
    with pytest.raises(ValueError, match="at most 63 draft nodes, got 64"):
        TokenTree.chain(range(MAX_NODES + 1))


@pytest.mark.parametrize("parents", [(1, 0), (0, 2), (0, 3), (0, -1)])
def test_a_parent_that_does_not_come_first_is_refused(parents: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match="parent must come before its child"):
        TokenTree((5, 6), parents)


def test_tokens_and_parents_go_together() -> None:
    with pytest.raises(ValueError, match="2 tokens but 1 parents"):
        TokenTree((5, 6), (0,))


@pytest.mark.parametrize("distributions", [(), ("p",), ("p", "q", "r")])
def test_a_sampled_tree_has_a_distribution_per_node(distributions: tuple[object, ...]) -> None:
    with pytest.raises(ValueError, match="one distribution per draft node"):
        TokenTree.chain([1, 2], Proposal.SAMPLED, distributions)
