"""The rules that judge by distributions, each put together from its odds and the walk as the sampler does."""

from engine.sampling.odds import (
    Accepts,
    BlockOdds,
    LawAt,
    SiblingLaws,
    SiblingOdds,
    TypicalOdds,
    is_possible,
)
from engine.sampling.verification import Verdict, verdict
from engine.token_tree import TokenTree


def verify_siblings(
    tree: TokenTree, law_at: LawAt, draft_law_of: LawAt, sibling_laws: SiblingLaws, accepts: Accepts
) -> Verdict:
    return verdict(SiblingOdds(tree, law_at, draft_law_of, sibling_laws), accepts)


def verify_block(tree: TokenTree, law_at: LawAt, draft_law_of: LawAt, accepts: Accepts) -> Verdict:
    return verdict(BlockOdds(tree, law_at, draft_law_of), accepts)


def follow_typical(tree: TokenTree, law_at: LawAt) -> Verdict:
    return verdict(TypicalOdds(tree, law_at), is_possible)
