"""GrowingTree: one request's draft while a draft model grows it, level by level."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from engine.model.input_batch import SequenceSlice
from engine.sampling.logits import depends_on_ids, truncation
from engine.sampling.row_group import RowGroup
from engine.speculation.base import DraftRequest
from engine.speculation.chain import GREEDY, ChainWish, DraftedChain
from engine.speculation.drawing import STREAMS, Child, RowWish
from engine.speculation.growth import Growth
from engine.token_tree import Proposal, TokenTree


@dataclass(frozen=True, slots=True)
class _Node:
    """A drawn token.

    Attributes:
        token_id: The token.
        parent: Number of the parent in drawn order, 0 for the root.
        depth: Distance from the root.
        log_probability: Of the path, if the growth asked.
        confidence: How sure the draft was of it, likewise.
        distribution: What it was drawn from, if it was.
        is_end: Whether it ends the answer, so that nothing behind it could be used.
    """

    token_id: int
    parent: int
    depth: int
    log_probability: float
    confidence: float
    distribution: torch.Tensor | None
    is_end: bool


class GrowingTree:
    """Numbers nodes from 1 in the order they were drawn, and gives those that are computed a place.

    A place is a scratch slot behind the committed tokens, in the order of computing; leaves have none. With
    n committed tokens and the shape 2, 2, 1:

        drawn      1 2 │ 3 4 5 6 │ 7 8 9 10       the last level needs no pass: its tokens are leaves
        place      1 2 │ 3 4 5 6 │ - - - -        place p lies in slot n - 1 + p

    Args:
        request: Whose draft it is; it has budget for as many places as the growth may ask for.
        proposal: How its tokens are drawn.
        growth: Decides where it grows.
        eos_token_ids: The target's EOS ids.

    Attributes:
        depends_on_ids: Whether what becomes of a row's entry depends on which token it stands for, anywhere.
    """

    def __init__(
        self, request: DraftRequest, proposal: Proposal, growth: Growth, eos_token_ids: frozenset[int]
    ) -> None:
        self.request = request
        self._proposal = proposal
        self._growth = growth
        self._eos_token_ids = eos_token_ids
        root = self._group(((),))
        self._end_token_ids = frozenset(root.banned_token_ids)
        self.depends_on_ids = depends_on_ids(root)
        self._nodes: list[_Node] = []
        self._rows = [0]  # Nodes whose rows the last pass gave.
        self._pending: list[int] = []  # Nodes to compute next.
        self._place = {0: 0}
        self._places: list[int] = []  # The node at each place.

    @property
    def num_rows(self) -> int:
        """Rows that the last pass gave."""
        return len(self._rows)

    @property
    def num_pending(self) -> int:
        """Nodes of the next level that wait to be computed."""
        return len(self._pending)

    def row_group(self) -> RowGroup:
        """What the rows of the last pass are processed by: the history, each node's path as if emitted."""
        return self._group(tuple(self._path(node) for node in self._rows))

    def wishes(self, group: RowGroup) -> list[RowWish]:
        """What is to be drawn from the rows of the last pass."""
        keys = group.noise_keys(STREAMS[self._proposal])
        if self._proposal is Proposal.DETERMINISTIC:
            keys = (None,) * len(keys)
        needs = self._growth.needs_probabilities
        return [
            RowWish(self._proposal, self._growth.width(node), key, needs)
            for node, key in zip(self._rows, keys, strict=True)
        ]

    def chain(self) -> ChainWish | None:
        """What the tree is drawn by in one go: if it is to be a chain, and its rows need no paths."""
        plan = self._growth.chain
        if plan is None or self.depends_on_ids:
            return None
        if self._proposal is Proposal.DETERMINISTIC:
            return ChainWish(plan, GREEDY)
        stream = STREAMS[self._proposal]
        group = self._group(((),))
        keys = tuple(group.noise_key(depth, stream) for depth in range(plan.length))
        return ChainWish(plan, truncation(group.params), keys, self._proposal.is_drawn)

    def fill(self, chain: DraftedChain) -> None:
        """Takes a chain that was drafted in one go, up to a token that ends the answer."""
        drafted = zip(chain.tokens, chain.confidences, chain.distributions, strict=True)
        for parent, (token, confidence, distribution) in enumerate(drafted):
            self._enter(parent, 0, Child(token, math.log(confidence), distribution))
            if self._nodes[-1].is_end:
                break
        self._rows = []

    def add(self, drawn: Sequence[Sequence[Child]]) -> None:
        """Takes the children of the rows of the last pass, and settles which of them are computed next."""
        begin = len(self._nodes) + 1
        for parent, children in zip(self._rows, drawn, strict=True):
            for rank, child in enumerate(children):
                self._enter(parent, rank, child)
        level = range(begin, len(self._nodes) + 1)
        num_places = self.request.budget - len(self._places)
        chosen = self._growth.to_compute(self._nodes, level, num_places)
        self._pending = [node for node in chosen if not self._nodes[node - 1].is_end]
        self._rows = []

    def take(self, num_tokens: int) -> SequenceSlice:
        """The part of a forward pass for the next pending nodes; those before are in their places."""
        taken, self._pending = self._pending[:num_tokens], self._pending[num_tokens:]
        num_cached = len(self._places)
        for node in taken:
            self._places.append(node)
            self._place[node] = len(self._places)
        self._rows += taken
        return SequenceSlice(
            (),
            len(self.request.token_ids),
            self.request.block_table,
            self.placed(),
            rows=len(taken),
            num_cached_nodes=num_cached,
        )

    def placed(self) -> TokenTree:
        """The nodes with a place, numbered by it."""
        nodes = [self._nodes[node - 1] for node in self._places]
        return TokenTree(
            tuple(node.token_id for node in nodes), tuple(self._place[node.parent] for node in nodes)
        )

    def tree(self) -> TokenTree:
        """The draft as it is proposed."""
        chosen = self._growth.selected(self._nodes)
        number = {node: place for place, node in enumerate(chosen, start=1)} | {0: 0}
        nodes = [self._nodes[node - 1] for node in chosen]
        distributions = tuple(node.distribution for node in nodes) if self._proposal.is_drawn else ()
        return TokenTree(
            tuple(node.token_id for node in nodes),
            tuple(number[node.parent] for node in nodes),
            self._proposal,
            distributions,
            confidences=tuple(node.confidence for node in nodes) if self._growth.needs_probabilities else (),
        )

    def _enter(self, parent: int, rank: int, child: Child) -> None:
        above = self._nodes[parent - 1] if parent else None
        self._nodes.append(
            _Node(
                child.token_id,
                parent,
                1 if above is None else above.depth + 1,
                child.log_probability + (0.0 if above is None else above.log_probability),
                math.exp(child.log_probability),
                child.distribution,
                child.token_id in self._end_token_ids,
            )
        )
        self._growth.drawn(parent, rank)

    def _group(self, paths: tuple[tuple[int, ...], ...]) -> RowGroup:
        request = self.request
        return RowGroup(
            request.params,
            request.token_ids,
            request.num_prompt_tokens,
            self._eos_token_ids,
            paths,
            request.matcher,
        )

    def _path(self, node: int) -> tuple[int, ...]:
        tokens: list[int] = []
        while node:
            tokens.append(self._nodes[node - 1].token_id)
            node = self._nodes[node - 1].parent
        return tuple(reversed(tokens))
