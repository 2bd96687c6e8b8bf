"""Drawn siblings, proven by enumeration: multi-step sampling, recursive rejection, and chains by ratio.

The planted errors below are the ways in which implementations go wrong. Each is planted either in how the
draft draws (the rule is told the truth about q, and the draft does something else), or in one function of
`engine/sampling/odds.py`, replaced while the enumeration runs.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence

import pytest
import torch

from engine.sampling import odds
from engine.sampling.odds import (
    Accepts,
    LawAt,
    SiblingLaws,
    acceptance_chance,
    drawn_distinct,
    drawn_independently,
    residual,
)
from engine.sampling.verification import Verdict
from engine.token_tree import TokenTree
from tests.sampling.enumeration import (
    TOLERANCE,
    Draws,
    Experiment,
    Judge,
    Tokens,
    distance,
    distances,
    independently,
    random_tables,
    without_replacement,
)
from tests.sampling.rules import verify_siblings


def by(sibling_laws: SiblingLaws) -> Judge:
    def judge(tree: TokenTree, law_at: LawAt, draft_law_of: LawAt, accepts: Accepts) -> Verdict:
        return verify_siblings(tree, law_at, draft_law_of, sibling_laws, accepts)

    return judge


MULTI_STEP = Experiment(independently, by(drawn_independently))
RECURSIVE = Experiment(without_replacement, by(drawn_distinct))

BOTH = pytest.mark.parametrize("experiment", [MULTI_STEP, RECURSIVE], ids=["multi-step", "recursive"])

# Vocabulary, children per node by depth, pairs of laws. Every number of siblings at every depth; the larger
# the vocabulary, the smaller the tree, as the outcomes multiply.
SHAPES = [
    *[(3, (1,), 20), (5, (1,), 20), (3, (2,), 20), (5, (2,), 20), (3, (3,), 20), (5, (3,), 4)],
    *[(5, (1, 1), 8), (4, (2, 2), 4), (4, (3, 1), 2), (4, (1, 3), 2), (3, (3, 3), 1)],
    *[(5, (1, 1, 1), 4), (4, (2, 1, 1), 4), (3, (1, 2, 1), 4), (3, (1, 1, 3), 4), (3, (2, 2, 2), 1)],
    (3, (3, 2, 1), 1),
]


@BOTH
@pytest.mark.parametrize(("vocab_size", "widths", "num_pairs"), SHAPES, ids=str)
def test_the_law_is_exactly_the_targets(
    experiment: Experiment, vocab_size: int, widths: Tokens, num_pairs: int
) -> None:
    assert max(distances(experiment, vocab_size, widths, num_pairs)) <= TOLERANCE


@BOTH
def test_three_siblings_at_three_depths_of_truncated_laws(experiment: Experiment) -> None:
    """Distributions with zeros: fewer outcomes, and siblings that the draft had no more mass for."""
    assert max(distances(experiment, 3, (3, 3, 3), num_pairs=2, zeros=0.6)) <= TOLERANCE


@BOTH
def test_a_draft_that_equals_the_target(experiment: Experiment) -> None:
    target = random_tables(4, 3, torch.Generator().manual_seed(5))
    assert distance(experiment, (2, 2), target, target[:2]) <= TOLERANCE


def test_each_sibling_may_come_from_a_draft_of_its_own() -> None:
    """Several draft models feed one tree: the rule takes the law of whoever drew the child."""
    generator = torch.Generator().manual_seed(3)
    for _ in range(10):
        target = random_tables(5, 2, generator)
        first, second = random_tables(5, 1, generator)[0], random_tables(5, 1, generator)[0]

        def pair(q: torch.Tensor, count: int, first: torch.Tensor = first) -> dict[Tokens, float]:
            return {(a, b): float(first[a] * q[b]) for a in range(5) for b in range(5)}

        def laws(
            tokens: Sequence[int], recorded: Iterable[torch.Tensor], first: torch.Tensor = first
        ) -> Iterator[torch.Tensor]:
            return drawn_independently(tokens, (first, *list(recorded)[1:]))

        assert distance(Experiment(pair, by(laws)), (2,), target, [second]) <= TOLERANCE


# Planted in the drawing.


def likeliest(q: torch.Tensor, count: int) -> dict[Tokens, float]:
    return {tuple(q.topk(count).indices.tolist()): 1.0}


def unlikely_ones_dropped(q: torch.Tensor, count: int) -> dict[Tokens, float]:
    """The decision to submit a token looks at the token: it is left out where q is below 0.15."""
    law: dict[Tokens, float] = {}
    for tokens, probability in independently(q, count).items():
        kept = tuple(token for token in tokens if q[token] >= 0.15)
        law[kept] = law.get(kept, 0.0) + probability
    return law


def likeliest_first(q: torch.Tensor, count: int) -> dict[Tokens, float]:
    """Drawn without replacement, then sorted, as by a tree that ranks its nodes: the order drawn is lost."""
    law: dict[Tokens, float] = {}
    for tokens, probability in without_replacement(q, count).items():
        ranked = tuple(sorted(tokens, key=lambda token: -float(q[token])))
        law[ranked] = law.get(ranked, 0.0) + probability
    return law


def duplicates_dropped(q: torch.Tensor, count: int) -> dict[Tokens, float]:
    """Drawn with replacement, then each token once."""
    law: dict[Tokens, float] = {}
    for tokens, probability in independently(q, count).items():
        distinct = tuple(dict.fromkeys(tokens))
        law[distinct] = law.get(distinct, 0.0) + probability
    return law


DRAWN_WRONG: dict[str, tuple[Draws, SiblingLaws, int, float]] = {
    "the likeliest token by ratio": (likeliest, drawn_independently, 1, 0.1),
    "the 2 likeliest as drawn with replacement": (likeliest, drawn_independently, 2, 0.1),
    "the 3 likeliest as drawn with replacement": (likeliest, drawn_independently, 3, 0.1),
    "the 2 likeliest as drawn without": (likeliest, drawn_distinct, 2, 0.1),
    "the 3 likeliest as drawn without": (likeliest, drawn_distinct, 3, 0.1),
    "2 without replacement, q kept": (without_replacement, drawn_independently, 2, 0.01),
    "3 without replacement, q kept": (without_replacement, drawn_independently, 3, 0.01),
    "2 with replacement as drawn without": (independently, drawn_distinct, 2, 0.01),
    "an unlikely token dropped": (unlikely_ones_dropped, drawn_independently, 1, 0.03),
    "unlikely tokens of 2 dropped": (unlikely_ones_dropped, drawn_independently, 2, 0.03),
    "order lost": (likeliest_first, drawn_distinct, 2, 0.01),
    "duplicates dropped, judged as independent": (duplicates_dropped, drawn_independently, 2, 0.005),
}


@pytest.mark.parametrize(("draws", "laws", "count", "mean"), DRAWN_WRONG.values(), ids=DRAWN_WRONG)
def test_enumeration_catches_wrong_draws(draws: Draws, laws: SiblingLaws, count: int, mean: float) -> None:
    found = distances(Experiment(draws, by(laws)), 5, (count,), num_pairs=40 if count < 3 else 10)
    assert sum(found) / len(found) > mean
    assert max(found) > 5 * mean or mean == 0.1


def test_the_first_of_each_token_drawn_is_a_draw_without_replacement() -> None:
    """What looks like an error and is none, however many are left: each was drawn from what q had left."""
    assert max(distances(Experiment(duplicates_dropped, by(drawn_distinct)), 5, (3,), 4)) <= TOLERANCE


# Planted in the functions of the rules.


def not_renormalised(p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """What an inverse-CDF draw does with a sum below 1: the missing mass falls to the last token."""
    law = (p - q).clamp(min=0)
    law[-1] += 1 - law.sum()
    return law


def squared(p: torch.Tensor, q: torch.Tensor, token: int) -> torch.Tensor:
    """A colder q in the ratio than the one that was drawn from."""
    return acceptance_chance(p, q**2 / (q**2).sum(), token)


def without_ratio(p: torch.Tensor, q: torch.Tensor, token: int) -> float:
    """The rule for tokens that were not drawn, for tokens that were; only the residual knows of q."""
    return float(p[token])


MISTAKEN: dict[str, tuple[str, Callable[..., object], float]] = {
    "residual not renormalised": ("residual", not_renormalised, 0.05),
    "the target's own law after a rejection": ("residual", lambda p, q: p, 0.05),
    "the draft's law after a rejection": ("residual", lambda p, q: q, 0.05),
    "residual the wrong way around": ("residual", lambda p, q: residual(q, p), 0.05),
    "another q in the ratio": ("acceptance_chance", squared, 0.02),
    "p alone, not the ratio": ("acceptance_chance", without_ratio, 0.05),
    "always accepted": ("acceptance_chance", lambda p, q, token: 1.0, 0.1),
    "ratio upside down": ("acceptance_chance", lambda p, q, token: acceptance_chance(q, p, token), 0.05),
}


@BOTH
@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize(("name", "mistake", "mean"), MISTAKEN.values(), ids=MISTAKEN)
def test_enumeration_catches_mistakes_in_the_rule(
    monkeypatch: pytest.MonkeyPatch,
    experiment: Experiment,
    count: int,
    name: str,
    mistake: Callable[..., object],
    mean: float,
) -> None:
    monkeypatch.setattr(odds, name, mistake)
    found = distances(experiment, 4, (count,), num_pairs=20)
    assert sum(found) / len(found) > mean


# Planted in a second, shorter form of recursive rejection, which does its two updates side by side.

Update = Callable[[torch.Tensor, torch.Tensor, int], tuple[torch.Tensor, torch.Tensor]]


def updating(update: Update) -> Judge:
    def judge(tree: TokenTree, law_at: LawAt, draft_law_of: LawAt, accepts: Accepts) -> Verdict:
        children = tree.children(0)
        p, q = law_at(0), draft_law_of(children[0])
        for child in children:
            token = tree.tokens[child - 1]
            if accepts(child, float(acceptance_chance(p, q, token))):
                return Verdict((child,))
            p, q = update(p, q, token)
        return Verdict((), p)

    return judge


def zeroed(q: torch.Tensor, token: int) -> torch.Tensor:
    left = q.clone()
    left[token] = 0.0
    return left


def without(q: torch.Tensor, token: int) -> torch.Tensor:
    left = zeroed(q, token)
    return left / left.sum()


def test_the_short_form_is_right_as_it_stands() -> None:
    right = updating(lambda p, q, token: (residual(p, q), without(q, token)))
    assert max(distances(Experiment(without_replacement, right), 5, (3,), 3)) <= TOLERANCE


@pytest.mark.parametrize(
    "update",
    [
        lambda p, q, token: (residual(p, without(q, token)), without(q, token)),
        lambda p, q, token: (p, without(q, token)),
        lambda p, q, token: (residual(p, q), zeroed(q, token)),
        lambda p, q, token: (residual(without(p, token), q), without(q, token)),
        lambda p, q, token: (without(p, token), without(q, token)),
    ],
    ids=[
        "q loses the token before p loses q",
        "p stays",
        "q is not renormalised",
        "p loses the token, too",
        "p loses the token only",
    ],
)
def test_enumeration_catches_mistaken_updates(update: Update) -> None:
    found = distances(Experiment(without_replacement, updating(update)), 5, (2,), num_pairs=20)
    assert sum(found) / len(found) > 0.005
