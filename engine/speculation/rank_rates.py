"""How often the first, second, ... child of a node is the one that stands, measured while serving."""

from collections.abc import Iterator, Sequence

from engine.speculation.tree_shape import PRIOR_RATES, TreeShape, likeliest_shape
from engine.token_tree import TokenTree

_PRIOR_WEIGHT = 50.0  # Verdicts that count as much as the prior.
_MAX_CHILDREN = 8
_MEMORY = 4000.0  # Verdicts remembered; then all count half, so that rates follow what is served.


class RankRates:
    """Acceptance by rank, shrunk to a prior while little is known.

    A rank is counted only where its parent was reached and had a child of that rank: a child that was never
    looked at has not failed.

    Args:
        prior: The rate of each rank before anything was measured.
    """

    def __init__(self, prior: Sequence[float] = PRIOR_RATES) -> None:
        self._prior = tuple(prior)
        self._tried = [0.0] * len(self._prior)
        self._stood = [0.0] * len(self._prior)

    def note(self, tree: TokenTree, committed: Sequence[int]) -> int:
        """Enters a verdict.

        Args:
            tree: What was proposed.
            committed: The tokens that have come since.

        Returns:
            How many nodes with children were reached.
        """
        verdicts = list(verdicts_on(tree, committed))
        for num_children, rank in verdicts:
            self.count(num_children, rank)
        return len(verdicts)

    def rates(self) -> tuple[float, ...]:
        """Per rank, never rising."""
        rates: list[float] = []
        for prior, tried, stood in zip(self._prior, self._tried, self._stood, strict=True):
            rate = (prior * _PRIOR_WEIGHT + stood) / (_PRIOR_WEIGHT + tried)
            rates.append(min(rate, rates[-1]) if rates else rate)
        return tuple(rates)

    def best_shape(self, max_nodes: int, max_depth: int) -> TreeShape:
        """The tree with the most accepted tokens to be expected."""
        return likeliest_shape(self.rates(), max_nodes, (_MAX_CHILDREN,) * max_depth)

    def count(self, num_children: int, rank: int | None) -> None:
        """Enters one node's verdict: how many children it had, and which of them stood, None for none."""
        for place in range(min(num_children, len(self._tried))):
            self._tried[place] += 1
        if rank is not None and rank < len(self._stood):
            self._stood[rank] += 1
        if self._tried[0] > _MEMORY:
            self._tried = [count / 2 for count in self._tried]
            self._stood = [count / 2 for count in self._stood]


def verdicts_on(tree: TokenTree, committed: Sequence[int]) -> Iterator[tuple[int, int | None]]:
    """Per reached node with children, from the root down: how many it had, and which of them stood.

    Args:
        tree: What was proposed.
        committed: The tokens that have come since.

    Yields:
        The number of children, and the rank of the one that stood, None for none.
    """
    node = 0
    for token in committed:
        children = tree.children(node)
        if not children:
            return
        tokens = [tree.tokens[child - 1] for child in children]
        rank = tokens.index(token) if token in tokens else None
        yield len(children), rank
        if rank is None:
            return
        node = children[rank]
