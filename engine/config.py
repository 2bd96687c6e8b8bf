"""The engine's settings: frozen pydantic models, checked as a whole before anything is loaded.

Every field's description is what `outrider serve --help` prints. Field names are unique across the
sections, so a flat file, environment variables and flags can all name them without a prefix.
"""

from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, field_validator, model_validator

from engine.acceptance import ANY_LOSSLESS, AcceptancePolicy, DraftTraits
from engine.sampling_params import MAX_DRAFT_TOKENS, Acceptance
from engine.tree_config import TreeConfig, read_tree

DEFAULT_MODEL = "smollm2-135m-instruct"

DraftSampling = Literal["coupled", "greedy"]
SiblingSampling = Literal["without_replacement", "with_replacement"]
AcceptanceName = Literal["match", "rejection", "block", "typical"]
DType = Literal["auto", "float32", "float16", "bfloat16", "int8"]


class Section(BaseModel):
    """A group of settings: immutable, and closed to unknown keys."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class ModelConfig(Section):
    """Which model to serve, and how to hold it."""

    model: str = Field(DEFAULT_MODEL, description="Catalog name, hub id, local folder or GGUF file.")
    revision: str | None = Field(None, description="Branch, tag or commit on the model hub.")
    dtype: DType = Field(
        "auto",
        description="Type that weights are held in; auto: on a CPU int8, or float16 without C++ operators; "
        "bfloat16 on a GPU.",
    )
    device: str = Field("auto", description="auto, cpu, cuda or cuda:N.")
    max_model_len: int | None = Field(
        None, ge=2, description="Tokens that prompt and answer share; default: the model's own limit."
    )
    trust_remote_code: bool = Field(False, description="Run Python code that comes with the model.")
    chat_template: Path | None = Field(None, description="File with a Jinja chat template to use instead.")
    cache_dir: Path | None = Field(
        None,
        description="Where converted and packed weights and downloads are kept; default: ~/.cache/outrider, "
        "and the hub's own cache for what comes from there.",
    )
    offline: bool = Field(False, description="Never touch the network.")

    @property
    def cache_folder(self) -> Path:
        """Where what was converted or built for this machine is kept."""
        return self.cache_dir or Path.home() / ".cache" / "outrider"


class CacheConfig(Section):
    """The KV cache."""

    block_size: int = Field(16, ge=1, le=256, description="Tokens per KV block.")
    kv_cache_gb: float | None = Field(
        None, gt=0, description="Size of the KV pool in GiB; default: from the memory that is free."
    )
    num_kv_blocks: int | None = Field(None, ge=1, description="Size of the KV pool in blocks, instead.")
    prefix_caching: bool = Field(True, description="Reuse KV blocks of equal prompt beginnings.")

    @model_validator(mode="after")
    def _one_size(self) -> Self:
        if self.kv_cache_gb is not None and self.num_kv_blocks is not None:
            raise ValueError("kv_cache_gb and num_kv_blocks both set the pool's size: give one of them")
        return self


class SchedulerConfig(Section):
    """What one step may hold."""

    max_num_seqs: int = Field(32, ge=1, description="Requests that run at the same time.")
    max_num_batched_tokens: int = Field(
        512, ge=1, description="Tokens per step: prompt chunks, new tokens and draft nodes together."
    )
    max_num_queued: int = Field(1024, ge=1, description="Requests that may wait; more are refused.")

    @model_validator(mode="after")
    def _a_token_each(self) -> Self:
        if self.max_num_seqs > self.max_num_batched_tokens:
            raise ValueError(
                f"max_num_seqs ({self.max_num_seqs}) must not exceed max_num_batched_tokens "
                f"({self.max_num_batched_tokens}): every running request needs a token per step"
            )
        return self


class PredictingSection(Section):
    """What all methods have in common, also the one that drafts nothing itself."""

    predictions: bool = Field(True, description="Draft first from requests' predictions; off refuses them.")


class NoSpeculation(PredictingSection):
    """Plain decoding."""

    method: Literal["none"] = "none"

    @property
    def num_draft_tokens(self) -> int:
        """None are drafted."""
        return 0

    @property
    def policy(self) -> AcceptancePolicy:
        """Nothing is drafted, so that any lossless rule holds."""
        return ANY_LOSSLESS


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

    @property
    def traits(self) -> DraftTraits:
        """What the method, as it is set up, can propose."""
        return DraftTraits()

    @property
    def policy(self) -> AcceptancePolicy:
        """Which rules requests may ask for."""
        return AcceptancePolicy(self.method, self.traits, Acceptance(self.acceptance), self.allow_lossy)

    def differs(self, name: str) -> bool:
        """Whether a setting is another than its default, which asks for nothing."""
        return bool(getattr(self, name) != type(self).model_fields[name].default)

    @model_validator(mode="after")
    def _legal_acceptance(self) -> Self:
        reason = self.policy.refusal(Acceptance(self.acceptance))
        if reason is not None:
            raise ValueError(f"acceptance cannot be {self.acceptance}: {reason}; match holds for any draft")
        return self


class NgramSpeculation(DraftingSection):
    """Prompt lookup (Saxena 2023): the text that followed the last tokens the last time they occurred."""

    method: Literal["ngram"] = "ngram"
    num_draft_tokens: int = Field(
        15, ge=1, le=MAX_DRAFT_TOKENS, description="Draft tokens per step, at most; fewer where lookups fail."
    )
    ngram_max: int = Field(
        3, ge=1, le=32, description="Longest n-gram indexed; longer matches are found by it, too."
    )
    ngram_min: int = Field(1, ge=1, le=32, description="Shortest match.")

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.ngram_min > self.ngram_max:
            raise ValueError(f"ngram_min ({self.ngram_min}) must not exceed ngram_max ({self.ngram_max})")
        return self


class SuffixSpeculation(DraftingSection):
    """Suffix decoding (Oliaro et al. 2024): what followed before, by counts, here or in earlier answers."""

    method: Literal["suffix"] = "suffix"
    num_draft_tokens: int = Field(
        15, ge=1, le=MAX_DRAFT_TOKENS, description="Draft tokens per step, at most; fewer where they fail."
    )
    suffix_max_depth: int = Field(64, ge=1, le=256, description="Tokens of a match that count, at most.")
    suffix_factor: float = Field(
        4.0, gt=0, description="Draft tokens in a row that a match warrants per token of its length."
    )
    suffix_min_probability: float = Field(
        0.1, ge=0, le=1, description="Continuations estimated to be less likely are not drafted."
    )
    suffix_tree: bool = Field(True, description="Draft several continuations; else the likeliest alone.")
    suffix_share: bool = Field(
        False, description="Draft from the answers to earlier requests of the same API key, too."
    )
    suffix_max_cached_requests: int = Field(
        1000, ge=1, description="With suffix_share: answers kept; the oldest make room."
    )
    suffix_max_cached_tokens: int = Field(
        100_000, ge=2, description="With suffix_share: tokens kept, of about 300 bytes each."
    )

    @model_validator(mode="after")
    def _effective(self) -> Self:
        for name in ("suffix_max_cached_requests", "suffix_max_cached_tokens"):
            if self.differs(name) and not self.suffix_share:
                raise ValueError(f"{name} has no effect without suffix_share: set that or leave {name} out")
        return self


class DraftModelSpeculation(DraftingSection):
    """A smaller model of the same vocabulary drafts (Leviathan et al. 2023, Chen et al. 2023)."""

    method: Literal["draft_model"] = "draft_model"
    draft_model: str = Field(description="Catalog name, hub id, local folder or GGUF file of the draft.")
    draft_revision: str | None = Field(None, description="The draft's branch, tag or commit on the hub.")
    extra_draft_models: tuple[str, ...] = Field(
        (),
        description="More draft models, separated by commas: each drafts beside the first, and the target "
        "checks all in one tree.",
    )
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
    probe: bool = Field(
        True, description="Draft a few tokens at start, and warn if the target accepts hardly any."
    )

    @property
    def max_nodes(self) -> int:
        """Draft nodes per step, of all draft models together."""
        nodes = self.num_draft_tokens if self.tree is None else self.tree.num_nodes
        return nodes * (1 + len(self.extra_draft_models))

    @property
    def branches(self) -> bool:
        """Whether nodes may have siblings."""
        return bool(self.extra_draft_models) or (self.tree is not None and self.tree.branches)

    @field_validator("extra_draft_models", mode="before")
    @classmethod
    def _read_list(cls, value: object) -> object:
        return [name.strip() for name in value.split(",")] if isinstance(value, str) else value

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        models = [self.draft_model, *self.extra_draft_models]
        twice = [model for model in self.extra_draft_models if models.count(model) > 1]
        if twice:
            raise ValueError(f"extra_draft_models: {twice[0]} drafts already; name each draft model once")
        if self.tree is not None and "num_draft_tokens" in self.model_fields_set:
            raise ValueError(
                "num_draft_tokens is the length of a chain, but tree is set: leave one of them out"
            )
        if self.max_nodes > MAX_DRAFT_TOKENS:
            raise ValueError(
                f"extra_draft_models make {self.max_nodes} draft nodes per step, but a tree holds at most "
                f"{MAX_DRAFT_TOKENS}: set a smaller tree or num_draft_tokens"
            )
        return self

    @model_validator(mode="after")
    def _effective(self) -> Self:
        no_siblings = None if self.branches else "without a tree such as 3,2,1,1 there are no siblings"
        idle = no_siblings or self.policy.refusal(Acceptance.REJECTION)
        if self.differs("sibling_sampling") and idle is not None:
            raise ValueError(f"sibling_sampling has no effect: {idle}; leave sibling_sampling out")
        return self

    @property
    def traits(self) -> DraftTraits:
        """Drawn where the rule wants it; several drafts of one tree cannot be judged by one ratio."""
        return DraftTraits(
            draws=True,
            branches=self.branches,
            selects=self.tree is not None and self.tree.selects,
            merges=bool(self.extra_draft_models),
        )


SpeculationConfig = Annotated[
    NoSpeculation | NgramSpeculation | SuffixSpeculation | DraftModelSpeculation,
    Field(discriminator="method"),
]


class EngineConfig(Section):
    """Everything the engine is built from."""

    model: ModelConfig = ModelConfig()
    cache: CacheConfig = CacheConfig()
    scheduler: SchedulerConfig = SchedulerConfig()
    speculation: SpeculationConfig = NgramSpeculation()
