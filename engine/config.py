"""The engine's settings: frozen pydantic models, checked as a whole before anything is loaded.

Every field's description is what `outrider serve --help` prints. Field names are unique across the
sections, so a flat file, environment variables and flags can all name them without a prefix.
"""

from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from engine.sampling_params import MAX_DRAFT_TOKENS

DEFAULT_MODEL = "smollm2-135m-instruct"

DType = Literal["auto", "float32", "float16", "bfloat16"]
LinearWeights = Literal["auto", "plain", "packed-fp16", "packed-int8"]


class Section(BaseModel):
    """A group of settings: immutable, and closed to unknown keys."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class ModelConfig(Section):
    """Which model to serve, and how to hold it."""

    model: str = Field(DEFAULT_MODEL, description="Catalog name, hub id, local folder or GGUF file.")
    revision: str | None = Field(None, description="Branch, tag or commit on the model hub.")
    dtype: DType = Field(
        "auto", description="Type of the activations; auto: float32 on CPU, bfloat16 on GPU."
    )
    device: str = Field("auto", description="auto, cpu, cuda or cuda:N.")
    linear_weights: LinearWeights = Field(
        "auto",
        description="How linear layers hold weights; auto: on a CPU packed-int8, packed-fp16 without C++ "
        "operators, else plain.",
    )
    max_model_len: int | None = Field(
        None, ge=2, description="Tokens that prompt and answer share; default: the model's own limit."
    )
    trust_remote_code: bool = Field(False, description="Run Python code that comes with the model.")
    chat_template: Path | None = Field(None, description="File with a Jinja chat template to use instead.")
    cache_dir: Path | None = Field(
        None,
        description="Where converted weights and downloads are kept; default: ~/.cache/outrider, and the "
        "hub's own cache for what comes from there.",
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


class NoSpeculation(Section):
    """Plain decoding."""

    method: Literal["none"] = "none"

    @property
    def num_draft_tokens(self) -> int:
        """None are drafted."""
        return 0


class NgramSpeculation(Section):
    """Prompt lookup (Saxena 2023): the text that followed the last n-gram the last time it occurred."""

    method: Literal["ngram"] = "ngram"
    num_draft_tokens: int = Field(5, ge=1, le=MAX_DRAFT_TOKENS, description="Draft tokens per step.")
    ngram_max: int = Field(3, ge=1, le=32, description="Longest n-gram looked up.")
    ngram_min: int = Field(2, ge=1, le=32, description="Shortest n-gram looked up.")

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.ngram_min > self.ngram_max:
            raise ValueError(f"ngram_min ({self.ngram_min}) must not exceed ngram_max ({self.ngram_max})")
        return self


class DraftModelSpeculation(Section):
    """A smaller model of the same vocabulary drafts (Leviathan et al. 2023, Chen et al. 2023)."""

    method: Literal["draft_model"] = "draft_model"
    draft_model: str = Field(description="Catalog name, hub id, local folder or GGUF file of the draft.")
    draft_revision: str | None = Field(None, description="The draft's branch, tag or commit on the hub.")
    num_draft_tokens: int = Field(4, ge=1, le=MAX_DRAFT_TOKENS, description="Draft tokens per step.")
    probe: bool = Field(
        True, description="Draft a few tokens at start, and warn if the target accepts hardly any."
    )


SpeculationConfig = Annotated[
    NoSpeculation | NgramSpeculation | DraftModelSpeculation, Field(discriminator="method")
]


class EngineConfig(Section):
    """Everything the engine is built from."""

    model: ModelConfig = ModelConfig()
    cache: CacheConfig = CacheConfig()
    scheduler: SchedulerConfig = SchedulerConfig()
    speculation: SpeculationConfig = NgramSpeculation()
