"""Chains: as long as they may be, or as the draft is sure enough of them."""

from collections.abc import Sequence

from engine.speculation.chain import ChainPlan
from engine.speculation.confidence import ConfidenceBook
from engine.speculation.growth import DrawnNode, Growth
from engine.token_tree import Proposal, TokenTree


class ChainGrowth:
    """One child each, until the chain is long enough or no longer likely enough to stand.

    Args:
        length: Levels at most.
        book: What confidences are worth.
        least: Behind a lesser chance there is no further level; 0 looks at no confidence.
    """

    def __init__(self, length: int, book: ConfidenceBook, least: float) -> None:
        self._length = length
        self._book = book
        self._least = least
        self.needs_probabilities = least > 0.0

    @property
    def chain(self) -> ChainPlan | None:
        """See Growth."""
        return ChainPlan(self._length, self._least, self._book.chances) if self._length else None

    def width(self, node: int) -> int:
        """See Growth."""
        return int(node < self._length)

    def drawn(self, parent: int, rank: int) -> None:
        """See Growth."""

    def to_compute(self, nodes: Sequence[DrawnNode], level: range, num_places: int) -> list[int]:
        """See Growth."""
        if len(nodes) >= self._length:
            return []
        if self._least and self._book.chance([node.confidence for node in nodes]) < self._least:
            return []
        return list(level)[:num_places]

    def selected(self, nodes: Sequence[DrawnNode]) -> list[int]:
        """See Growth."""
        return list(range(1, len(nodes) + 1))


class ChainGardener:
    """Chains as long as they may be, or as the draft is sure enough of them.

    Confidence ends no chain whose tokens were drawn for a ratio rule: it would be sound behind a token that
    is checked, but that is not proven for each of those rules.
    """

    usual_shape = None
    ends_early = True

    def __init__(self) -> None:
        self._books = {proposal: ConfidenceBook() for proposal in Proposal}

    def start(self, proposal: Proposal, num_nodes: int, max_depth: int, least: float = 0.0) -> Growth:
        """See Gardener."""
        length = min(num_nodes, max_depth)
        return ChainGrowth(length, self._books[proposal], 0.0 if proposal.is_drawn else least)

    def note(self, tree: TokenTree, committed: Sequence[int]) -> None:
        """See Gardener."""
        self._books[tree.proposal].note(tree, committed)
