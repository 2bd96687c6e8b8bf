"""Chains end where the draft is not sure enough of them; what its confidence is worth is measured."""

import random
from dataclasses import replace

import pytest

from engine.speculation.chain_growth import ChainGardener
from engine.speculation.confidence import NUM_BINS, ConfidenceBook, bin_of
from engine.token_tree import Proposal, TokenTree
from tests.speculation.drafting import (
    Blocks,
    RecordingRunner,
    Text,
    greedy_chain,
    make_drafter,
    next_logits,
    propose,
    random_tokens,
)
from tests.tiny import tiny_model


def chain(tokens: tuple[int, ...], confidences: tuple[float, ...]) -> TokenTree:
    return replace(TokenTree.chain(tokens), confidences=confidences)


def test_before_anything_is_known_confidence_is_believed() -> None:
    assert ConfidenceBook().chances == pytest.approx([0.05 + place / 10 for place in range(NUM_BINS)])


def test_chances_become_what_stood() -> None:
    """A draft that says 0.95 and is right half of the time, and says 0.25 and is always right."""
    book = ConfidenceBook()
    draw = random.Random(0)
    for _ in range(2000):
        book.note(chain((1, 2), (0.25, 0.95)), (1, 2 if draw.random() < 0.5 else 3))
    assert book.chances[bin_of(0.95)] == pytest.approx(0.5, abs=0.08)
    assert book.chances[bin_of(0.25)] > 0.95
    assert book.chance([0.25, 0.95]) == pytest.approx(book.chances[2] * book.chances[9])


def test_what_lies_behind_a_rejected_token_was_not_tested() -> None:
    book = ConfidenceBook()
    before = book.chances
    for _ in range(50):
        book.note(chain((1, 2), (0.15, 0.95)), (7, 2))
        book.note(chain((1, 2), (0.15, 0.95)), (7,))
    assert book.chances[1] < before[1]
    assert book.chances[9] == before[9]


def test_trees_without_confidences_and_drafts_without_a_verdict_say_nothing() -> None:
    book = ConfidenceBook()
    before = book.chances
    book.note(TokenTree.chain((1, 2)), (1, 2))
    book.note(chain((1,), (0.5,)), ())
    assert book.chances == before


@pytest.mark.parametrize("proposal", [Proposal.SAMPLED, Proposal.SAMPLED_DISTINCT])
def test_no_chain_for_a_ratio_rule_ends_early(proposal: Proposal) -> None:
    plan = ChainGardener().start(proposal, 5, 5, 0.9).chain
    assert plan is not None
    assert (plan.length, plan.least) == (5, 0.0)


def test_a_draft_model_stops_where_it_is_not_sure_and_makes_no_pass_for_the_rest() -> None:
    plain = tiny_model("llama", attention="eager")
    runner = RecordingRunner(tiny_model("llama"))
    text = Text("a", random_tokens(9, 3), Blocks())
    tokens = greedy_chain(plain, text.tokens, 6)
    shares = [
        float(next_logits(plain, [*text.tokens, *tokens[:depth]]).softmax(dim=-1).max()) for depth in range(6)
    ]
    speculator = make_drafter(runner)
    # Nothing is known yet: a bin's chance is its middle.
    products = [ConfidenceBook().chance(shares[:depth]) for depth in range(1, 7)]
    for length, least in ((6, 0.0), (3, (products[1] + products[2]) / 2), (1, (products[0] + 1) / 2)):
        runner.passes.clear()
        [tree] = propose(speculator, replace(text.ask(6), least=least))
        assert tree.tokens == tokens[:length]
        assert len(runner.passes) == length
        assert tree.confidences == (pytest.approx(shares[:length], rel=1e-3) if least else (1.0,) * 0)
    assert speculator.num_computed_tokens("a") == len(text.tokens)
