"""The ratio rules through the whole engine: the law of an answer's first tokens is the target's own.

See `small_law` for the model and the statistic.
"""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from engine.engine_core import EngineCore
from engine.sampling_params import Acceptance, SamplingParams, SpeculationParams
from engine.speculation.base import ProposalContext, Requirements, Speculator
from engine.token_tree import EMPTY_TREE, Proposal, TokenTree
from tests.drawn import Draw, drawing, likeliest
from tests.engine.small_law import DEPTH, PROMPT, TEMPERATURE, VOCAB, exact_law, excess, models, threshold
from tests.engines import build_llm
from tests.scripted import ScriptedSpeculator

NUM_SEEDS = 2000
WISHES = SamplingParams(
    temperature=TEMPERATURE,
    # Room for one more token, so that tokens 2 and 3 are both drafted in the step after the prompt's.
    max_tokens=DEPTH + 1,
    speculation=SpeculationParams(acceptance=Acceptance.REJECTION),
)
Wrap = Callable[[Speculator], Speculator]


def sampled(
    params: SamplingParams,
    wrap: Wrap | None = None,
    *,
    method: str = "draft_model",
    num_seeds: int = NUM_SEEDS,
    num_draft_tokens: int = 3,
) -> tuple[torch.Tensor, float]:
    """How often each outcome came over all seeds, and the share of draft tokens accepted."""
    target, draft = models()
    llm = build_llm(
        method,
        target=target,
        draft=draft,
        num_draft_tokens=num_draft_tokens,
        max_num_seqs=100,
        max_num_batched_tokens=500,
        num_kv_blocks=1000,
        allow_lossy=True,
    )
    if wrap is not None:
        _wrap(llm.core, wrap)
    counts = torch.zeros([VOCAB] * DEPTH, dtype=torch.float64)
    drafted = accepted = 0
    for begin in range(0, num_seeds, 100):
        wishes = [replace(params, seed=seed) for seed in range(begin, begin + 100)]
        for answer in llm.generate([PROMPT] * 100, wishes):
            counts[tuple(answer.token_ids[:DEPTH])] += 1
            drafted += answer.speculation.num_draft_tokens
            accepted += answer.speculation.num_accepted_tokens
    return counts.flatten(), accepted / max(drafted, 1)


def _wrap(core: EngineCore, wrap: Wrap) -> None:
    assert core._drafting is not None
    core._drafting._drafters[-1].speculator = wrap(core._drafting._drafters[-1].speculator)


class Tampering:
    """A drafter that says something else than it did."""

    def __init__(self, inner: Speculator, tamper: Callable[[TokenTree], TokenTree]) -> None:
        self._inner = inner
        self._tamper = tamper

    @property
    def requirements(self) -> Requirements:
        return self._inner.requirements

    def propose(self, context: ProposalContext) -> list[TokenTree]:
        return [tree if tree == EMPTY_TREE else self._tamper(tree) for tree in self._inner.propose(context)]

    def num_computed_tokens(self, request_id: str) -> int:
        return self._inner.num_computed_tokens(request_id)

    def release(self, request_id: str) -> None:
        self._inner.release(request_id)


def test_the_threshold_is_that_of_the_tables() -> None:
    assert threshold(10) == pytest.approx(35.56, rel=0.02)
    assert threshold(100) == pytest.approx(161.3, rel=0.02)
    assert float(exact_law().sum()) == pytest.approx(1.0, abs=1e-9)


@pytest.mark.parametrize("rule", [Acceptance.MATCH, Acceptance.REJECTION, Acceptance.BLOCK])
def test_the_law_is_the_targets(rule: Acceptance) -> None:
    counts, rate = sampled(replace(WISHES, speculation=SpeculationParams(acceptance=rule)))
    assert excess(counts) < 1
    # Both verdicts are frequent, so that neither is untested.
    assert 0.3 < rate < 0.95


def test_the_plain_law_is_the_targets() -> None:
    counts, rate = sampled(WISHES, method="none")
    assert excess(counts) < 1
    assert rate == 0


def claiming(change: Callable[[torch.Tensor], torch.Tensor]) -> Wrap:
    def tamper(tree: TokenTree) -> TokenTree:
        claimed = [change(q) for q in tree.distributions if isinstance(q, torch.Tensor)]
        return TokenTree.chain(tree.tokens, tree.proposal, claimed)

    return lambda inner: Tampering(inner, tamper)


def claimed_likeliest(tree: TokenTree) -> TokenTree:
    """The draft's most likely tokens, with the claim that they were drawn."""
    tokens = [int(q.argmax()) for q in tree.distributions if isinstance(q, torch.Tensor)]
    return TokenTree.chain(tokens, tree.proposal, tree.distributions)


ERRORS: dict[str, Wrap] = {
    "drawn from the draft, said to be uniform": claiming(lambda q: torch.full_like(q, 1 / VOCAB)),
    "drawn from the draft, said to be colder": claiming(lambda q: (q * q) / (q * q).sum()),
    "the most likely token, said to be drawn": lambda inner: Tampering(inner, claimed_likeliest),
}


@pytest.mark.parametrize("wrap", ERRORS.values(), ids=ERRORS.keys())
def test_a_false_claim_of_how_a_token_was_drawn_shows(wrap: Wrap) -> None:
    counts, _ = sampled(WISHES, wrap, num_seeds=1500)
    assert excess(counts) > 2


# Trees, drawn by a script without a model: two siblings, and two below the first of them.
FORK = (0, 0, 1, 1)


def sampled_from_trees(
    proposal: Proposal,
    acceptance: Acceptance = Acceptance.REJECTION,
    *,
    parents: tuple[int, ...] = FORK,
    draw: Draw | None = None,
    recorded: torch.Tensor | None = None,
    num_seeds: int = 2000,
) -> tuple[torch.Tensor, float]:
    script = drawing(parents, proposal, draw=draw, recorded=recorded)
    return sampled(
        replace(WISHES, speculation=SpeculationParams(acceptance=acceptance)),
        lambda inner: ScriptedSpeculator(script, Requirements(branches=True)),
        num_draft_tokens=len(parents),
        num_seeds=num_seeds,
    )


@pytest.mark.parametrize("proposal", [Proposal.SAMPLED, Proposal.SAMPLED_DISTINCT])
def test_drawn_trees_keep_the_law(proposal: Proposal) -> None:
    counts, rate = sampled_from_trees(proposal)
    assert excess(counts) < 1
    assert rate > 0.15  # of four nodes two can stand at most


def test_drawn_chains_keep_the_law_as_a_block() -> None:
    counts, rate = sampled_from_trees(Proposal.SAMPLED, Acceptance.BLOCK, parents=(0, 1))
    assert excess(counts) < 1
    assert rate > 0.15


FALSE_CLAIMS: dict[str, tuple[Proposal, Draw | None, torch.Tensor | None]] = {
    "the likeliest, said to be drawn without replacement": (Proposal.SAMPLED_DISTINCT, likeliest, None),
    "the likeliest, said to be drawn with replacement": (Proposal.SAMPLED, likeliest, None),
    "drawn, said to be uniform": (Proposal.SAMPLED, None, torch.full((VOCAB, VOCAB), 1 / VOCAB)),
}


@pytest.mark.parametrize(("proposal", "draw", "recorded"), FALSE_CLAIMS.values(), ids=FALSE_CLAIMS)
def test_a_false_claim_of_how_a_tree_was_drawn_shows(
    proposal: Proposal, draw: Draw | None, recorded: torch.Tensor | None
) -> None:
    counts, _ = sampled_from_trees(proposal, draw=draw, recorded=recorded, num_seeds=1000)
    assert excess(counts) > 2


def test_a_false_claim_of_how_a_block_was_drawn_shows() -> None:
    counts, _ = sampled_from_trees(
        Proposal.SAMPLED, Acceptance.BLOCK, parents=(0, 1), draw=likeliest, num_seeds=1000
    )
    assert excess(counts) > 2


def test_typical_acceptance_does_not_keep_the_law() -> None:
    counts, _ = sampled_from_trees(Proposal.SAMPLED, Acceptance.TYPICAL, num_seeds=1000)
    assert excess(counts) > 2
