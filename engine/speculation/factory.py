"""Builds the speculator that the configuration names; the only place that knows which class is which."""

from collections.abc import Sequence

from engine.config import (
    DraftModelSpeculation,
    EngineConfig,
    ModelConfig,
    NgramSpeculation,
    NoSpeculation,
    SpeculationConfig,
    SuffixSpeculation,
)
from engine.model.attention.choice import choose_backend
from engine.model.kv_cache import PagedKVCache
from engine.model.loader import LoadedModel, load_causal_lm
from engine.model.model_runner import ModelRunner
from engine.model.vocabulary import check_same_vocabulary
from engine.speculation.base import Speculator
from engine.speculation.continuation import GrowthRules
from engine.speculation.draft_model import DraftLimits, DraftModelSpeculator
from engine.speculation.drawing import DrawingStyle
from engine.speculation.growth import (
    ChainGardener,
    DynamicGardener,
    Gardener,
    SequoiaGardener,
    StaticGardener,
)
from engine.speculation.ngram import NgramSpeculator
from engine.speculation.several import SeveralSpeculators
from engine.speculation.suffix import SuffixSpeculator
from engine.speculation.text_store import TextStore
from engine.speculation.tree_shape import PRIOR_RATES, likeliest_shape
from engine.tree_config import DynamicTree, SequoiaTree, StaticTree


def load_drafts(
    speculation: SpeculationConfig, target: LoadedModel, model_config: ModelConfig
) -> list[LoadedModel]:
    """The models that the method needs beside the target.

    They are loaded before any cache is built, since all models share the memory that caches take.

    Args:
        speculation: The method and its settings.
        target: The model whose tokens are drafted.
        model_config: The target's settings. Device, types, cache folder and trust hold for the draft as well.

    Raises:
        StartupError: A draft cannot be loaded, or an id does not mean the same token to both models.
    """
    match speculation:
        case DraftModelSpeculation():
            names = [
                (speculation.draft_model, speculation.draft_revision),
                *((name, None) for name in speculation.extra_draft_models),
            ]
            drafts = []
            for name, revision in names:
                own = {"model": name, "revision": revision, "max_model_len": None, "chat_template": None}
                drafts.append(load_causal_lm(model_config.model_copy(update=own)))
                check_same_vocabulary(target, drafts[-1])
            return drafts
        case NoSpeculation() | NgramSpeculation() | SuffixSpeculation():
            return []


def max_draft_nodes(speculation: SpeculationConfig) -> int:
    """Draft nodes per step of the method itself where a request does not say."""
    match speculation:
        case DraftModelSpeculation(max_nodes=max_nodes):
            return max_nodes
        case _:
            return speculation.num_draft_tokens


def lookup_settings(speculation: SpeculationConfig) -> NgramSpeculation | SuffixSpeculation | None:
    """The lookup that drafts before the method itself, if one is set; with that method's defaults."""
    match speculation:
        case DraftModelSpeculation(lookup="ngram"):
            return NgramSpeculation()
        case DraftModelSpeculation(lookup="suffix"):
            return SuffixSpeculation()
        case _:
            return None


def wants_probe(speculation: SpeculationConfig) -> bool:
    """Whether a start should try the method out: where a model drafts, which may be the wrong one."""
    match speculation:
        case DraftModelSpeculation(probe=probe):
            return probe
        case _:
            return False


def build_speculator(
    config: EngineConfig, target: LoadedModel, drafts: Sequence[LoadedModel], num_blocks: int
) -> Speculator | None:
    """The speculator of `config.speculation`; None for plain decoding.

    Args:
        config: The engine's settings.
        target: The model whose tokens are drafted.
        drafts: What `load_drafts` returned.
        num_blocks: Blocks of the engine's pool; a speculator's cache has as many.
    """
    match config.speculation:
        case NoSpeculation():
            return None
        case NgramSpeculation(ngram_min=ngram_min, ngram_max=ngram_max):
            return NgramSpeculator(ngram_min, ngram_max, target.eos_token_ids)
        case SuffixSpeculation() as suffix:
            return _suffix_speculator(suffix, target.eos_token_ids)
        case DraftModelSpeculation():
            speculators = [_draft_with(draft, config, target, num_blocks) for draft in drafts]
            return speculators[0] if len(speculators) == 1 else SeveralSpeculators(speculators)


def _draft_with(
    draft: LoadedModel, config: EngineConfig, target: LoadedModel, num_blocks: int
) -> DraftModelSpeculator:
    speculation = config.speculation
    assert isinstance(speculation, DraftModelSpeculation), "only this method drafts with a model"
    cache = PagedKVCache(draft.layers, num_blocks, config.cache.block_size, draft.dtype, draft.device)
    return DraftModelSpeculator(
        ModelRunner(draft.module, cache, choose_backend(draft.operators), target.vocab_size, draft.operators),
        DraftLimits(draft.max_model_len, config.scheduler.max_num_batched_tokens),
        target.eos_token_ids,
        _gardener(speculation.tree),
        DrawingStyle(
            couples=speculation.draft_sampling == "coupled",
            with_replacement=speculation.sibling_sampling == "with_replacement",
            branches=speculation.tree is not None and speculation.tree.branches,
        ),
    )


def _gardener(tree: StaticTree | SequoiaTree | DynamicTree | None) -> Gardener:
    match tree:
        case None:
            return ChainGardener()
        case StaticTree(widths=widths, num_nodes=num_nodes):
            return StaticGardener(likeliest_shape(PRIOR_RATES, num_nodes, widths))
        case SequoiaTree(max_nodes=max_nodes, max_depth=max_depth):
            return SequoiaGardener(max_nodes, max_depth)
        case DynamicTree(max_nodes=max_nodes, max_depth=max_depth, top_k=top_k):
            return DynamicGardener(max_nodes, max_depth, top_k)


def _suffix_speculator(config: SuffixSpeculation, eos_token_ids: frozenset[int]) -> SuffixSpeculator:
    store = None
    if config.suffix_share:
        store = TextStore(config.suffix_max_cached_requests, config.suffix_max_cached_tokens)
    rules = GrowthRules(config.suffix_factor, config.suffix_min_probability, config.suffix_tree)
    return SuffixSpeculator(rules, config.suffix_max_depth, eos_token_ids, store)
