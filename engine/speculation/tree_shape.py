"""Shapes of trees that are fixed before a token is drawn, so that the ratio rules may verify them too."""

from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush

# The chance that a node's first, second, ... child is the one that stands, before anything was measured:
# about what a draft of half the target's certainty gets with coupled noise. Each further one has half.
PRIOR_RATES = (0.6, 0.18, 0.09, 0.045)


@dataclass(frozen=True, slots=True)
class TreeShape:
    """A tree without tokens. Nodes are numbered from 1; the root, which has the token before the draft, is 0.

    They are in the order in which they are worth having: whoever has less room takes the first so many.

    Attributes:
        parents: Per node the number of its parent, which comes before it.
    """

    parents: tuple[int, ...]

    @classmethod
    def chain(cls, num_nodes: int) -> "TreeShape":
        """One child per node."""
        return cls(tuple(range(num_nodes)))

    def __len__(self) -> int:
        """The number of nodes, the root not counted."""
        return len(self.parents)

    @property
    def is_chain(self) -> bool:
        """Whether no node has two children."""
        return self.parents == tuple(range(len(self)))

    def depths(self) -> tuple[int, ...]:
        """Distance from the root of each node, the root (0) included."""
        depths = [0]
        for parent in self.parents:
            depths.append(depths[parent] + 1)
        return tuple(depths)

    def children(self) -> tuple[tuple[int, ...], ...]:
        """The children of each node, the root included, in the order of their ranks."""
        children: list[list[int]] = [[] for _ in range(len(self) + 1)]
        for node, parent in enumerate(self.parents, start=1):
            children[parent].append(node)
        return tuple(map(tuple, children))

    def fitted(self, num_nodes: int, max_depth: int) -> "TreeShape":
        """The first `num_nodes` of the nodes that are at most `max_depth` deep."""
        kept = [node for node, depth in enumerate(self.depths()) if depth <= max_depth][: num_nodes + 1]
        if len(kept) == len(self) + 1:
            return self
        number = {node: place for place, node in enumerate(kept)}
        return TreeShape(tuple(number[self.parents[node - 1]] for node in kept[1:]))


def likeliest_shape(rates: Sequence[float], num_nodes: int, widths: Sequence[int]) -> TreeShape:
    """The tree of `num_nodes` nodes with the most accepted tokens to be expected.

    A child of rank b stands with probability rates[b] where its parent does, so a node is worth the product
    of the rates along its path, and the tree their sum. Where rates fall with the rank, no node is worth more
    than its parent or the sibling before it, and the most valuable nodes are a tree: taking them one by one
    gives what Sequoia's dynamic program does (Chen et al. 2024, section 3.1), at each number of nodes.

    Args:
        rates: Per rank, falling; ranks behind the last have half the rate of the one before.
        num_nodes: Nodes at most.
        widths: Per depth, from the root's, how many children a node may have; no child behind the last.
    """
    parents: list[int] = []
    # The next child of each node that may have one more: falling worth, then the order of their finding.
    candidates: list[tuple[float, int, int, int, int]] = []
    num_found = 0

    def find(parent: int, rank: int, depth: int, worth: float) -> None:
        nonlocal num_found
        if depth < len(widths) and rank < widths[depth]:
            heappush(candidates, (-worth * _rate(rates, rank), num_found, parent, rank, depth))
            num_found += 1

    worths = [1.0]
    find(0, 0, 0, 1.0)
    while candidates and len(parents) < num_nodes:
        falling, _, parent, rank, depth = heappop(candidates)
        parents.append(parent)
        worths.append(-falling)
        find(parent, rank + 1, depth, worths[parent])
        find(len(parents), 0, depth + 1, -falling)
    return TreeShape(tuple(parents))


def _rate(rates: Sequence[float], rank: int) -> float:
    return rates[rank] if rank < len(rates) else rates[-1] * 0.5 ** (rank - len(rates) + 1)
