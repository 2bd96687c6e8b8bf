"""How often each candidate of each Medusa head is right, measured while serving."""

from collections.abc import Sequence

from engine.speculation.heads.medusa_tree import PRIOR_HEAD_RATES, likeliest_choices, shape_of
from engine.speculation.rank_rates import RankRates, verdicts_on
from engine.speculation.tree_shape import TreeShape
from engine.token_tree import TokenTree


class HeadRates:
    """Acceptance by head and rank, where the node above stood. Later heads guess further and are right less.

    Args:
        num_heads: Heads that there are.
    """

    def __init__(self, num_heads: int) -> None:
        last = len(PRIOR_HEAD_RATES) - 1
        self._heads = [RankRates(PRIOR_HEAD_RATES[min(head, last)]) for head in range(num_heads)]

    def note(self, tree: TokenTree, committed: Sequence[int]) -> int:
        """See ShapeRates."""
        verdicts = list(verdicts_on(tree, committed))
        for head, (num_children, rank) in zip(self._heads, verdicts, strict=False):
            head.count(num_children, rank)
        return len(verdicts)

    def best_shape(self, max_nodes: int, max_depth: int) -> TreeShape:
        """See ShapeRates: the likeliest paths, one by one."""
        rates = [head.rates() for head in self._heads[:max_depth]]
        return shape_of(likeliest_choices(rates, max_nodes))
