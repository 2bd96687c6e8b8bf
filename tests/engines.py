"""Engines around tiny models, for the tests of everything above the models."""

from dataclasses import replace
from functools import cache
from typing import Any

import torch
from transformers import PreTrainedModel

from engine.config import (
    CacheConfig,
    DraftModelSpeculation,
    DType,
    EngineConfig,
    KVCacheDType,
    ModelConfig,
    NgramSpeculation,
    NoSpeculation,
    SchedulerConfig,
    SpeculationConfig,
    SuffixSpeculation,
)
from engine.drafting_config import PlannerName
from engine.factory import assemble
from engine.head_config import EagleSpeculation, MedusaSpeculation
from engine.llm import LLM
from engine.model.loaded_model import LoadedModel
from engine.model.loader import wrap_model
from engine.speculation.base import ProposalContext, Requirements, Speculator
from engine.speculation.drafter import Drafter
from engine.speculation.evidence import ALONE
from engine.speculation.factory import Draft, build_speculator
from engine.speculation.heads.config import EagleFamily
from engine.speculation.loaded_head import LoadedHead, wrap_eagle, wrap_medusa
from engine.token_tree import TokenTree
from tests.heads import eagle_config, random_eagle, random_medusa, trained_eagle, trained_medusa
from tests.operators import operators
from tests.tiny import VOCAB_SIZE, byte_tokenizer, round_to_four_bits, tiny_model

METHODS = ("ngram", "suffix", "draft_model")
TREES = ("draft_model 3,2,1,1", "draft_model sequoia", "draft_model dynamic", "draft_models 2,1,1")
"""A draft model with a tree; in the last, two draft models feed one."""
HEADS = ("eagle", "eagle3", "medusa", "eagle 2,2,1", "eagle3 3,2,1,1", "eagle3 dynamic", "medusa sequoia")
"""Heads on the target's hidden states, in chains and in trees."""


def load_tiny(
    arch: str = "llama",
    seed: int = 0,
    *,
    max_model_len: int = 128,
    noise: float = 0.0,
    dtype: DType | None = None,
    **config: Any,
) -> LoadedModel:
    """A tiny model as `load_own_tiny` makes it, one for all who ask for the same: nobody may change it."""
    return _shared(arch, seed, max_model_len, noise, dtype, frozenset(config.items()))


@cache
def _shared(
    arch: str,
    seed: int,
    max_model_len: int,
    noise: float,
    dtype: DType | None,
    config: frozenset[tuple[str, Any]],
) -> LoadedModel:
    wishes = dict(config)
    return load_own_tiny(arch, seed, max_model_len=max_model_len, noise=noise, dtype=dtype, **wishes)


def load_own_tiny(
    arch: str = "llama",
    seed: int = 0,
    *,
    max_model_len: int = 128,
    noise: float = 0.0,
    dtype: DType | None = None,
    **config: Any,
) -> LoadedModel:
    """A tiny model as the loader would hand it out; noise moves its weights, for drafts that often agree."""
    module = tiny_model(arch, seed, **config)
    if noise:
        add_noise(module, noise)
    if dtype == "int4":
        round_to_four_bits(module)
    return wrap_model(
        module,
        byte_tokenizer(),
        name="tiny",
        max_model_len=max_model_len,
        dtype=dtype,
        operators=operators(),
    )


def add_noise(module: PreTrainedModel, scale: float) -> None:
    """Moves every weight by a normal deviate of `scale` times the weight's own standard deviation."""
    generator = torch.Generator().manual_seed(1)
    for parameter in module.parameters():
        deviation = parameter.std() if parameter.numel() > 1 else torch.tensor(0.0)
        parameter.data += torch.randn(parameter.shape, generator=generator) * deviation * scale


class Unshared:
    """A lookup that takes each request to have its step to itself.

    In a full batch lookups draft only what is nearly sure, and the texts of tiny models never are; here they
    draft as much as for one request, so that batches are tested with drafts in them.
    """

    def __init__(self, lookup: Speculator) -> None:
        self._lookup = lookup
        self.num_computed_tokens = lookup.num_computed_tokens
        self.release = lookup.release

    @property
    def requirements(self) -> Requirements:
        return self._lookup.requirements

    def propose(self, context: ProposalContext) -> list[TokenTree]:
        requests = tuple(replace(request, price=ALONE) for request in context.requests)
        return self._lookup.propose(ProposalContext(requests))


def load_tiny_head(name: str, target: LoadedModel) -> LoadedHead:
    """A head for a tiny target, as the loader would hand it out.

    Args:
        name: "eagle", "eagle3" or "medusa".
        target: For the default one the head has learnt a few texts; for others it guesses at random.
    """
    vocab_size = target.vocab_size
    is_known = vocab_size == VOCAB_SIZE
    sizes: dict[str, Any] = {} if is_known else {"vocab_size": vocab_size, "draft_vocab_size": None}
    is_known &= type(target.module).__name__ == "LlamaForCausalLM"
    if name == "medusa":
        return wrap_medusa(trained_medusa() if is_known else random_medusa(**sizes), target, name="tiny")
    family: EagleFamily = "eagle3" if name == "eagle3" else "eagle"
    config = eagle_config(family, **sizes)
    return wrap_eagle(trained_eagle(family) if is_known else random_eagle(config), target, name="tiny")


def drafter_of(llm: LLM) -> Drafter:
    """The configured method; those that draft before it are others."""
    drafting = llm.core._drafting
    assert drafting is not None
    return drafting._drafters[-1]


def build_llm(
    method: str = "none",
    *,
    target: LoadedModel | None = None,
    draft: LoadedModel | None = None,
    speculator: Speculator | None = None,
    num_draft_tokens: int = 4,
    num_kv_blocks: int = 256,
    max_num_seqs: int = 8,
    max_num_batched_tokens: int = 256,
    prefix_caching: bool = True,
    block_size: int = 4,
    allow_lossy: bool = False,
    planner: PlannerName = "fixed",
    kv_cache_dtype: KVCacheDType = "auto",
    enforce_eager: bool = False,
    **drafting: Any,
) -> LLM:
    """An engine with room to spare; tests make it small where they need it small.

    Args:
        method: The method's name, and after a space the tree of a draft model or head.
        drafting: More settings of the draft model's or head's section, such as its tree.
    """
    speculation: SpeculationConfig = NoSpeculation()
    drafts: list[Draft] = []
    if method == "ngram":
        speculation = NgramSpeculation(
            num_draft_tokens=num_draft_tokens, ngram_min=1, allow_lossy=allow_lossy, planner=planner
        )
    elif method == "suffix":
        speculation = SuffixSpeculation(
            num_draft_tokens=num_draft_tokens, suffix_share=True, allow_lossy=allow_lossy, planner=planner
        )
    target = target or load_tiny()
    name, _, tree = method.partition(" ")
    if tree:
        drafting["tree"] = tree
    if "tree" not in drafting:
        drafting["num_draft_tokens"] = num_draft_tokens
    if name in ("eagle", "eagle3", "medusa"):
        drafts = [load_tiny_head(name, target)]
        kind = MedusaSpeculation if name == "medusa" else EagleSpeculation
        speculation = kind(head="tiny", allow_lossy=allow_lossy, planner=planner, **drafting)
    elif name in ("draft_model", "draft_models"):
        drafts = [draft or load_tiny(noise=0.1)]
        if name == "draft_models":
            drafts.append(load_tiny(noise=0.05))
            drafting["extra_draft_models"] = ("another",)
        speculation = DraftModelSpeculation(
            draft_model="tiny", allow_lossy=allow_lossy, planner=planner, **drafting
        )
    config = EngineConfig(
        model=ModelConfig(enforce_eager=enforce_eager),
        cache=CacheConfig(
            block_size=block_size,
            num_kv_blocks=num_kv_blocks,
            kv_cache_dtype=kv_cache_dtype,
            prefix_caching=prefix_caching,
        ),
        scheduler=SchedulerConfig(max_num_seqs=max_num_seqs, max_num_batched_tokens=max_num_batched_tokens),
        speculation=speculation,
    )
    if speculator is None and method in ("ngram", "suffix"):
        lookup = build_speculator(config, target, [], num_kv_blocks)
        assert lookup is not None
        speculator = Unshared(lookup)
    return LLM(assemble(config, target, drafts, speculator))
