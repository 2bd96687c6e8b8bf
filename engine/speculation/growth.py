"""Which trees a draft model grows: chains, fixed widths, Sequoia's shape, or by probability (EAGLE-2).

A Gardener lasts as long as the engine; it starts a Growth per request and step, which decides level by level.
"""

from collections.abc import Callable, Sequence
from typing import Protocol

from engine.speculation.chain import ChainPlan
from engine.speculation.rank_rates import RankRates
from engine.speculation.tree_shape import PRIOR_RATES, TreeShape, likeliest_shape
from engine.token_tree import Proposal, TokenTree

_VERDICTS_PER_SHAPE = 64


class DrawnNode(Protocol):
    """What a Growth sees of a node."""

    @property
    def depth(self) -> int:
        """Distance from the root."""

    @property
    def log_probability(self) -> float:
        """Of the path down to it, as the draft model sees it; falls along a path."""

    @property
    def confidence(self) -> float:
        """How sure the draft is of the token, behind its parent."""


class Growth(Protocol):
    """Decides how one tree grows. Nodes are numbered from 1 in the order they were drawn; 0 is the root."""

    @property
    def needs_probabilities(self) -> bool:
        """Whether it looks at what the draft model thinks of each token."""

    @property
    def chain(self) -> ChainPlan | None:
        """What is settled, if each node is to get one child; otherwise None."""

    def width(self, node: int) -> int:
        """How many children to draw for a node that is computed."""

    def drawn(self, parent: int, rank: int) -> None:
        """Learns that the next node is the child of that rank, 0 for the first."""

    def to_compute(self, nodes: Sequence[DrawnNode], level: range, num_places: int) -> list[int]:
        """Which nodes of the level just drawn get children; at most so many."""

    def selected(self, nodes: Sequence[DrawnNode]) -> list[int]:
        """The nodes to propose, in the order in which they are worth having; a parent before its children."""


class Gardener(Protocol):
    """Starts growths; may learn from verdicts."""

    @property
    def usual_shape(self) -> TreeShape | None:
        """What its trees look like, roughly, for who estimates what they bring; None for chains."""

    @property
    def ends_early(self) -> bool:
        """Whether its trees heed `least`."""

    def start(self, proposal: Proposal, num_nodes: int, max_depth: int, least: float = 0.0) -> Growth:
        """How the next tree grows, within `num_nodes` nodes and `max_depth` levels.

        Who ends early lets nothing grow behind a chance to stand below `least`.
        """

    def note(self, tree: TokenTree, committed: Sequence[int]) -> None:
        """Learns which tokens have come since a tree was proposed."""


class ShapedGrowth:
    """Fills a shape with tokens."""

    needs_probabilities = False

    def __init__(self, shape: TreeShape) -> None:
        self.chain = ChainPlan(len(shape)) if shape.is_chain and len(shape) else None
        self._children = shape.children()
        self._numbers = [0]  # Per node in drawn order, its number in the shape.

    def width(self, node: int) -> int:
        """See Growth."""
        return len(self._children[self._numbers[node]])

    def drawn(self, parent: int, rank: int) -> None:
        """See Growth."""
        self._numbers.append(self._children[self._numbers[parent]][rank])

    def to_compute(self, nodes: Sequence[DrawnNode], level: range, num_places: int) -> list[int]:
        """See Growth."""
        return [node for node in level if self.width(node)][:num_places]

    def selected(self, nodes: Sequence[DrawnNode]) -> list[int]:
        """See Growth."""
        return sorted(range(1, len(nodes) + 1), key=self._numbers.__getitem__)


class LikeliestGrowth:
    """EAGLE-2 (Li et al. 2024): expand the likeliest nodes of a level, then keep the likeliest of all.

    A node that is not among the `num_nodes` likeliest so far cannot be in the end, nor can what hangs off it,
    so no pass is spent on it.
    """

    needs_probabilities = True
    chain = None

    def __init__(self, num_nodes: int, max_depth: int, top_k: int) -> None:
        self._num_nodes = num_nodes
        self._max_depth = max_depth
        self._top_k = top_k

    def width(self, node: int) -> int:
        """See Growth."""
        return min(self._top_k, self._num_nodes)

    def drawn(self, parent: int, rank: int) -> None:
        """See Growth."""

    def to_compute(self, nodes: Sequence[DrawnNode], level: range, num_places: int) -> list[int]:
        """See Growth."""
        growing = [
            node for node in self.selected(nodes) if node in level and nodes[node - 1].depth < self._max_depth
        ]
        return sorted(growing[: min(self._top_k, num_places)])

    def selected(self, nodes: Sequence[DrawnNode]) -> list[int]:
        """See Growth."""
        numbers = range(1, len(nodes) + 1)
        return sorted(numbers, key=lambda node: (-nodes[node - 1].log_probability, node))[: self._num_nodes]


class _Unlearning:
    ends_early = False

    def note(self, tree: TokenTree, committed: Sequence[int]) -> None:
        """There is nothing to learn."""


class StaticGardener(_Unlearning):
    """One shape for all; with less room its first nodes."""

    def __init__(self, shape: TreeShape) -> None:
        self._shape = shape

    @property
    def usual_shape(self) -> TreeShape:
        """See Gardener."""
        return self._shape

    def start(self, proposal: Proposal, num_nodes: int, max_depth: int, least: float = 0.0) -> Growth:
        """See Gardener."""
        return ShapedGrowth(self._shape.fitted(num_nodes, max_depth))


class ShapeRates(Protocol):
    """Measures which nodes of trees stand, and knows the shape that this speaks for."""

    def note(self, tree: TokenTree, committed: Sequence[int]) -> int:
        """Enters which tokens have come since a tree was proposed; how many of its nodes were reached."""

    def best_shape(self, max_nodes: int, max_depth: int) -> TreeShape:
        """The tree with the most accepted tokens to be expected."""


class SequoiaGardener:
    """The best shape for the acceptance that was measured so far, apart for each way of drawing.

    A tree's shape depends on earlier verdicts only, never on its own tokens, so ratio rules may verify it.

    Args:
        max_nodes: Nodes of a tree at most.
        max_depth: Levels at most.
        make_rates: How acceptance is measured: by rank alone unless said otherwise.
    """

    ends_early = False

    def __init__(
        self, max_nodes: int, max_depth: int, make_rates: Callable[[], ShapeRates] = RankRates
    ) -> None:
        self._max_nodes = max_nodes
        self._max_depth = max_depth
        self._rates = {proposal: make_rates() for proposal in Proposal}
        self._num_since = dict.fromkeys(Proposal, 0)
        self._shapes = {proposal: self._best(proposal) for proposal in Proposal}

    @property
    def usual_shape(self) -> TreeShape:
        """See Gardener."""
        return self._shapes[Proposal.DETERMINISTIC]

    def start(self, proposal: Proposal, num_nodes: int, max_depth: int, least: float = 0.0) -> Growth:
        """See Gardener."""
        return ShapedGrowth(self._shapes[proposal].fitted(num_nodes, max_depth))

    def note(self, tree: TokenTree, committed: Sequence[int]) -> None:
        """See Gardener."""
        proposal = tree.proposal
        self._num_since[proposal] += self._rates[proposal].note(tree, committed)
        if self._num_since[proposal] >= _VERDICTS_PER_SHAPE:
            self._num_since[proposal] = 0
            self._shapes[proposal] = self._best(proposal)

    def _best(self, proposal: Proposal) -> TreeShape:
        return self._rates[proposal].best_shape(self._max_nodes, self._max_depth)


class DynamicGardener(_Unlearning):
    """Trees by the draft's own probabilities; for the match rule only: nodes are chosen by their tokens."""

    def __init__(self, max_nodes: int, max_depth: int, top_k: int) -> None:
        self._max_nodes = max_nodes
        self._max_depth = max_depth
        self._top_k = top_k

    @property
    def usual_shape(self) -> TreeShape:
        """See Gardener. Which nodes are the likeliest differs from draft to draft; this is the average's."""
        return likeliest_shape(PRIOR_RATES, self._max_nodes, (self._top_k,) * self._max_depth)

    def start(self, proposal: Proposal, num_nodes: int, max_depth: int, least: float = 0.0) -> Growth:
        """See Gardener.

        Raises:
            ValueError: A ratio rule is to verify the tree, which the settings keep from being asked for.
        """
        if proposal.is_drawn:
            raise ValueError("a dynamic tree drops nodes by their tokens: no ratio rule holds for it")
        return LikeliestGrowth(min(num_nodes, self._max_nodes), min(max_depth, self._max_depth), self._top_k)
