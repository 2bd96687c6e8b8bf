"""How often the first, second, ... child of a node is the one that stands, measured while serving."""

from collections.abc import Sequence

from engine.speculation.tree_shape import PRIOR_RATES
from engine.token_tree import TokenTree

_PRIOR_WEIGHT = 50.0  # Verdicts that count as much as the prior.
_MEMORY = 4000.0  # Verdicts remembered; then all count half, so that rates follow what is served.


class RankRates:
    """Acceptance by rank, shrunk to a prior while little is known.

    A rank is counted only where its parent was reached and had a child of that rank: a child that was never
    looked at has not failed.
    """

    def __init__(self) -> None:
        self._tried = [0.0] * len(PRIOR_RATES)
        self._stood = [0.0] * len(PRIOR_RATES)

    def note(self, tree: TokenTree, committed: Sequence[int]) -> int:
        """Enters a verdict.

        Args:
            tree: What was proposed.
            committed: The tokens that have come since.

        Returns:
            How many nodes with children were reached.
        """
        node = num_reached = 0
        for token in committed:
            children = tree.children(node)
            if not children:
                break
            tokens = [tree.tokens[child - 1] for child in children]
            rank = tokens.index(token) if token in tokens else None
            self._count(len(children), rank)
            num_reached += 1
            if rank is None:
                break
            node = children[rank]
        return num_reached

    def rates(self) -> tuple[float, ...]:
        """Per rank, never rising."""
        rates: list[float] = []
        for prior, tried, stood in zip(PRIOR_RATES, self._tried, self._stood, strict=True):
            rate = (prior * _PRIOR_WEIGHT + stood) / (_PRIOR_WEIGHT + tried)
            rates.append(min(rate, rates[-1]) if rates else rate)
        return tuple(rates)

    def _count(self, num_children: int, rank: int | None) -> None:
        for place in range(min(num_children, len(self._tried))):
            self._tried[place] += 1
        if rank is not None and rank < len(self._stood):
            self._stood[rank] += 1
        if self._tried[0] > _MEMORY:
            self._tried = [count / 2 for count in self._tried]
            self._stood = [count / 2 for count in self._stood]
