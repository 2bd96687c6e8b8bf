"""The verification rules, proven by enumeration: no sampling, no seeds, exact probabilities.

On a vocabulary of a few tokens every draft, every coin and every choice can be gone through, weighted with
its probability. What comes out is the joint law of the emitted tokens, and it has to be the law of the target
generating alone. A run shorter than the longest one is continued by the target.
"""

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pytest
import torch

from engine.sampling.verification import (
    acceptance_probabilities,
    count_accepted,
    follow_choices,
    residual,
)
from engine.token_tree import TokenTree

TOLERANCE = 1e-12
NUM_PAIRS = 200

# tables[k][x_1, ..., x_k] is the law of token k + 1 behind those tokens.
Tables = list[torch.Tensor]


def random_tables(vocab_size: int, length: int, generator: torch.Generator, zeros: float = 0.0) -> Tables:
    tables = []
    for depth in range(length):
        logits = 2 * torch.randn([vocab_size] * (depth + 1), generator=generator, dtype=torch.float64)
        # Truncated distributions have zeros; the first token always stays possible.
        cut = torch.rand(logits.shape, generator=generator) < zeros
        cut[..., 0] = False
        tables.append(logits.masked_fill(cut, -torch.inf).softmax(dim=-1))
    return tables


def own_law(target: Tables) -> torch.Tensor:
    """The joint law of as many tokens as there are tables, generated one by one."""
    law = torch.ones((), dtype=torch.float64)
    for table in target:
        law = law[..., None] * table
    return law


class RunLaw:
    """Collects runs with their probabilities; shorter ones are continued by the target."""

    def __init__(self, target: Tables) -> None:
        self._target = target
        self._masses = [torch.zeros_like(table) for table in target]

    def add(self, run: Sequence[int], probability: float) -> None:
        self._masses[len(run) - 1][tuple(run)] += probability

    def distance(self) -> float:
        """Total variation distance from the target's own law."""
        law = self._masses[0]
        for mass, table in zip(self._masses[1:], self._target[1:], strict=True):
            law = law[..., None] * table + mass
        return float((law - own_law(self._target)).abs().sum() / 2)


@dataclass(frozen=True)
class ChainRule:
    """A rejection rule and its drafter; the tests plant errors by replacing one part."""

    drawn_from: Callable[[torch.Tensor], torch.Tensor] = lambda q: q
    is_submitted: Callable[[torch.Tensor, int], bool] = lambda q, token: True
    accept: Callable[[torch.Tensor, torch.Tensor, Sequence[int]], list[float]] = acceptance_probabilities
    replacement: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] = residual


def chain_distance(rule: ChainRule, target: Tables, draft: Tables) -> float:
    """Enumerates all drafts, all coins and all next tokens of a chain as long as the draft's tables."""
    law = RunLaw(target)
    vocab_size = len(target[0])
    for tokens in itertools.product(range(vocab_size), repeat=len(draft)):
        q = torch.stack([draft[depth][tokens[:depth]] for depth in range(len(draft))])
        p = torch.stack([target[depth][tokens[:depth]] for depth in range(len(draft) + 1)])
        weight = math.prod(float(rule.drawn_from(row)[token]) for row, token in zip(q, tokens, strict=True))
        if weight == 0.0:
            continue
        submitted = [rule.is_submitted(row, token) for row, token in zip(q, tokens, strict=True)]
        length = submitted.index(False) if False in submitted else len(tokens)
        chances = rule.accept(p[: length + 1], q[:length], tokens[:length]) if length else []
        for count in range(length + 1):
            rejected = count < length
            probability = weight * math.prod(chances[:count]) * (1 - chances[count] if rejected else 1.0)
            last = rule.replacement(p[count], q[count]) if rejected and probability > 0 else p[count]
            for token in range(vocab_size):
                law.add((*tokens[:count], token), probability * float(last[token]))
    return law.distance()


def chain_distances(rule: ChainRule, num_pairs: int) -> list[float]:
    """Distances over random pairs of target and draft: 3 to 5 tokens, 1 to 3 drafts, a quarter with zeros."""
    generator = torch.Generator().manual_seed(2023)
    distances = []
    for pair in range(num_pairs):
        vocab_size, length = 3 + pair % 3, 1 + pair // 3 % 3
        zeros = 0.4 if pair % 4 == 0 else 0.0
        target = random_tables(vocab_size, length + 1, generator, zeros)
        draft = random_tables(vocab_size, length, generator, zeros)
        distances.append(chain_distance(rule, target, draft))
    return distances


def test_rejection_emits_exactly_the_targets_law() -> None:
    assert max(chain_distances(ChainRule(), NUM_PAIRS)) <= TOLERANCE


def test_rejection_of_a_draft_that_equals_the_target() -> None:
    target = random_tables(4, 3, torch.Generator().manual_seed(5))
    assert chain_distance(ChainRule(), target, target[:2]) <= TOLERANCE


def one_hot_of_best(q: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.one_hot(q.argmax(), len(q)).to(q)


def excess_without_renormalising(p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    # What an inverse-CDF draw does with a sum below 1: the missing mass falls to the last token.
    law = (p - q).clamp(min=0)
    law[-1] += 1 - law.sum()
    return law


def always_accept_first(p: torch.Tensor, q: torch.Tensor, tokens: Sequence[int]) -> list[float]:
    return [1.0, *acceptance_probabilities(p, q, tokens)[1:]]


def wrong_q(p: torch.Tensor, q: torch.Tensor, tokens: Sequence[int]) -> list[float]:
    return acceptance_probabilities(p, (q**2) / (q**2).sum(dim=-1, keepdim=True), tokens)


@pytest.mark.parametrize(
    ("rule", "mean"),
    [
        (ChainRule(drawn_from=one_hot_of_best), 0.1),
        (ChainRule(is_submitted=lambda q, token: bool(q[token] >= 0.15)), 0.02),
        (ChainRule(replacement=excess_without_renormalising), 0.1),
        (ChainRule(replacement=lambda p, q: p), 0.05),
        (ChainRule(accept=wrong_q), 0.02),
        (ChainRule(accept=always_accept_first), 0.1),
    ],
    ids=[
        "deterministic draft by ratio",
        "unlikely draft token dropped",
        "residual not renormalised",
        "replacement drawn from p",
        "q is not what was drawn from",
        "first token not checked",
    ],
)
def test_enumeration_catches_planted_errors(rule: ChainRule, mean: float) -> None:
    distances = chain_distances(rule, NUM_PAIRS // 4)
    assert sum(distances) / len(distances) > mean
    assert max(distances) > 0.1


def test_coins_decide_with_exactly_the_given_chances() -> None:
    # Chances in eighths and coins in the middle of eighths: counting is integrating.
    chances = [5 / 8, 3 / 8, 1.0]
    grid = [(step + 0.5) / 8 for step in range(8)]
    counts = [0] * 4
    for coins in itertools.product(grid, repeat=3):
        counts[count_accepted(chances, coins)] += 1
    assert [count / 8**3 for count in counts] == [3 / 8, 5 / 8 * 5 / 8, 0.0, 5 / 8 * 3 / 8]


def test_chance_zero_and_one_hold_for_every_coin() -> None:
    for coin in (2.0**-53, 0.5, 1 - 2.0**-53):
        assert count_accepted([0.0], [coin]) == 0
        assert count_accepted([1.0], [coin]) == 1


def test_edges_of_the_ratio() -> None:
    p = torch.tensor([[0.5, 0.5, 0.0], [1.0, 0.0, 0.0]])
    q = torch.tensor([[0.0, 0.25, 0.75]])
    assert acceptance_probabilities(p, q, [0]) == [0.0]  # not drawn from q
    assert acceptance_probabilities(p, q, [1]) == [1.0]
    assert acceptance_probabilities(p, q, [2]) == [0.0]
    torch.testing.assert_close(residual(p[0], q[0]), torch.tensor([2 / 3, 1 / 3, 0.0]))
    assert torch.equal(residual(p[0], p[0]), p[0])


def random_tree(generator: torch.Generator, num_nodes: int, vocab_size: int) -> TokenTree:
    tokens = torch.randint(vocab_size, (num_nodes,), generator=generator).tolist()
    parents = [int(torch.randint(node, (), generator=generator)) for node in range(1, num_nodes + 1)]
    return TokenTree(tuple(tokens), tuple(parents))


Walk = Callable[[TokenTree, Sequence[int]], tuple[int, ...]]


def emitted(walk: Walk, tree: TokenTree, choices: Sequence[int]) -> tuple[int, ...]:
    accepted = walk(tree, choices)
    return (*(tree.tokens[node - 1] for node in accepted), choices[accepted[-1] if accepted else 0])


def tree_distances(walk: Walk) -> list[float]:
    """Enumerates the target's choice at every node of random trees, siblings and duplicates included."""
    generator = torch.Generator().manual_seed(7)
    distances = []
    for pair in range(NUM_PAIRS):
        vocab_size, num_nodes = ((3, 1 + pair % 4), (4, 1 + pair % 3), (5, 1 + pair % 2))[pair % 3]
        tree = random_tree(generator, num_nodes, vocab_size)
        target = random_tables(vocab_size, max(tree.depths()) + 1, generator)
        rows = [target[depth][tree.path_tokens(node)] for node, depth in enumerate(tree.depths())]
        law = RunLaw(target)
        for choices in itertools.product(range(vocab_size), repeat=num_nodes + 1):
            weight = math.prod(float(row[choice]) for row, choice in zip(rows, choices, strict=True))
            law.add(emitted(walk, tree, choices), weight)
        distances.append(law.distance())
    return distances


def test_match_emits_exactly_the_targets_law_for_any_tree() -> None:
    assert max(tree_distances(follow_choices)) <= TOLERANCE


def test_enumeration_catches_an_unchecked_first_node() -> None:
    def unchecked(tree: TokenTree, choices: Sequence[int]) -> tuple[int, ...]:
        return follow_choices(tree, (tree.tokens[0], *choices[1:]))

    assert sum(tree_distances(unchecked)) / NUM_PAIRS > 0.1


def test_enumeration_catches_a_walk_that_reads_the_wrong_row() -> None:
    def shifted(tree: TokenTree, choices: Sequence[int]) -> tuple[int, ...]:
        return follow_choices(tree, (choices[0], *choices[:-1]))

    assert sum(tree_distances(shifted)) / NUM_PAIRS > 0.02


def test_match_holds_for_drafts_that_look_at_the_targets_noise() -> None:
    """Each candidate may depend in any way on the target's choice at its place, as coupled drafts do."""
    generator = torch.Generator().manual_seed(11)
    for _ in range(20):
        target = random_tables(3, 3, generator)
        kernels = random_tables(3, 4, generator)  # law of a candidate, given its prefix and the choice there
        law = RunLaw(target)
        for t1, c1, t2, c2, t3 in itertools.product(range(3), repeat=5):
            weight = target[0][t1] * kernels[1][t1, c1] * target[1][c1, t2]
            weight *= kernels[2][c1, t2, c2] * target[2][c1, c2, t3]
            law.add(emitted(follow_choices, TokenTree.chain([c1, c2]), (t1, t2, t3)), float(weight))
        assert law.distance() <= TOLERANCE


def test_the_walk_takes_the_branch_that_was_chosen() -> None:
    #  root ── a(1) ── c(3) ── e(5)
    #      └── b(2) ── d(4)
    tree = TokenTree((10, 20, 30, 40, 50), (0, 0, 1, 2, 3))
    assert follow_choices(tree, (20, 0, 40, 0, 7, 0)) == (2, 4)
    assert follow_choices(tree, (10, 30, 0, 50, 0, 7)) == (1, 3, 5)
    assert follow_choices(tree, (10, 40, 0, 0, 0, 0)) == (1,)
    assert follow_choices(tree, (7, 30, 40, 50, 0, 0)) == ()
    assert follow_choices(TokenTree(), (7,)) == ()
