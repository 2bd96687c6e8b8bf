"""Builds the speculator that the configuration names; the only place that knows which class is which."""

from engine.config import (
    DraftModelSpeculation,
    EngineConfig,
    ModelConfig,
    NgramSpeculation,
    NoSpeculation,
    SpeculationConfig,
)
from engine.model.attention.choice import choose_backend
from engine.model.kv_cache import PagedKVCache
from engine.model.loader import LoadedModel, load_causal_lm
from engine.model.model_runner import ModelRunner
from engine.model.vocabulary import check_same_vocabulary
from engine.speculation.base import Speculator
from engine.speculation.draft_model import DraftModelSpeculator
from engine.speculation.ngram import NgramSpeculator


def load_draft(
    speculation: SpeculationConfig, target: LoadedModel, model_config: ModelConfig
) -> LoadedModel | None:
    """The second model that the method needs, or None.

    It is loaded before any cache is built, since both models share the memory that caches take.

    Args:
        speculation: The method and its settings.
        target: The model whose tokens are drafted.
        model_config: The target's settings. Device, types, cache folder and trust hold for the draft as well.

    Raises:
        StartupError: The draft cannot be loaded, or an id does not mean the same token to both models.
    """
    match speculation:
        case DraftModelSpeculation():
            draft = load_causal_lm(
                model_config.model_copy(
                    update={
                        "model": speculation.draft_model,
                        "revision": speculation.draft_revision,
                        "max_model_len": None,
                        "chat_template": None,
                    }
                )
            )
            check_same_vocabulary(target, draft)
            return draft
        case NoSpeculation() | NgramSpeculation():
            return None


def wants_probe(speculation: SpeculationConfig) -> bool:
    """Whether a start should try the method out: where a model drafts, which may be the wrong one."""
    match speculation:
        case DraftModelSpeculation(probe=probe):
            return probe
        case _:
            return False


def build_speculator(
    config: EngineConfig, target: LoadedModel, draft: LoadedModel | None, num_blocks: int
) -> Speculator | None:
    """The speculator of `config.speculation`; None for plain decoding.

    Args:
        config: The engine's settings.
        target: The model whose tokens are drafted.
        draft: What `load_draft` returned.
        num_blocks: Blocks of the engine's pool; a speculator's cache has as many.
    """
    match config.speculation:
        case NoSpeculation():
            return None
        case NgramSpeculation(ngram_min=ngram_min, ngram_max=ngram_max):
            return NgramSpeculator(ngram_min, ngram_max, target.eos_token_ids)
        case DraftModelSpeculation():
            assert draft is not None, "load_draft gives a draft model for this method"
            cache = PagedKVCache(draft.layers, num_blocks, config.cache.block_size, draft.dtype, draft.device)
            return DraftModelSpeculator(
                ModelRunner(draft.module, cache, choose_backend(draft.operators), target.vocab_size),
                max_model_len=draft.max_model_len,
                max_num_batched_tokens=config.scheduler.max_num_batched_tokens,
                eos_token_ids=target.eos_token_ids,
            )
