"""The motion of a draft model's cache: what is in it, what stands after a verdict, what is computed next."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from engine.model.input_batch import SequenceSlice
from engine.speculation.base import DraftRequest
from engine.token_tree import EMPTY_TREE, TokenTree


@dataclass(frozen=True, slots=True)
class Progress:
    """How far the cache of a request is.

    Attributes:
        num_computed: Leading tokens computed; all of them committed.
        placed: Draft nodes computed behind them: node p in slot num_computed - 1 + p.
        proposed: The draft as it was proposed.
        step: The step in which the nodes were computed.
    """

    num_computed: int
    placed: TokenTree = EMPTY_TREE
    proposed: TokenTree = EMPTY_TREE
    step: int = 0

    def with_proposed(self, tree: TokenTree) -> "Progress":
        """The same, once the draft is complete."""
        return replace(self, proposed=tree)


def cached_path(progress: Progress, token_ids: Sequence[int], *, is_recent: bool) -> tuple[int, ...]:
    """The computed nodes that have become committed tokens, from the first.

    Args:
        progress: What the cache holds.
        token_ids: Committed tokens.
        is_recent: Whether nobody can have written into the scratch slots since. Where somebody can, only
            nodes that lie where their tokens belong are counted: there everybody writes the same.
    """
    tree = progress.placed
    nodes = [0]
    for token in token_ids[progress.num_computed :]:
        # Siblings drawn with replacement may say the same.
        found = [child for node in nodes for child in tree.children(node) if tree.tokens[child - 1] == token]
        if not found:
            break
        nodes = found
    path = tree.path(nodes[0])
    if is_recent:
        return path
    num_in_line = next((place for place, node in enumerate(path) if node != place + 1), len(path))
    return path[:num_in_line]


def moves(
    progress: Progress, path: Sequence[int], block_table: Sequence[int], block_size: int
) -> Iterator[tuple[int, int]]:
    """From which cache slot to which the nodes of a path move to lie in line behind the computed tokens."""

    def slot(index: int) -> int:
        return block_table[index // block_size] * block_size + index % block_size

    for place, node in enumerate(path, start=1):
        if node != place:
            yield slot(progress.num_computed - 1 + node), slot(progress.num_computed - 1 + place)


@dataclass(frozen=True, slots=True)
class Motion:
    """Committed tokens `begin` to `end` of a request, to be computed."""

    request: DraftRequest
    begin: int
    end: int

    def __len__(self) -> int:
        return self.end - self.begin

    @property
    def is_complete(self) -> bool:
        """Whether it yields the row of the draft's first level."""
        return self.request.budget > 0 and self.end == len(self.request.token_ids)

    def shortened(self, num_tokens: int) -> "Motion":
        """The first `num_tokens` of it."""
        return Motion(self.request, self.begin, min(self.end, self.begin + num_tokens))

    def slice(self) -> SequenceSlice:
        """Its part of a forward pass."""
        tokens = self.request.token_ids[self.begin : self.end]
        return SequenceSlice(tokens, self.begin, self.request.block_table, rows=int(self.is_complete))


def plan_motions(motions: Iterable[Motion], num_tokens: int) -> list[Motion]:
    """What each request computes in one pass of `num_tokens` tokens at most.

    Those that may draft and miss the least come first, and everyone is left a token, so that whoever cannot
    catch up at once still makes progress.
    """
    wanted = sorted(motions, key=lambda motion: (motion.request.budget == 0, len(motion)))
    spare = num_tokens
    planned: list[Motion] = []
    for index, motion in enumerate(wanted):
        num_behind = len(wanted) - index - 1
        allowed = max(spare - num_behind, min(spare, 1))
        motion = motion.shortened(allowed)
        if len(motion):
            planned.append(motion)
            spare -= len(motion)
    return planned
