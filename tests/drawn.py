"""Scripts that really draw their drafts from a distribution, as cheaply as can be: no model, five tokens."""

from bisect import bisect
from collections.abc import Callable, Sequence
from itertools import accumulate

import torch

from engine.sampling.noise import NoiseKey, Stream, uniform
from engine.sampling.row_group import RowGroup
from engine.speculation.base import DraftRequest
from engine.token_tree import Proposal, TokenTree
from tests.scripted import Script

DRAFT_VOCAB = 5
Draw = Callable[[list[float], Sequence[float]], list[int]]


def draft_laws(seed: int = 3) -> torch.Tensor:
    """A made-up draft: per last token the law of the next one, float32 [DRAFT_VOCAB, DRAFT_VOCAB]."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(DRAFT_VOCAB, DRAFT_VOCAB, generator=generator).softmax(dim=-1)


def independently(weights: list[float], numbers: Sequence[float]) -> list[int]:
    """A token per number, drawn with replacement."""
    borders = list(accumulate(weights))
    return [bisect(borders, number * borders[-1]) for number in numbers]


def without_replacement(weights: list[float], numbers: Sequence[float]) -> list[int]:
    """A token per number, each from what those before it left."""
    left = list(weights)
    drawn: list[int] = []
    for number in numbers:
        borders = list(accumulate(left))
        drawn.append(bisect(borders, number * borders[-1]))
        left[drawn[-1]] = 0.0
    return drawn


def likeliest(weights: list[float], numbers: Sequence[float]) -> list[int]:
    """Not drawn at all: a planted error where the tree says that it was."""
    return sorted(range(len(weights)), key=lambda token: -weights[token])[: len(numbers)]


DRAWS: dict[Proposal, Draw] = {
    Proposal.SAMPLED: independently,
    Proposal.SAMPLED_DISTINCT: without_replacement,
}


def drawing(
    parents: Sequence[int],
    proposal: Proposal,
    *,
    draw: Draw | None = None,
    recorded: torch.Tensor | None = None,
) -> Script:
    """Draws a tree of a fixed shape from `draft_laws`, with the request's own noise.

    Args:
        parents: The shape.
        proposal: How siblings are drawn, and what the tree says of it.
        draw: Draws otherwise than the tree says.
        recorded: The laws that the tree says its tokens were drawn from, if those are others.
    """
    laws = draft_laws()
    told = laws if recorded is None else recorded
    weights = laws.double().tolist()
    chosen = draw or DRAWS[proposal]

    def script(request: DraftRequest) -> TokenTree:
        size = min(len(parents), request.budget)
        group = RowGroup(request.params, request.token_ids, request.num_prompt_tokens, frozenset())
        lasts = [request.token_ids[-1], *[0] * size]
        depths = TokenTree((0,) * size, tuple(parents[:size])).depths()
        for node in range(size):
            children = [child for child in range(1, size + 1) if parents[child - 1] == node]
            key = group.noise_key(depths[node], Stream.DRAFT)
            numbers = _numbers(key, node, len(children))
            for child, token in zip(children, chosen(weights[lasts[node]], numbers), strict=True):
                lasts[child] = token
        distributions = tuple(told[lasts[parent]] for parent in parents[:size])
        return TokenTree(tuple(lasts[1:]), tuple(parents[:size]), proposal, distributions)

    return script


def _numbers(key: NoiseKey, node: int, count: int) -> list[float]:
    # A number per node and sibling; those of a key alone would be one per place.
    first = 4096 * key.choice + 64 * node
    return uniform([NoiseKey(key.seed, first + rank, key.position, key.stream) for rank in range(count)])
