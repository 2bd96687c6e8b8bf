"""What the rules of `verification.py` make of a draft's laws: the half that tensors do, and no coin.

The odds of a node are the same whatever the coins show, so that they can be asked for all nodes of a tree
before anything of it is known on the host. Nothing here waits for a tensor; the walks take plain numbers.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Protocol

import torch

from engine.token_tree import TokenTree

# Medusa's settings: a token needs this probability, or less where the target is unsure.
TYPICAL_EPSILON = 0.09
TYPICAL_DELTA = 0.3

LawAt = Callable[[int], torch.Tensor]
"""The target's distribution at a node, [vocab_size]; called for the nodes that a walk reaches."""

Accepts = Callable[[int, float], bool]
"""Whether a node stands, given the chance that it should: a coin, or all of its sides one after the other."""

ChanceOf = Callable[[int], float]
"""What `Odds.chance` says of a node, on the host."""


class Odds(Protocol):
    """What a rule makes of a tree and its laws, whatever the coins show."""

    def chance(self, node: int) -> torch.Tensor:
        """How a draft node fares where the walk comes to it: float64 []."""

    def ending(self, node: int) -> torch.Tensor | None:
        """The next token's law where the walk ends at a node, [vocab_size]; None: the target's own there."""

    def walk(self, chance_of: ChanceOf, accepts: Accepts) -> tuple[int, ...]:
        """The nodes that stand, from the root's child downwards; looks at no tensor."""


def acceptance_chance(p: torch.Tensor, q: torch.Tensor, token: int) -> torch.Tensor:
    """min(1, p(x) / q(x)) in float64; 0 where q(x) is 0, since such a token was not drawn from q."""
    drawn = q[token].double()
    return torch.where(drawn > 0.0, p[token].double() / drawn, 0.0).clamp_(max=1.0)


def residual(p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """What the target still wants once a token drawn from q has fallen: norm(max(p - q, 0)).

    Args:
        p: What it wanted before, [vocab_size]; with a factor below 1 in block verification.
        q: The distribution that the token was drawn from, [vocab_size].

    Returns:
        A distribution [vocab_size]; p itself where nothing of p exceeds q, as when the two are equal.
    """
    excess = (p - q).clamp_(min=0)
    total = excess.sum()
    return torch.where(total > 0, excess / total, p)


def drawn_independently(tokens: Sequence[int], laws: Iterable[torch.Tensor]) -> Iterator[torch.Tensor]:
    """The law of each sibling drawn with replacement, given those before it: its own, whatever came."""
    return iter(laws)


def drawn_distinct(tokens: Sequence[int], laws: Iterable[torch.Tensor]) -> Iterator[torch.Tensor]:
    """The law of each sibling drawn without replacement, given those before it.

    Args:
        tokens: The siblings' tokens in the order drawn.
        laws: Per sibling the draft's distribution [vocab_size], nothing taken out.

    Yields:
        norm(q without the tokens before). Once that leaves nothing, a sibling was not drawn but is just
        there, and the law that says so is 1 at its token: it stands with the chance that the target gives it.
    """
    for rank, (token, law) in enumerate(zip(tokens, laws, strict=True)):
        if rank == 0:
            yield law
            continue
        left = law.clone()
        for fallen in tokens[:rank]:
            left[fallen] = 0.0
        total = left.sum()
        just_there = torch.zeros_like(left)
        just_there[token] = 1.0
        yield torch.where(total > 0, left / total, just_there)


SiblingLaws = Callable[[Sequence[int], Iterable[torch.Tensor]], Iterator[torch.Tensor]]


class SiblingOdds:
    """A tree whose tokens were drawn, judged level by level.

    Args:
        tree: The draft, siblings in the order drawn.
        law_at: p per node.
        draft_law_of: Per draft node the q that its parent's row had.
        sibling_laws: How siblings were drawn: `drawn_independently` or `drawn_distinct`.
    """

    def __init__(
        self, tree: TokenTree, law_at: LawAt, draft_law_of: LawAt, sibling_laws: SiblingLaws
    ) -> None:
        self._tree = tree
        self._law_at = law_at
        self._draft_law_of = draft_law_of
        self._sibling_laws = sibling_laws
        self._families: dict[int, _Family] = {}

    def chance(self, node: int) -> torch.Tensor:
        """That a node stands once its elder siblings have fallen."""
        parent = self._tree.parents[node - 1]
        rank = self._tree.children(parent).index(node)
        return self._family(parent).chance(rank, self._tree.tokens[node - 1])

    def ending(self, node: int) -> torch.Tensor | None:
        """What the target wants once all children of a node have fallen."""
        children = self._tree.children(node)
        return self._family(node).wanted(len(children)) if children else None

    def walk(self, chance_of: ChanceOf, accepts: Accepts) -> tuple[int, ...]:
        """Level by level, in each to the first child that stands."""
        accepted: tuple[int, ...] = ()
        children = self._tree.children(0)
        while children:
            node = next((child for child in children if accepts(child, chance_of(child))), None)
            if node is None:
                break
            accepted = (*accepted, node)
            children = self._tree.children(node)
        return accepted

    def _family(self, node: int) -> "_Family":
        if node not in self._families:
            children = self._tree.children(node)
            tokens = [self._tree.tokens[child - 1] for child in children]
            laws = self._sibling_laws(tokens, map(self._draft_law_of, children))
            self._families[node] = _Family(self._law_at(node), laws)
        return self._families[node]


class _Family:
    """The children of one node: what the target wants of each, and what each was drawn from."""

    def __init__(self, wanted: torch.Tensor, laws: Iterator[torch.Tensor]) -> None:
        self._wanted = [wanted]
        self._unread = laws
        self._laws: list[torch.Tensor] = []

    def wanted(self, num_fallen: int) -> torch.Tensor:
        while len(self._wanted) <= num_fallen:
            self._wanted.append(residual(self._wanted[-1], self._law(len(self._wanted) - 1)))
        return self._wanted[num_fallen]

    def chance(self, rank: int, token: int) -> torch.Tensor:
        return acceptance_chance(self.wanted(rank), self._law(rank), token)

    def _law(self, rank: int) -> torch.Tensor:
        while len(self._laws) <= rank:
            self._laws.append(next(self._unread))
        return self._laws[rank]


class BlockOdds:
    """A drawn chain, judged as a whole.

    With r_0 = 1 and r_i = min(1, r_{i-1} p_i(x_i) / q_i(x_i)), the first i tokens can stand with chance
    h_i = R_i / (R_i + 1 - r_i), where R_i = sum_x max(r_i p_{i+1}(x) - q_{i+1}(x), 0); the whole chain with
    r_gamma. The most that can stand do. Behind fewer than all the next token's law is
    norm(max(r_i p_{i+1} - q_{i+1}, 0)).

    Args:
        tree: The draft, a chain.
        law_at: p per node.
        draft_law_of: q per draft node.
    """

    def __init__(self, tree: TokenTree, law_at: LawAt, draft_law_of: LawAt) -> None:
        self._target = [law_at(node) for node in range(len(tree))]
        self._draft = [draft_law_of(node) for node in range(1, len(tree) + 1)]
        self._ratios: list[torch.Tensor] = []
        for p, q, token in zip(self._target, self._draft, tree.tokens, strict=True):
            drawn = q[token].double()
            before = self._ratios[-1] if self._ratios else torch.ones_like(drawn)
            ratio = torch.where(drawn > 0.0, before * p[token].double() / drawn, 0.0)
            self._ratios.append(ratio.clamp_(max=1.0))

    def chance(self, node: int) -> torch.Tensor:
        """h_i, that the first `node` tokens can stand."""
        ratio = self._ratios[node - 1]
        if node == len(self._draft):
            return ratio
        return block_chance(self._target[node], self._draft[node], ratio)

    def ending(self, node: int) -> torch.Tensor | None:
        """The law behind the first `node` tokens."""
        if node == len(self._draft):
            return None
        p = self._target[node]
        return residual(self._ratios[node - 1] * p if node else p, self._draft[node])

    def walk(self, chance_of: ChanceOf, accepts: Accepts) -> tuple[int, ...]:
        """The most that can stand, asked from the end."""
        lengths = range(len(self._draft), 0, -1)
        count = next((count for count in lengths if accepts(count, chance_of(count))), 0)
        return tuple(range(1, count + 1))


def block_chance(p: torch.Tensor, q: torch.Tensor, ratio: torch.Tensor) -> torch.Tensor:
    """h_i of block verification, from p_{i+1}, q_{i+1} and r_i; 1 where r_i is 1."""
    excess = (ratio * p - q).clamp_(min=0).sum().double()
    return torch.where(ratio == 1.0, 1.0, excess / (excess + 1.0 - ratio))


class TypicalOdds:
    """Medusa's typical acceptance: the longest path whose tokens the target all finds likely enough.

    Of several such paths the one that the target finds likeliest is taken, the first among equals. Lossy:
    which of the likely tokens are said is up to the draft, and what is unlikely is said too seldom.

    Args:
        tree: The draft.
        law_at: p per node.
    """

    def __init__(self, tree: TokenTree, law_at: LawAt) -> None:
        self._tree = tree
        self._law_at = law_at
        self._known: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def chance(self, node: int) -> torch.Tensor:
        """How likely the target finds a node; 0 where that is not likely enough."""
        parent = self._tree.parents[node - 1]
        if parent not in self._known:
            law = self._law_at(parent)
            self._known[parent] = law, typical_threshold(law)
        p, threshold = self._known[parent]
        found = p[self._tree.tokens[node - 1]].double()
        return torch.where(found > threshold, found, 0.0)

    def ending(self, node: int) -> torch.Tensor | None:
        """The target's own."""
        return None

    def walk(self, chance_of: ChanceOf, accepts: Accepts) -> tuple[int, ...]:
        """The longest path of likely nodes, and of those the likeliest."""
        best = (0, 0.0)
        accepted: tuple[int, ...] = ()
        reached: list[tuple[tuple[int, ...], float]] = [((), 0.0)]
        for path, likelihood in reached:
            if (len(path), likelihood) > best:
                best, accepted = (len(path), likelihood), path
            for child in self._tree.children(path[-1] if path else 0):
                chance = chance_of(child)
                if accepts(child, chance):
                    reached.append(((*path, child), likelihood + math.log(chance)))
        return accepted


def typical_threshold(p: torch.Tensor) -> torch.Tensor:
    """min(epsilon, delta * exp(-H(p))), H the entropy in nats: above it a token is likely; float64 []."""
    entropy = torch.special.entr(p).sum().double()
    return (TYPICAL_DELTA * torch.exp(-entropy)).clamp_(max=TYPICAL_EPSILON)


def is_possible(node: int, chance: float) -> bool:
    """The coin of a rule that throws none."""
    return chance > 0.0
