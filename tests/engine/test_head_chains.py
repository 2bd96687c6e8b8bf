"""Chains that a packed head drafts in one go are those that it drafts level by level."""

from collections.abc import Sequence
from dataclasses import replace

import torch

from engine.llm import LLM, Completion
from engine.sampling_params import Acceptance, SamplingParams, SpeculationParams
from engine.speculation.base import DraftRequest, ProposalContext
from engine.speculation.eagle import EagleSpeculator
from engine.token_tree import TokenTree
from tests.engine.answers import assert_clean
from tests.engines import build_llm, drafter_of, load_tiny
from tests.heads import PROMPTS
from tests.operators import need_operators

DRAWN = SamplingParams(temperature=0.7, top_p=0.95, seed=3, max_tokens=24, ignore_eos=True)
WISHES = (
    replace(DRAWN, temperature=0.0),
    DRAWN,
    replace(DRAWN, speculation=SpeculationParams(acceptance=Acceptance.REJECTION)),
    replace(DRAWN, repetition_penalty=1.3),
    replace(DRAWN, temperature=0.0, logit_bias=((97, 2.0),)),
    replace(DRAWN, speculation=SpeculationParams(acceptance=Acceptance.BLOCK)),
    replace(DRAWN, min_tokens=3, top_k=20),
    replace(DRAWN, temperature=0.0, speculation=SpeculationParams(enabled=False)),
)
Drafts = dict[tuple[tuple[int, ...], int], TokenTree]


def answered(llm: LLM) -> tuple[Drafts, list[Completion]]:
    """Each draft by its request's tokens and parameters, and the answers."""
    need_operators()
    speculator = drafter_of(llm).speculator
    assert isinstance(speculator, EagleSpeculator)
    propose = speculator.propose
    drafts: Drafts = {}

    def recording(context: ProposalContext) -> list[TokenTree]:
        trees = propose(context)
        for request, tree in zip(context.requests, trees, strict=True):
            drafts[key(request)] = tree
        return trees

    speculator.propose = recording  # type: ignore[method-assign]
    answers = llm.generate(PROMPTS, WISHES)
    assert_clean(llm)
    return drafts, answers


def key(request: DraftRequest) -> tuple[tuple[int, ...], int]:
    return tuple(request.token_ids), request.budget


def is_alike(ours: TokenTree, theirs: TokenTree) -> bool:
    return (ours.tokens, ours.parents, ours.proposal) == (
        theirs.tokens,
        theirs.parents,
        theirs.proposal,
    ) and all(
        isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor) and torch.allclose(a, b, atol=1e-3)
        for a, b in zip(ours.distributions, theirs.distributions, strict=True)
    )


def accepted(answers: Sequence[Completion]) -> int:
    return sum(answer.speculation.num_accepted_tokens for answer in answers)


def test_chains_are_those_that_levels_make_and_answers_the_targets() -> None:
    target = load_tiny(dtype="int8")
    at_once, by_levels = build_llm("eagle3", target=target), build_llm("eagle3", target=target)
    speculator = drafter_of(by_levels).speculator
    assert isinstance(speculator, EagleSpeculator)
    assert speculator._runner.drafts_chains
    speculator._runner._stack = None
    ours, answers = answered(at_once)
    theirs, others = answered(by_levels)
    common = ours.keys() & theirs.keys()
    assert len(common) > 0.8 * len(theirs)
    # Both round to 16 bits, and what stands between two tokens may fall to either side.
    assert sum(is_alike(ours[each], theirs[each]) for each in common) > 0.97 * len(common)
    assert sum(bool(tree) for tree in ours.values()) > 60
    assert accepted(answers) > 20
    assert abs(accepted(answers) - accepted(others)) < 10
    plain = build_llm(target=target).generate(PROMPTS, WISHES)
    for wishes, own, expected in zip(WISHES, answers, plain, strict=True):
        if wishes.speculation.acceptance is None:
            assert own.token_ids == expected.token_ids
