"""The engine's settings: frozen pydantic models, checked as a whole before anything is loaded.

Every field's description is what `outrider serve --help` prints. Field names are unique across the
sections, so a flat file, environment variables and flags can all name them without a prefix.
"""

from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import Field, field_validator, model_validator

from engine.acceptance import ANY_LOSSLESS, AcceptancePolicy
from engine.drafting_config import (
    DraftingSection,
    DraftVocabSize,
    ModelSection,
    PlannerName,
    PredictingSection,
)
from engine.head_config import EagleSpeculation, MedusaSpeculation
from engine.sampling_params import MAX_DRAFT_TOKENS
from engine.section import A_YEAR, Section

DEFAULT_MODEL = "smollm2-135m-instruct"

DType = Literal["auto", "float32", "float16", "bfloat16", "int8", "int4"]
KVCacheDType = Literal["auto", "float32", "float16", "bfloat16", "fp8"]
Quantization = Literal["int8", "int4", "fp8"]


class ModelConfig(Section):
    """Which model to serve, and how to hold it."""

    model: str = Field(DEFAULT_MODEL, description="Catalog name, hub id, local folder or GGUF file.")
    revision: str | None = Field(None, description="Branch, tag or commit on the model hub.")
    dtype: DType = Field(
        "auto",
        description="Type that weights are held in; auto: on a CPU int4 where a GGUF file has four to six "
        "bits and int8 elsewhere, or float16 without C++ operators; bfloat16 on a GPU.",
    )
    device: str = Field("auto", description="auto, cpu, cuda or cuda:N.")
    quantization: Quantization | None = Field(
        None,
        description="On a GPU: hold weights of linear layers in int8, int4 or fp8, draft models' too; needs "
        "torchao. On a CPU dtype int8 does it.",
    )
    enforce_eager: bool = Field(
        False, description="On a GPU: launch passes operation by operation, without recording CUDA graphs."
    )
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
        None,
        gt=0,
        le=1 << 20,
        description="Size of the KV pool in GiB; default: from the memory that is free.",
    )
    num_kv_blocks: int | None = Field(None, ge=1, description="Size of the KV pool in blocks, instead.")
    kv_cache_dtype: KVCacheDType = Field(
        "auto",
        description="Type of keys and values; auto: float16 where the C++ operators run a model of packed "
        "weights (int4, int8, float16), else that of the activations; fp8: 8 bits (float8_e4m3fn) on a GPU "
        "of compute capability 8.9 or more.",
    )
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
    step_timeout_seconds: int = Field(
        600,
        ge=1,
        le=A_YEAR,
        description="A step that takes longer hangs: open requests are ended, and /health says so until it "
        "is over.",
    )

    @model_validator(mode="after")
    def _a_token_each(self) -> Self:
        if self.max_num_seqs > self.max_num_batched_tokens:
            raise ValueError(
                f"max_num_seqs ({self.max_num_seqs}) must not exceed max_num_batched_tokens "
                f"({self.max_num_batched_tokens}): every running request needs a token per step"
            )
        return self


class NoSpeculation(PredictingSection):
    """Plain decoding."""

    method: Literal["none"] = "none"

    @property
    def num_draft_tokens(self) -> int:
        """None are drafted."""
        return 0

    @property
    def planner(self) -> PlannerName:
        """There is nothing to plan."""
        return "fixed"

    @property
    def policy(self) -> AcceptancePolicy:
        """Nothing is drafted, so that any lossless rule holds."""
        return ANY_LOSSLESS


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
        4.0, gt=0, le=256, description="Draft tokens in a row that a match warrants per token of its length."
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


class DraftModelSpeculation(ModelSection):
    """A smaller model of the same vocabulary drafts (Leviathan et al. 2023, Chen et al. 2023)."""

    method: Literal["draft_model"] = "draft_model"
    draft_model: str = Field(description="Catalog name, hub id, local folder or GGUF file of the draft.")
    draft_revision: str | None = Field(None, description="The draft's branch, tag or commit on the hub.")
    extra_draft_models: tuple[str, ...] = Field(
        (),
        description="More draft models, separated by commas: each drafts beside the first, and the target "
        "checks all in one tree.",
    )
    draft_vocab_size: DraftVocabSize = Field(
        "auto",
        description="Tokens that draft models choose among, by their ids from 0, besides those that end an "
        "answer and those in a request's own text; all: the target's; auto: 32768 of a vocabulary more than "
        "twice as large.",
    )
    draft_rounding: bool = Field(
        True,
        description="On a CPU: hold layers of draft models that have five or six bits in four; what drafts "
        "say is checked.",
    )

    @property
    def max_nodes(self) -> int:
        """Draft nodes per step, of all draft models together."""
        return super().max_nodes * (1 + len(self.extra_draft_models))

    @property
    def branches(self) -> bool:
        """Whether nodes may have siblings."""
        return bool(self.extra_draft_models) or super().branches

    @property
    def merges(self) -> bool:
        """Several drafts of one tree cannot be judged by one ratio."""
        return bool(self.extra_draft_models)

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
        if self.max_nodes > MAX_DRAFT_TOKENS:
            raise ValueError(
                f"extra_draft_models make {self.max_nodes} draft nodes per step, but a tree holds at most "
                f"{MAX_DRAFT_TOKENS}: set a smaller tree or num_draft_tokens"
            )
        return self


SpeculationConfig = Annotated[
    NoSpeculation
    | NgramSpeculation
    | SuffixSpeculation
    | DraftModelSpeculation
    | EagleSpeculation
    | MedusaSpeculation,
    Field(discriminator="method"),
]


class EngineConfig(Section):
    """Everything the engine is built from."""

    model: ModelConfig = ModelConfig()
    cache: CacheConfig = CacheConfig()
    scheduler: SchedulerConfig = SchedulerConfig()
    speculation: SpeculationConfig = NgramSpeculation()
