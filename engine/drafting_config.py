"""Settings that methods of speculation have in common."""

from typing import Annotated, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from engine.acceptance import AcceptancePolicy, DraftTraits
from engine.sampling_params import MAX_DRAFT_TOKENS, Acceptance
from engine.section import Section
from engine.tree_config import TreeConfig, read_tree

DraftSampling = Literal["coupled", "greedy"]
SiblingSampling = Literal["without_replacement", "with_replacement"]
PlannerName = Literal["auto", "fixed"]
Lookup = Literal["none", "ngram", "suffix"]
AcceptanceName = Literal["match", "rejection", "block", "typical"]


def read_vocab_size(value: object) -> object:
    """What a setting says of a draft vocabulary's size.

    Raises:
        ValueError: It is none; the message goes on from "must".
    """
    if value in ("auto", "all"):
        return value
    size = int(value) if isinstance(value, str) and value.isdecimal() else value
    if not isinstance(size, int) or isinstance(size, bool) or size < 1:
        raise ValueError("be auto, all or a whole number from 1 on")
    return size


DraftVocabSize = Annotated[Literal["auto", "all"] | int, BeforeValidator(read_vocab_size)]


class PredictingSection(Section):
    """What all methods have in common, also the one that drafts nothing itself."""

    predictions: bool = Field(True, description="Draft first from requests' predictions; off refuses them.")


class DraftingSection(PredictingSection):
    """What all methods that draft have in common."""

    method: str
    acceptance: AcceptanceName = Field(
        "match",
        description="Rule for requests that name none; rejection and block need a method that can draw its "
        "drafts, typical is lossy and needs allow_lossy.",
    )
    allow_lossy: bool = Field(
        False, description="Let requests ask for typical acceptance, which changes what the model says."
    )
    planner: PlannerName = Field(
        "auto",
        description="auto: each step drafts as much as pays, by measured costs and acceptance, down to "
        "nothing under load; fixed: as much as is set.",
    )

    @property
    def traits(self) -> DraftTraits:
        """What the method, as it is set up, can propose."""
        return DraftTraits()

    @property
    def policy(self) -> AcceptancePolicy:
        """Which rules requests may ask for."""
        return AcceptancePolicy(self.method, self.traits, Acceptance(self.acceptance), self.allow_lossy)

    @model_validator(mode="after")
    def _legal_acceptance(self) -> Self:
        reason = self.policy.refusal(Acceptance(self.acceptance))
        if reason is not None:
            raise ValueError(f"acceptance cannot be {self.acceptance}: {reason}; match holds for any draft")
        return self

    def differs(self, name: str) -> bool:
        """Whether a setting is another than its default, which asks for nothing."""
        return bool(getattr(self, name) != type(self).model_fields[name].default)


class ModelSection(DraftingSection):
    """What all methods have in common that draft with a model: chains and trees, drawn as the rule wants."""

    num_draft_tokens: int = Field(
        4, ge=1, le=MAX_DRAFT_TOKENS, description="Draft tokens per step of each draft model, without a tree."
    )
    tree: Annotated[TreeConfig | None, BeforeValidator(read_tree)] = Field(
        None,
        description="Draft trees instead of chains: children of each node by depth, such as 3,2,1,1; or "
        "sequoia, a shape from measured acceptance; or dynamic, by the draft's probabilities; or a mapping "
        "such as {shape: dynamic, max_nodes: 16, max_depth: 6, top_k: 4}.",
    )
    draft_sampling: DraftSampling = Field(
        "coupled",
        description="How sampled requests are drafted under match: coupled, with the noise that the target "
        "will use, or greedy.",
    )
    sibling_sampling: SiblingSampling = Field(
        "without_replacement", description="How a tree's siblings are drawn under rejection."
    )
    lookup: Lookup = Field(
        "none",
        description="Prompt lookup that drafts before the model, wherever it has more to offer: ngram or "
        "suffix, with their defaults.",
    )
    probe: bool = Field(
        True, description="Draft a few tokens at start, and warn if the target accepts hardly any."
    )

    @property
    def max_nodes(self) -> int:
        """Draft nodes per step."""
        return self.num_draft_tokens if self.tree is None else self.tree.num_nodes

    @property
    def tree_branches(self) -> bool:
        """Whether nodes of one draft may have siblings."""
        return self.tree is not None and self.tree.branches

    @property
    def branches(self) -> bool:
        """Whether nodes may have siblings at all."""
        return self.tree_branches

    @property
    def merges(self) -> bool:
        """Whether siblings may come from several drafts."""
        return False

    @property
    def traits(self) -> DraftTraits:
        """Drawn where the rule wants it."""
        return DraftTraits(
            draws=True,
            branches=self.branches,
            selects=self.tree is not None and self.tree.selects,
            merges=self.merges,
        )

    @model_validator(mode="after")
    def _one_shape(self) -> Self:
        if self.tree is not None and "num_draft_tokens" in self.model_fields_set:
            raise ValueError(
                "num_draft_tokens is the length of a chain, but tree is set: leave one of them out"
            )
        return self

    @model_validator(mode="after")
    def _effective(self) -> Self:
        no_siblings = None if self.branches else "without a tree such as 3,2,1,1 there are no siblings"
        idle = no_siblings or self.policy.refusal(Acceptance.REJECTION)
        if self.differs("sibling_sampling") and idle is not None:
            raise ValueError(f"sibling_sampling has no effect: {idle}; leave sibling_sampling out")
        return self
