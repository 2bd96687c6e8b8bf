"""Several drafts become one tree: beginnings that they have in common are stored once."""

from collections.abc import Sequence

from engine.token_tree import EMPTY_TREE, MAX_NODES, Proposal, TokenTree


def merge_trees(trees: Sequence[TokenTree], num_nodes: int = MAX_NODES) -> TokenTree:
    """One tree with the paths of all, for the match rule, which does not ask where a node comes from.

    The drafts take turns, node by node in each one's own order, so that where room is short each has its
    first nodes in.

    Args:
        trees: Drafts that hang off the same token, the most promising first.
        num_nodes: Nodes at most.

    Raises:
        ValueError: A draft was drawn from recorded distributions, which a ratio rule would need in order.
    """
    trees = [tree for tree in trees if len(tree)]
    if any(tree.proposal.is_drawn for tree in trees):
        raise ValueError("drafts that were drawn cannot be merged: each rule judges one draft's siblings")
    if not trees:
        return EMPTY_TREE
    numbers: dict[tuple[int, int], int] = {}  # (parent, token): the node, in the merged tree.
    merged = [[0] for _ in trees]  # Per draft, its nodes' numbers in the merged tree.
    for place in range(max(map(len, trees))):
        for tree, known in zip(trees, merged, strict=True):
            if place < len(tree):
                edge = known[tree.parents[place]], tree.tokens[place]
                known.append(numbers.setdefault(edge, len(numbers) + 1))
    coupled = any(tree.proposal is Proposal.COUPLED for tree in trees)
    edges = list(numbers)[:num_nodes]
    return TokenTree(
        tuple(token for _, token in edges),
        tuple(parent for parent, _ in edges),
        Proposal.COUPLED if coupled else Proposal.DETERMINISTIC,
    )
