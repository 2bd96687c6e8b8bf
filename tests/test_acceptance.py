"""Legality: which rule may verify which draft, for the settings, for requests and for the sampler."""

from itertools import product

import pytest
from pydantic import ValidationError

from engine.acceptance import (
    ANY_LOSSLESS,
    AcceptancePolicy,
    DraftTraits,
    Rule,
    is_lossless,
    proposal_for,
    rule_for,
)
from engine.config import DraftModelSpeculation, NgramSpeculation
from engine.errors import InvalidRequest
from engine.head_config import EagleSpeculation, MedusaSpeculation
from engine.sampling_params import Acceptance, SamplingParams, SpeculationParams
from engine.token_tree import EMPTY_TREE, Proposal, TokenTree

MATCH, REJECTION, BLOCK, TYPICAL = Acceptance
LOOKUP = AcceptancePolicy("ngram", DraftTraits(branches=True))
CHAINS = AcceptancePolicy("draft_model", DraftTraits(draws=True))
TREES = AcceptancePolicy("draft_model", DraftTraits(draws=True, branches=True))
DYNAMIC = AcceptancePolicy("draft_model", DraftTraits(draws=True, branches=True, selects=True))


def wishes(acceptance: Acceptance | None, temperature: float = 1.0) -> SamplingParams:
    return SamplingParams(temperature=temperature, speculation=SpeculationParams(acceptance=acceptance))


def tree_of(proposal: Proposal, parents: tuple[int, ...] = (0, 1)) -> TokenTree:
    laws = (None,) * len(parents) if proposal.is_drawn else ()
    return TokenTree((5,) * len(parents), parents, proposal, laws)


@pytest.mark.parametrize(
    ("policy", "legal"),
    [
        (ANY_LOSSLESS, {MATCH, REJECTION, BLOCK}),
        (LOOKUP, {MATCH}),
        (CHAINS, {MATCH, REJECTION, BLOCK}),
        (TREES, {MATCH, REJECTION}),
        (DYNAMIC, {MATCH}),
        (AcceptancePolicy("ngram", DraftTraits(), allow_lossy=True), {MATCH, TYPICAL}),
        (AcceptancePolicy("draft_model", DraftTraits(draws=True), allow_lossy=True), set(Acceptance)),
    ],
)
def test_what_can_be_asked_for(policy: AcceptancePolicy, legal: set[Acceptance]) -> None:
    assert {acceptance for acceptance in Acceptance if policy.refusal(acceptance) is None} == legal
    for acceptance, temperature in product(Acceptance, (0.0, 1.0)):
        params = wishes(acceptance, temperature)
        if acceptance in legal:
            assert policy.resolved(params) == params
            continue
        with pytest.raises(InvalidRequest, match=r"speculation\.acceptance") as caught:
            policy.resolved(params)
        assert caught.value.param == "speculation.acceptance"


@pytest.mark.parametrize(
    ("speculation", "legal"),
    [
        (EagleSpeculation(head="x"), {MATCH, REJECTION, BLOCK}),
        (EagleSpeculation(head="x", tree="3,2"), {MATCH, REJECTION}),
        (EagleSpeculation(head="x", tree="sequoia"), {MATCH, REJECTION}),
        (EagleSpeculation(head="x", tree="dynamic"), {MATCH}),
        (MedusaSpeculation(head="x"), {MATCH, REJECTION, BLOCK}),
        (MedusaSpeculation(head="x", medusa_choices=True), {MATCH, REJECTION}),
    ],
)
def test_what_heads_can_be_asked_for(
    speculation: EagleSpeculation | MedusaSpeculation, legal: set[Acceptance]
) -> None:
    policy = speculation.policy
    assert {acceptance for acceptance in Acceptance if policy.refusal(acceptance) is None} == legal


@pytest.mark.parametrize(
    ("policy", "acceptance", "words"),
    [
        (LOOKUP, REJECTION, "rejection judges tokens that were drawn from a distribution; ngram draws none"),
        (TREES, BLOCK, "block judges chains, but the server's tree branches"),
        (DYNAMIC, REJECTION, "holds only for drafts of a fixed shape"),
        (CHAINS, TYPICAL, "allow_lossy"),
    ],
)
def test_a_refusal_says_what_is_wrong(policy: AcceptancePolicy, acceptance: Acceptance, words: str) -> None:
    assert words in (policy.refusal(acceptance) or "")


def test_a_request_that_names_none_takes_the_servers() -> None:
    policy = AcceptancePolicy("draft_model", DraftTraits(draws=True), default=BLOCK)
    assert policy.resolved(wishes(None)).speculation.acceptance is BLOCK
    assert policy.resolved(wishes(MATCH)).speculation.acceptance is MATCH
    assert ANY_LOSSLESS.resolved(wishes(None)).speculation.acceptance is MATCH


def test_settings_that_cannot_hold_are_refused_by_name() -> None:
    with pytest.raises(ValidationError, match=r"acceptance cannot be rejection: .* ngram draws none"):
        NgramSpeculation(acceptance="rejection")
    with pytest.raises(ValidationError, match=r"acceptance cannot be typical: .* allow_lossy"):
        DraftModelSpeculation(draft_model="x", acceptance="typical")
    assert NgramSpeculation(acceptance="typical", allow_lossy=True).policy.default is TYPICAL
    assert DraftModelSpeculation(draft_model="x", acceptance="block").policy.default is BLOCK


RULES = {
    (MATCH, Proposal.DETERMINISTIC): Rule.MATCH,
    (MATCH, Proposal.COUPLED): Rule.MATCH,
    (MATCH, Proposal.SAMPLED): Rule.MATCH,
    (MATCH, Proposal.SAMPLED_DISTINCT): Rule.MATCH,
    # Never a ratio with a distribution that the tokens were not drawn from.
    (REJECTION, Proposal.DETERMINISTIC): Rule.MATCH,
    (REJECTION, Proposal.COUPLED): Rule.MATCH,
    (REJECTION, Proposal.SAMPLED): Rule.MULTI_STEP,
    (REJECTION, Proposal.SAMPLED_DISTINCT): Rule.RECURSIVE,
    (BLOCK, Proposal.DETERMINISTIC): Rule.MATCH,
    (BLOCK, Proposal.COUPLED): Rule.MATCH,
    (BLOCK, Proposal.SAMPLED): Rule.BLOCK,
    (BLOCK, Proposal.SAMPLED_DISTINCT): Rule.BLOCK,
    **{(TYPICAL, proposal): Rule.TYPICAL for proposal in Proposal},
}


@pytest.mark.parametrize(("acceptance", "proposal"), list(product(Acceptance, Proposal)))
def test_the_rule_of_every_pair(acceptance: Acceptance, proposal: Proposal) -> None:
    assert rule_for(wishes(acceptance), tree_of(proposal)) is RULES[acceptance, proposal]
    assert rule_for(wishes(acceptance, 0.0), tree_of(proposal)) is Rule.MATCH
    assert rule_for(wishes(acceptance), EMPTY_TREE) is Rule.MATCH


def test_an_unresolved_rule_is_match() -> None:
    assert rule_for(wishes(None), tree_of(Proposal.SAMPLED)) is Rule.MATCH


def test_a_block_that_branches_is_a_fault() -> None:
    with pytest.raises(ValueError, match=r"block verification takes chains, got parents \(0, 0\)"):
        rule_for(wishes(BLOCK), tree_of(Proposal.SAMPLED, (0, 0)))


@pytest.mark.parametrize(("acceptance", "distinct"), list(product(Acceptance, (False, True))))
def test_what_is_proposed_is_judged_by_the_rule_asked_for(acceptance: Acceptance, distinct: bool) -> None:
    proposal = proposal_for(wishes(acceptance), distinct=distinct)
    expected = {
        MATCH: Rule.MATCH,
        REJECTION: Rule.RECURSIVE if distinct else Rule.MULTI_STEP,
        BLOCK: Rule.BLOCK,
        TYPICAL: Rule.TYPICAL,
    }
    assert rule_for(wishes(acceptance), tree_of(proposal)) is expected[acceptance]
    assert proposal_for(wishes(acceptance, 0.0), distinct=distinct) is Proposal.DETERMINISTIC


def test_only_typical_acceptance_of_sampled_drafts_is_lossy() -> None:
    lossy = [
        (acceptance, temperature)
        for acceptance, temperature in product((None, *Acceptance), (0.0, 1.0))
        if not is_lossless(wishes(acceptance, temperature))
    ]
    assert lossy == [(TYPICAL, 1.0)]
    assert is_lossless(SamplingParams(speculation=SpeculationParams(enabled=False, acceptance=TYPICAL)))
