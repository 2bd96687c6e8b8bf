"""Settings of the methods whose drafts come from heads on the target's own hidden states."""

from typing import Literal, Self

from pydantic import Field, model_validator

from engine.drafting_config import ModelSection
from engine.sampling_params import MAX_DRAFT_TOKENS
from engine.section import IMPLIES_METHOD

LayerConventionName = Literal["auto", "hidden_states", "layer_outputs"]


class HeadSection(ModelSection):
    """What all heads have in common."""

    head: str = Field(
        "shipped",
        description="Hub id or local folder of the draft head; shipped: the one that comes with Outrider for "
        "its default model.",
        json_schema_extra={IMPLIES_METHOD: True},
    )
    head_revision: str | None = Field(None, description="The head's branch, tag or commit on the hub.")


class EagleSpeculation(HeadSection):
    """A small decoder on the target's hidden states drafts: EAGLE-1, 2 and 3 (Li et al. 2024, 2025)."""

    method: Literal["eagle"] = "eagle"
    layer_convention: LayerConventionName = Field(
        "auto",
        description="What layer ids in the head's config mean: hidden_states, as transformers numbers them "
        "(vLLM, speculators), or layer_outputs, one less (SGLang, SpecForge); auto goes by where they stand.",
    )


class MedusaSpeculation(HeadSection):
    """Heads on the target's last hidden state draft, each a token further on (Cai et al. 2024)."""

    method: Literal["medusa"] = "medusa"
    medusa_choices: bool = Field(
        False, description="Draft the tree that comes with the heads, as their config names it."
    )

    @property
    def max_nodes(self) -> int:
        """Draft nodes per step; how many the heads' own tree has is known once they are read."""
        return MAX_DRAFT_TOKENS if self.medusa_choices else super().max_nodes

    @property
    def tree_branches(self) -> bool:
        """Whether nodes may have siblings."""
        return self.medusa_choices or super().tree_branches

    @model_validator(mode="after")
    def _one_tree(self) -> Self:
        if self.medusa_choices and (self.tree is not None or "num_draft_tokens" in self.model_fields_set):
            raise ValueError("medusa_choices is a tree: leave out tree and num_draft_tokens")
        return self
