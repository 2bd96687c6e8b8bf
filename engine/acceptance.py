"""Which rule may verify which draft: decided here, for the settings, for requests and for the sampler.

    how the draft's tokens came to be     match   rejection             block     typical
    looked up, likeliest, not drawn       yes     as match: q is 1      as match  lossy
    with the target's own noise           yes     as match              as match  lossy
    drawn, siblings independently         yes     multi-step            chains    lossy
    drawn, siblings without replacement   yes     recursive rejection   chains    lossy

A method that never draws is refused for rejection and block: there is no distribution to form a ratio with.
Where a method that draws proposes something undrawn for once, the match rule verifies it, which for a
distribution that is 1 at one token is the ratio rule itself. A ratio with a distribution that the tokens were
not drawn from loses the target's law, so no path leads there.
"""

from dataclasses import dataclass, replace
from enum import StrEnum

from engine.errors import InvalidRequest
from engine.sampling_params import Acceptance, SamplingParams
from engine.token_tree import Proposal, TokenTree

RATIO_RULES = frozenset({Acceptance.REJECTION, Acceptance.BLOCK})


class Rule(StrEnum):
    """What verifies one tree; `engine/sampling/verification.py` has the formulas."""

    MATCH = "match"
    MULTI_STEP = "multi-step"
    RECURSIVE = "recursive"
    BLOCK = "block"
    TYPICAL = "typical"


@dataclass(frozen=True, slots=True)
class DraftTraits:
    """What a speculation method, as it is set up, can propose.

    Attributes:
        draws: It can draw its tokens from a distribution and record it.
        branches: Its nodes may have several children.
        selects: Which of the tokens that it drew become nodes depends on what they are, as in dynamic trees
            and where unlikely tokens are dropped.
        merges: Siblings may come from different drafts, each with a distribution of its own.
    """

    draws: bool = False
    branches: bool = False
    selects: bool = False
    merges: bool = False


@dataclass(frozen=True, slots=True)
class AcceptancePolicy:
    """What a server says to the rules that requests ask for.

    Attributes:
        method: The speculation method's name, for messages.
        traits: What it can propose.
        default: The rule of requests that ask for none.
        allow_lossy: Whether typical acceptance may be asked for.
    """

    method: str = "none"
    traits: DraftTraits = DraftTraits()
    default: Acceptance = Acceptance.MATCH
    allow_lossy: bool = False

    def refusal(self, acceptance: Acceptance) -> str | None:
        """Why a rule cannot be had here; None if it can."""
        if acceptance is Acceptance.TYPICAL and not self.allow_lossy:
            return "typical acceptance is lossy: it is served only where allow_lossy is on"
        if self.method == "none" or acceptance not in RATIO_RULES:
            return None
        if not self.traits.draws:
            return f"{acceptance} judges tokens that were drawn from a distribution; {self.method} draws none"
        if self.traits.selects:
            return (
                f"{acceptance} holds only for drafts of a fixed shape, such as widths and sequoia, but the "
                "server's tree keeps or drops tokens by what they are"
            )
        if self.traits.merges:
            return (
                f"{acceptance} judges tokens by the one distribution they were drawn from, but drafts of "
                "extra_draft_models are merged"
            )
        if acceptance is Acceptance.BLOCK and self.traits.branches:
            return "block judges chains, but the server's tree branches: rejection is for those"
        return None

    def resolved(self, params: SamplingParams) -> SamplingParams:
        """The parameters with their acceptance rule filled in.

        Raises:
            InvalidRequest: The rule asked for cannot be had; it names speculation.acceptance.
        """
        asked = params.speculation.acceptance
        if asked is None:
            return replace(params, speculation=replace(params.speculation, acceptance=self.default))
        reason = self.refusal(asked)
        if reason is not None:
            raise InvalidRequest(f"speculation.acceptance: {reason}", "speculation.acceptance")
        return params


ANY_LOSSLESS = AcceptancePolicy()
"""The policy where nothing is drafted: every rule holds but the lossy one."""


def proposal_for(params: SamplingParams, *, distinct: bool) -> Proposal:
    """How a method that can draw should propose, so that the request's rule accepts most.

    Args:
        params: The request's, its rule filled in.
        distinct: Whether nodes get several children, drawn without replacement, which never wastes one on a
            token that was tried before. Of a chain both ways of drawing are one.
    """
    if params.is_greedy:
        return Proposal.DETERMINISTIC
    match params.speculation.acceptance:
        case Acceptance.REJECTION:
            return Proposal.SAMPLED_DISTINCT if distinct else Proposal.SAMPLED
        case Acceptance.BLOCK:
            return Proposal.SAMPLED
        case Acceptance.TYPICAL:
            return Proposal.DETERMINISTIC
        case _:
            return Proposal.COUPLED


def rule_for(params: SamplingParams, tree: TokenTree) -> Rule:
    """The rule that verifies a tree.

    At temperature 0 every rule comes down to following the likeliest token, which is the match rule.

    Raises:
        ValueError: Block verification of a tree that branches, which the settings keep from being asked for.
    """
    acceptance = params.speculation.acceptance
    if params.is_greedy or not tree:
        return Rule.MATCH
    if acceptance is Acceptance.TYPICAL:
        return Rule.TYPICAL
    if acceptance not in RATIO_RULES or not tree.proposal.is_drawn:
        return Rule.MATCH
    if acceptance is Acceptance.BLOCK:
        if not tree.is_chain:
            raise ValueError(f"block verification takes chains, got parents {tree.parents}")
        return Rule.BLOCK
    return Rule.RECURSIVE if tree.proposal is Proposal.SAMPLED_DISTINCT else Rule.MULTI_STEP


def is_lossless(params: SamplingParams) -> bool:
    """Whether speculation leaves the law of the request's answer as it is."""
    speculation = params.speculation
    return params.is_greedy or not speculation.enabled or speculation.acceptance is not Acceptance.TYPICAL
