"""Builds an engine from its config: the only place where all the parts meet."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass

from engine.admission import EngineLimits
from engine.client import ModelInfo
from engine.config import EngineConfig
from engine.core.kv_cache_manager import KVCacheManager
from engine.core.scheduler import Scheduler
from engine.drafting import Drafting
from engine.engine_core import EngineCore
from engine.model.attention.choice import choose_backend
from engine.model.kv_cache import PagedKVCache
from engine.model.loaded_model import LoadedModel
from engine.model.loader import load_causal_lm
from engine.model.memory import GIB, CacheFootprint, plan_blocks
from engine.model.model_runner import ModelRunner
from engine.output_processor import OutputProcessor
from engine.sampling_params import Acceptance
from engine.speculation.base import Speculator
from engine.speculation.factory import build_speculator, load_drafts, max_draft_nodes
from engine.speculation.planner import Planner
from engine.tokenizer import Tokenizer

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Engine:
    """An engine ready to step.

    Attributes:
        core: The loop's body.
        model: What the server may know of the model.
        tokenizer: The model's; None serves token ids only.
    """

    core: EngineCore
    model: ModelInfo
    tokenizer: Tokenizer | None


def build_engine(config: EngineConfig) -> Engine:
    """Loads the models a config names and builds the engine around them.

    Raises:
        StartupError: A setting cannot hold; the message says what to do.
    """
    target = load_causal_lm(config.model)
    return assemble(config, target, load_drafts(config.speculation, target, config.model))


def assemble(
    config: EngineConfig,
    target: LoadedModel,
    drafts: Sequence[LoadedModel] = (),
    speculator: Speculator | None = None,
) -> Engine:
    """Builds an engine around models that are in memory already.

    Args:
        config: The settings; which models it names does not matter here.
        target: The model that is served.
        drafts: The draft models, if the speculation method has any.
        speculator: Used instead of the one the config names.
    """
    plan = plan_blocks(
        config.cache,
        config.scheduler,
        [CacheFootprint(model.layers, model.dtype) for model in (target, *drafts)],
        target.max_model_len,
        target.device,
    )
    logger.info(
        "kv cache: %d blocks of %d tokens, %.2f GiB for %s (%s)",
        plan.num_blocks,
        config.cache.block_size,
        plan.total_bytes / GIB,
        "target and draft" if drafts else "the target",
        plan.reason,
    )
    if speculator is None:
        speculator = build_speculator(config, target, drafts, plan.num_blocks)
    tokenizer = None if target.tokenizer is None else Tokenizer(target.tokenizer)
    kv = KVCacheManager(plan.num_blocks, config.cache.block_size, prefix_caching=config.cache.prefix_caching)
    scheduler = Scheduler(
        kv,
        max_num_seqs=config.scheduler.max_num_seqs,
        max_num_batched_tokens=config.scheduler.max_num_batched_tokens,
    )
    cache = PagedKVCache(target.layers, plan.num_blocks, config.cache.block_size, target.dtype, target.device)
    runner = ModelRunner(target.module, cache, choose_backend(target.operators), target.vocab_size)
    drafting = _drafting(config, target, drafts, speculator)
    core = EngineCore(runner, scheduler, OutputProcessor(tokenizer), _limits(config, target), drafting)
    return Engine(core, _model_info(config, target, tokenizer), tokenizer)


def _limits(config: EngineConfig, target: LoadedModel) -> EngineLimits:
    return EngineLimits(
        target.max_model_len,
        target.vocab_size,
        target.eos_token_ids,
        config.scheduler.max_num_queued,
        config.speculation.policy,
    )


def _drafting(
    config: EngineConfig, target: LoadedModel, drafts: Sequence[LoadedModel], speculator: Speculator | None
) -> Drafting | None:
    if speculator is None:
        logger.info("speculation: none")
        return None
    logger.info(
        "speculation: %s, %d draft tokens per step%s, accepted by %s",
        config.speculation.method,
        max_draft_nodes(config.speculation),
        "".join(f", drafted by {draft.name} (context {draft.max_model_len})" for draft in drafts),
        config.speculation.policy.default,
    )
    if config.speculation.policy.allow_lossy:
        logger.warning(
            "allow_lossy is on: requests with typical acceptance%s do not get the model's own distribution",
            ", the default here," if config.speculation.policy.default is Acceptance.TYPICAL else "",
        )
    planner = Planner(
        max_draft_nodes(config.speculation),
        target.max_model_len,
        speculator.requirements.max_model_len,
        branches=speculator.requirements.branches,
    )
    return Drafting(config.speculation.method, speculator, planner, target.vocab_size)


def _model_info(config: EngineConfig, target: LoadedModel, tokenizer: Tokenizer | None) -> ModelInfo:
    return ModelInfo(
        name=target.name,
        vocab_size=target.vocab_size,
        max_model_len=target.max_model_len,
        method=config.speculation.method,
        max_draft_tokens=max_draft_nodes(config.speculation),
        has_chat_template=tokenizer is not None and tokenizer.has_chat_template,
        acceptance=config.speculation.policy,
        weights=target.weights,
    )
