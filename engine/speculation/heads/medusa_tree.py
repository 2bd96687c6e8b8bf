"""Trees of Medusa heads: which candidates are worth a place (Cai et al. 2024, section 2.3.3)."""

from collections.abc import Sequence
from heapq import heappop, heappush

from engine.errors import StartupError
from engine.speculation.tree_shape import TreeShape

Choices = tuple[tuple[int, ...], ...]
"""Index paths: (0, 2) is head 1's third best token below head 0's best. Parents come before children."""

_DECAY = 0.5  # Each further candidate is right about half as often as the one before.


def _prior(first: float, first_five: float) -> tuple[float, ...]:
    shares = [_DECAY**rank for rank in range(4)]
    return first, *(share * (first_five - first) / sum(shares) for share in shares)


PRIOR_HEAD_RATES = tuple(
    _prior(*rates) for rates in ((0.56, 0.78), (0.32, 0.56), (0.20, 0.42), (0.15, 0.34), (0.12, 0.30))
)
"""Per head how often its best, second best, ... token is right, before anything was measured.

From top-1 and top-5 accuracies of the authors' heads for a 7B model.
"""


def likeliest_choices(rates: Sequence[Sequence[float]], num_nodes: int) -> Choices:
    """The paths of the best tree, most valuable first, so that its first nodes are the best smaller tree.

    A path is right with the product of its candidates' rates, which are taken to be independent; the tree
    takes the likeliest paths one by one.

    Args:
        rates: Per head and rank how often that candidate is right, falling with the rank.
        num_nodes: Nodes at most.
    """
    chosen: list[tuple[int, ...]] = []
    candidates: list[tuple[float, tuple[int, ...]]] = []

    def find(parent: tuple[int, ...], rank: int, worth: float) -> None:
        head = len(parent)
        if head < len(rates) and rank < len(rates[head]):
            heappush(candidates, (-worth * rates[head][rank], (*parent, rank)))

    find((), 0, 1.0)
    worths: dict[tuple[int, ...], float] = {(): 1.0}
    while candidates and len(chosen) < num_nodes:
        falling, path = heappop(candidates)
        chosen.append(path)
        worths[path] = -falling
        find(path[:-1], path[-1] + 1, worths[path[:-1]])
        find(path, 0, -falling)
    return tuple(chosen)


def check_choices(choices: Choices | None, num_heads: int, num_tokens: int, where: str) -> Choices | None:
    """A tree that comes with heads, parents first.

    Args:
        choices: Its paths in any order, None for none.
        num_heads: Heads that there are.
        num_tokens: Tokens that each of them scores.
        where: Where it stands, for messages.

    Raises:
        StartupError: A path is longer than there are heads, names a candidate that there is not, or lacks its
            parent or better sibling.
    """
    if choices is None:
        return None
    known = set(choices)
    for path in choices:
        if len(path) > num_heads:
            raise StartupError(
                f"medusa_choices in {where} has the path {list(path)}, but {num_heads} heads are there"
            )
        if max(path) >= num_tokens:
            raise StartupError(
                f"medusa_choices in {where} has the path {list(path)}, but a head scores {num_tokens} tokens"
            )
        if path[:-1] and path[:-1] not in known:
            raise StartupError(
                f"medusa_choices in {where} has the path {list(path)} without {list(path[:-1])}"
            )
        if path[-1] and (*path[:-1], path[-1] - 1) not in known:
            raise StartupError(
                f"medusa_choices in {where} has the path {list(path)}, but not the better candidate before it"
            )
    return tuple(sorted(known, key=lambda path: (len(path), path)))


def shape_of(choices: Choices) -> TreeShape:
    """The tree of some paths, its nodes in their order; the children of a node are ranked from 0.

    Args:
        choices: Parents first, and better siblings before worse.
    """
    number = {(): 0} | {path: place for place, path in enumerate(choices, start=1)}
    return TreeShape(tuple(number[path[:-1]] for path in choices))
