"""Gives the rules that look at distributions what they need: rows as laws, and coins from keyed noise."""

import torch

from engine.acceptance import Rule
from engine.sampling.noise import Stream, uniform
from engine.sampling.odds import (
    Accepts,
    BlockOdds,
    LawAt,
    Odds,
    SiblingOdds,
    TypicalOdds,
    drawn_distinct,
    drawn_independently,
    is_possible,
)
from engine.sampling.row_group import RowGroup
from engine.token_tree import TokenTree


def odds_of(rule: Rule, tree: TokenTree, rows: torch.Tensor) -> Odds:
    """What any rule but match makes of a draft; match's choices are better made for many requests at once.

    Args:
        rule: Which one.
        tree: The draft.
        rows: Processed logits of the root and the nodes, [1 + len(tree), vocab_size].

    Raises:
        ValueError: A recorded distribution does not fit the rows; here, or once it is asked for.
    """

    def law_at(node: int) -> torch.Tensor:
        return rows[node].softmax(dim=-1)

    if rule is Rule.TYPICAL:
        return TypicalOdds(tree, law_at)
    draft_law_of = _recorded(tree, rows)
    if rule is Rule.BLOCK:
        return BlockOdds(tree, law_at, draft_law_of)
    sibling_laws = drawn_distinct if rule is Rule.RECURSIVE else drawn_independently
    return SiblingOdds(tree, law_at, draft_law_of, sibling_laws)


def coins_of(rule: Rule, tree: TokenTree, group: RowGroup) -> Accepts:
    """The coins that go with the odds.

    Args:
        rule: Which one.
        tree: The draft.
        group: Whose draft it is.
    """
    if rule is Rule.TYPICAL:
        return is_possible
    return _block_coins(group) if rule is Rule.BLOCK else _sibling_coins(tree, group)


def _recorded(tree: TokenTree, like: torch.Tensor) -> LawAt:
    def draft_law_of(node: int) -> torch.Tensor:
        # Trees know nothing of tensors; this is the one place that says what a distribution is.
        law = tree.distributions[node - 1]
        if not isinstance(law, torch.Tensor) or law.shape != like.shape[1:]:
            raise ValueError(f"a draft distribution must be a tensor of {like.shape[1]} probabilities")
        return law.to(like)

    return draft_law_of


def _sibling_coins(tree: TokenTree, group: RowGroup) -> Accepts:
    """Coins keyed by position and rank: of a step's walk only one node per level has children to try."""
    depths = tree.depths()

    def accepts(node: int, chance: float) -> bool:
        rank = tree.children(tree.parents[node - 1]).index(node)
        return uniform([group.noise_key(depths[node] - 1, Stream.ACCEPT, rank)])[0] < chance

    return accepts


def _block_coins(group: RowGroup) -> Accepts:
    return lambda node, chance: uniform([group.noise_key(node - 1, Stream.ACCEPT)])[0] < chance
