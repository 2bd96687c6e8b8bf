"""Block verification, proven by enumeration, and what it gains over judging token by token."""

from collections.abc import Callable

import pytest
import torch

from engine.sampling import odds
from engine.sampling.odds import Accepts, LawAt, block_chance, drawn_independently, residual
from engine.sampling.verification import Verdict
from engine.token_tree import TokenTree
from tests.sampling.enumeration import (
    TOLERANCE,
    Chance,
    Draws,
    Experiment,
    Judge,
    Tables,
    Tokens,
    distance,
    distances,
    independently,
    random_tables,
)
from tests.sampling.rules import verify_block, verify_siblings

BLOCK = Experiment(independently, verify_block)


@pytest.mark.parametrize(
    ("vocab_size", "length", "num_pairs"),
    [*[(size, 1, 40) for size in (3, 4, 5)], *[(size, 2, 20) for size in (3, 4, 5)], (3, 3, 12), (4, 3, 4)],
)
def test_the_law_is_exactly_the_targets(vocab_size: int, length: int, num_pairs: int) -> None:
    assert max(distances(BLOCK, vocab_size, (1,) * length, num_pairs)) <= TOLERANCE


def test_truncated_laws() -> None:
    assert max(distances(BLOCK, 4, (1, 1, 1), num_pairs=10, zeros=0.6)) <= TOLERANCE


def test_a_draft_that_equals_the_target_stands_whole() -> None:
    target = random_tables(4, 3, torch.Generator().manual_seed(5))
    assert distance(BLOCK, (1, 1), target, target[:2]) <= TOLERANCE
    assert mean_accepted(BLOCK, target, target[:2]) == pytest.approx(2.0, abs=1e-12)


def by_token(tree: TokenTree, law_at: LawAt, draft_law_of: LawAt, accepts: Accepts) -> Verdict:
    return verify_siblings(tree, law_at, draft_law_of, drawn_independently, accepts)


def judged(judge: Judge, tokens: Tokens, target: Tables, draft: Tables, accepts: Accepts) -> Verdict:
    """The verdict on a chain of given tokens."""

    def law_at(node: int) -> torch.Tensor:
        return target[node][tokens[:node]]

    def draft_law_of(node: int) -> torch.Tensor:
        return draft[node - 1][tokens[: node - 1]]

    return judge(TokenTree.chain(tokens), law_at, draft_law_of, accepts)


def test_a_chain_of_one_is_rejection_sampling() -> None:
    generator = torch.Generator().manual_seed(8)
    for _ in range(20):
        target, draft = random_tables(5, 2, generator), random_tables(5, 1, generator)
        for token in range(5):
            chances: list[float] = []

            def refuse(node: int, chance: float, chances: list[float] = chances) -> bool:
                chances.append(chance)
                return False

            one, other = (
                judged(judge, (token,), target, draft, refuse) for judge in (verify_block, by_token)
            )
            assert chances[0] == chances[1]
            assert one.residual is not None
            assert other.residual is not None
            assert torch.equal(one.residual, other.residual)


def mean_accepted(experiment: Experiment, target: Tables, draft: Tables) -> float:
    chance = Chance()
    mean = 0.0
    for _ in chance.outcomes():
        prefix: Tokens = ()
        for table in draft:
            prefix = (*prefix, chance.draws(table[prefix]))
        verdict = judged(experiment.judge, prefix, target, draft, chance.accepts)
        mean += chance.probability * len(verdict.accepted)
    return mean


def test_it_never_accepts_less_than_token_by_token() -> None:
    generator = torch.Generator().manual_seed(9)
    gains = []
    for _ in range(10):
        target, draft = random_tables(3, 4, generator), random_tables(3, 3, generator)
        ours = mean_accepted(BLOCK, target, draft)
        gains.append(ours - mean_accepted(Experiment(independently, by_token), target, draft))
    assert min(gains) > -1e-12
    assert sum(gains) / len(gains) > 0.01


# Planted in the drawing.


def likeliest(q: torch.Tensor, count: int) -> dict[Tokens, float]:
    return {(int(q.argmax()),): 1.0}


def unlikely_ones_dropped(q: torch.Tensor, count: int) -> dict[Tokens, float]:
    """A chain that ends before a token because of what the token is."""
    law = independently(q, 1)
    kept = {tokens: p for tokens, p in law.items() if q[tokens[0]] >= 0.15}
    return {**kept, (): 1.0 - sum(kept.values())}


@pytest.mark.parametrize("draws", [likeliest, unlikely_ones_dropped])
def test_enumeration_catches_wrong_draws(draws: Draws) -> None:
    found = distances(Experiment(draws, verify_block), 4, (1, 1), num_pairs=20)
    assert sum(found) / len(found) > 0.03


# Planted in the functions of the rule.


def token_chance(p: torch.Tensor, q: torch.Tensor, ratio: torch.Tensor) -> torch.Tensor:
    """The ratio so far, as though the chain ended here."""
    return ratio


def without_remainder(p: torch.Tensor, q: torch.Tensor, ratio: torch.Tensor) -> float:
    """The chance without what the ratio leaves over."""
    excess = float((ratio * p - q).clamp(min=0).sum())
    return min(1.0, excess)


def of_p_alone(p: torch.Tensor, q: torch.Tensor, ratio: torch.Tensor) -> torch.Tensor:
    return block_chance(p, q, torch.ones_like(ratio))


MISTAKEN: dict[str, tuple[str, Callable[..., object]]] = {
    "each length by its ratio": ("block_chance", token_chance),
    "excess alone": ("block_chance", without_remainder),
    "excess of p, not of the ratio times p": ("block_chance", of_p_alone),
    "residual not normalised": ("residual", lambda p, q: (p - q).clamp(min=0)),
    "residual of p, not of the ratio times p": ("residual", lambda p, q: residual(p / p.sum(), q)),
    "the target's own law after a rejection": ("residual", lambda p, q: p / p.sum()),
}


@pytest.mark.parametrize(("name", "mistake"), MISTAKEN.values(), ids=MISTAKEN)
def test_enumeration_catches_mistakes_in_the_rule(
    monkeypatch: pytest.MonkeyPatch, name: str, mistake: Callable[..., object]
) -> None:
    monkeypatch.setattr(odds, name, mistake)
    found = distances(BLOCK, 4, (1, 1), num_pairs=20)
    assert sum(found) / len(found) > 0.002


def first_refusal_ends_it(tree: TokenTree, law_at: LawAt, draft_law_of: LawAt, accepts: Accepts) -> Verdict:
    """Tosses from the front and stops at the first coin that says no, as one does token by token."""
    chances: dict[int, float] = {}
    verify_block(tree, law_at, draft_law_of, lambda node, chance: chances.update({node: chance}) is not None)
    stand: list[int] = []
    for length in sorted(chances):
        if not accepts(length, chances[length]):
            break
        stand.append(length)
    return verify_block(tree, law_at, draft_law_of, lambda node, chance: node in stand)


def test_enumeration_catches_a_walk_from_the_front() -> None:
    found = distances(Experiment(independently, first_refusal_ends_it), 4, (1, 1), num_pairs=20)
    assert sum(found) / len(found) > 0.005
