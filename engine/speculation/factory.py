"""Builds the speculator that the configuration names; the only place that knows which class is which."""

from collections.abc import Callable, Sequence

import torch

from engine.config import (
    DraftModelSpeculation,
    EngineConfig,
    ModelConfig,
    NgramSpeculation,
    NoSpeculation,
    SpeculationConfig,
    SuffixSpeculation,
)
from engine.drafting_config import ModelSection
from engine.errors import StartupError
from engine.head_config import EagleSpeculation, MedusaSpeculation
from engine.model.attention.choice import choose_backend
from engine.model.attention.interface import AttentionBackend
from engine.model.cache_type import choose_cache_type
from engine.model.kv_cache import PagedKVCache
from engine.model.loader import LoadedModel, load_causal_lm
from engine.model.model_runner import ModelRunner
from engine.model.row_graphs import RowGraphs
from engine.model.vocabulary import check_same_vocabulary
from engine.sampling.device_rows import DeviceRows
from engine.speculation.base import Speculator
from engine.speculation.chain_growth import ChainGardener
from engine.speculation.continuation import GrowthRules
from engine.speculation.draft_model import DraftLimits, DraftModelSpeculator
from engine.speculation.draft_vocabulary import choose_vocabulary
from engine.speculation.drawing import DrawingStyle
from engine.speculation.eagle import EagleSpeculator
from engine.speculation.growing import DRAWING_LIMITS, TreeGrower
from engine.speculation.growth import (
    DynamicGardener,
    Gardener,
    SequoiaGardener,
    ShapeRates,
    StaticGardener,
)
from engine.speculation.head_progress import BoundaryFeatures
from engine.speculation.head_rates import HeadRates
from engine.speculation.head_runner import HeadRunner
from engine.speculation.head_stack import stack_head
from engine.speculation.heads.medusa_tree import shape_of
from engine.speculation.loaded_head import LoadedEagle, LoadedHead, LoadedMedusa, load_head
from engine.speculation.medusa import MedusaSpeculator
from engine.speculation.medusa_runner import MedusaRunner
from engine.speculation.ngram import NgramSpeculator
from engine.speculation.rank_rates import RankRates
from engine.speculation.several import SeveralSpeculators
from engine.speculation.suffix import SuffixSpeculator
from engine.speculation.target_ends import TargetEnds
from engine.speculation.text_store import TextStore
from engine.speculation.tree_shape import PRIOR_RATES, likeliest_shape
from engine.tree_config import DynamicTree, SequoiaTree, StaticTree

Draft = LoadedModel | LoadedHead


def load_drafts(
    speculation: SpeculationConfig, target: LoadedModel, model_config: ModelConfig
) -> list[Draft]:
    """The models and heads that the method needs beside the target.

    They are loaded before any cache is built, since all models share the memory that caches take.

    Args:
        speculation: The method and its settings.
        target: The model whose tokens are drafted.
        model_config: The target's settings. Device, types, cache folder and trust hold for the draft as well.

    Raises:
        ModelNotFound: There is no such model or head.
        ModelNotSupported: A head is of another kind, or for another target.
        StartupError: A draft cannot be loaded, or an id does not mean the same token to both models.
    """
    match speculation:
        case DraftModelSpeculation():
            names = [
                (speculation.draft_model, speculation.draft_revision),
                *((name, None) for name in speculation.extra_draft_models),
            ]
            drafts: list[Draft] = []
            # Four bits are asked of the target; a draft has them if its file has.
            dtype = "auto" if model_config.dtype == "int4" else model_config.dtype
            alike = {"dtype": dtype, "max_model_len": None, "chat_template": None}
            for name, revision in names:
                own = {"model": name, "revision": revision, **alike}
                draft = load_causal_lm(model_config.model_copy(update=own), rounds=speculation.draft_rounding)
                check_same_vocabulary(target, draft)
                drafts.append(draft)
            return drafts
        case EagleSpeculation() | MedusaSpeculation():
            return [load_head(speculation, target, model_config)]
        case NoSpeculation() | NgramSpeculation() | SuffixSpeculation():
            return []


def max_draft_nodes(speculation: SpeculationConfig) -> int:
    """Draft nodes per step of the method itself where a request does not say."""
    match speculation:
        case ModelSection(max_nodes=max_nodes):
            return max_nodes
        case _:
            return speculation.num_draft_tokens


def lookup_settings(speculation: SpeculationConfig) -> NgramSpeculation | SuffixSpeculation | None:
    """The lookup that drafts before the method itself, if one is set; with that method's defaults."""
    match speculation:
        case ModelSection(lookup="ngram"):
            return NgramSpeculation()
        case ModelSection(lookup="suffix"):
            return SuffixSpeculation()
        case _:
            return None


def wants_probe(speculation: SpeculationConfig) -> bool:
    """Whether a start should try the method out: where a model drafts, which may be the wrong one."""
    match speculation:
        case ModelSection(probe=probe):
            return probe
        case _:
            return False


def build_speculator(
    config: EngineConfig, target: LoadedModel, drafts: Sequence[Draft], num_blocks: int
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
            models = [draft for draft in drafts if isinstance(draft, LoadedModel)]
            speculators = [_draft_with(draft, config, target, num_blocks) for draft in models]
            return speculators[0] if len(speculators) == 1 else SeveralSpeculators(speculators)
        case EagleSpeculation() as eagle:
            [head] = [draft for draft in drafts if isinstance(draft, LoadedEagle)]
            return _eagle_speculator(head, eagle, config, target, num_blocks)
        case MedusaSpeculation() as medusa:
            [heads] = [draft for draft in drafts if isinstance(draft, LoadedMedusa)]
            return _medusa_speculator(heads, medusa, config.model, target)


def _draft_with(
    draft: LoadedModel, config: EngineConfig, target: LoadedModel, num_blocks: int
) -> DraftModelSpeculator:
    speculation = config.speculation
    assert isinstance(speculation, DraftModelSpeculation), "only this method drafts with a model"
    dtype = choose_cache_type(config.cache.kv_cache_dtype, draft)
    cache = PagedKVCache(draft.layers, num_blocks, config.cache.block_size, dtype, draft.device)
    backend = choose_backend(draft.operators, draft.device, records=not config.model.enforce_eager)
    runner = ModelRunner(draft.module, cache, backend, target.vocab_size, draft.operators)
    ends = TargetEnds(draft.module, target.vocab_size)
    return DraftModelSpeculator(
        runner,
        DraftLimits(draft.max_model_len, config.scheduler.max_num_batched_tokens),
        _grower(speculation, target, _gardener(speculation.tree), backend),
        choose_vocabulary(speculation.draft_vocab_size, runner, ends, target.eos_token_ids),
    )


def _eagle_speculator(
    loaded: LoadedEagle,
    speculation: EagleSpeculation,
    config: EngineConfig,
    target: LoadedModel,
    num_blocks: int,
) -> EagleSpeculator:
    block_size = config.cache.block_size
    dtype = choose_cache_type(config.cache.kv_cache_dtype, target)
    cache = PagedKVCache(loaded.layers, num_blocks, block_size, dtype, target.device)
    ends = TargetEnds(target.module, target.vocab_size)
    feature = torch.empty(loaded.numbers_per_block, dtype=target.dtype, device=target.device)
    stack = stack_head(loaded.head, ends, cache, target.operators)
    backend = choose_backend(target.operators, target.device, records=not config.model.enforce_eager)
    return EagleSpeculator(
        HeadRunner(loaded.head, cache, backend, ends, stack),
        loaded.hidden_states,
        BoundaryFeatures(num_blocks, block_size, feature),
        config.scheduler.max_num_batched_tokens,
        _grower(speculation, target, _gardener(speculation.tree), backend),
    )


def _medusa_speculator(
    loaded: LoadedMedusa, speculation: MedusaSpeculation, model: ModelConfig, target: LoadedModel
) -> MedusaSpeculator:
    num_heads, choices = loaded.heads.config.num_heads, loaded.heads.config.choices
    gardener = _gardener(speculation.tree, lambda: HeadRates(num_heads))
    if speculation.medusa_choices:
        if choices is None:
            raise StartupError(
                f"medusa_choices is on, but the config of {loaded.name} names no tree: set tree instead"
            )
        gardener = StaticGardener(shape_of(choices))
    ends = TargetEnds(target.module, target.vocab_size)
    backend = choose_backend(target.operators, target.device, records=not model.enforce_eager)
    recorded = backend.recorded
    runner = MedusaRunner(loaded.heads, ends, None if recorded is None else recorded.recorder)
    return MedusaSpeculator(runner, _grower(speculation, target, gardener, backend))


def _grower(
    speculation: ModelSection, target: LoadedModel, gardener: Gardener, backend: AttentionBackend
) -> TreeGrower:
    """Draws where the rows are; what records the passes that give them records that too."""
    style = DrawingStyle(
        couples=speculation.draft_sampling == "coupled",
        with_replacement=speculation.sibling_sampling == "with_replacement",
        branches=speculation.tree_branches,
    )
    far = None
    if target.device.type != "cpu":
        recorded = backend.recorded
        far = DeviceRows(None if recorded is None else RowGraphs(recorded.recorder, *DRAWING_LIMITS))
    return TreeGrower(gardener, style, target.eos_token_ids, target.operators, far)


def _gardener(
    tree: StaticTree | SequoiaTree | DynamicTree | None, make_rates: Callable[[], ShapeRates] = RankRates
) -> Gardener:
    match tree:
        case None:
            return ChainGardener()
        case StaticTree(widths=widths, num_nodes=num_nodes):
            return StaticGardener(likeliest_shape(PRIOR_RATES, num_nodes, widths))
        case SequoiaTree(max_nodes=max_nodes, max_depth=max_depth):
            return SequoiaGardener(max_nodes, max_depth, make_rates)
        case DynamicTree(max_nodes=max_nodes, max_depth=max_depth, top_k=top_k):
            return DynamicGardener(max_nodes, max_depth, top_k)


def _suffix_speculator(config: SuffixSpeculation, eos_token_ids: frozenset[int]) -> SuffixSpeculator:
    store = None
    if config.suffix_share:
        store = TextStore(config.suffix_max_cached_requests, config.suffix_max_cached_tokens)
    rules = GrowthRules(config.suffix_factor, config.suffix_min_probability, config.suffix_tree)
    return SuffixSpeculator(rules, config.suffix_max_depth, eos_token_ids, store)
