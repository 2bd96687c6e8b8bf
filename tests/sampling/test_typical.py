"""Typical acceptance: what it takes, and that it is lossy, which is why nobody gets it unasked."""

import math

import pytest
import torch

from engine.sampling.odds import TYPICAL_DELTA, TYPICAL_EPSILON, typical_threshold
from engine.token_tree import TokenTree
from tests.sampling.enumeration import RunLaw, random_tables
from tests.sampling.rules import follow_typical


def test_the_threshold_is_medusas() -> None:
    peaked = torch.tensor([1.0, 0.0, 0.0])
    assert float(typical_threshold(peaked)) == TYPICAL_EPSILON
    flat = torch.full((1000,), 1 / 1000)
    assert float(typical_threshold(flat)) == pytest.approx(TYPICAL_DELTA / 1000, rel=1e-4)
    p = torch.tensor([0.6, 0.3, 0.1])
    entropy = -sum(x * math.log(x) for x in (0.6, 0.3, 0.1))
    assert float(typical_threshold(p)) == pytest.approx(min(0.09, 0.3 * math.exp(-entropy)))


def test_the_longest_path_wins_and_among_those_the_likeliest() -> None:
    #  root ── 0(1) ── 2(3)
    #      ├── 1(2) ── 0(4)
    #      │        └─ 1(5)
    #      └── 3(6), which the target finds too unlikely, ── 0(7) ── 0(8)
    tree = TokenTree((0, 1, 2, 0, 1, 3, 0, 0), (0, 0, 1, 2, 2, 0, 6, 7))
    laws = {
        0: torch.tensor([0.6, 0.35, 0.049, 0.001]),
        1: torch.tensor([0.97, 0.01, 0.01, 0.01]),
        2: torch.tensor([0.3, 0.7, 0.0, 0.0]),
        6: torch.tensor([1.0, 0.0, 0.0, 0.0]),
        7: torch.tensor([1.0, 0.0, 0.0, 0.0]),
    }
    assert follow_typical(tree, laws.__getitem__).accepted == (2, 5)
    assert follow_typical(tree, {**laws, 2: laws[6]}.__getitem__).accepted == (2, 4)
    assert follow_typical(tree.truncated(2), laws.__getitem__).accepted == (1,)
    assert follow_typical(TokenTree.chain([3, 0]), laws.__getitem__).accepted == ()
    assert follow_typical(TokenTree(), laws.__getitem__).accepted == ()


def test_the_law_is_not_the_targets() -> None:
    generator = torch.Generator().manual_seed(1)
    found = []
    for _ in range(40):
        target = random_tables(5, 2, generator)
        best = int(target[0].argmax())
        law = RunLaw(target)
        accepted = follow_typical(TokenTree.chain([best]), lambda node, p=target[0]: p).accepted  # type: ignore[misc]
        law.add_all((best,) if accepted else (), target[len(accepted)][(best,) * len(accepted)], 1.0)
        found.append(law.distance())
    assert sum(found) / len(found) > 0.2
