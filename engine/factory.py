"""Builds an engine from its config: the only place where all the parts meet."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

from engine.admission import EngineLimits
from engine.calibration import CalibrationLimits, calibrate
from engine.client import ModelInfo
from engine.config import EngineConfig
from engine.core.kv_cache_manager import KVCacheManager
from engine.core.scheduler import Scheduler
from engine.drafting import Drafting
from engine.engine_core import EngineCore
from engine.grammar import GrammarCompiler, GrammarVocabulary
from engine.graph_reserve import reserved_bytes
from engine.model.attention.choice import choose_backend
from engine.model.cache_type import check_cache_type, choose_cache_type
from engine.model.kv_cache import PagedKVCache
from engine.model.loaded_model import LoadedModel
from engine.model.loader import load_causal_lm
from engine.model.memory import GIB, CacheFootprint, plan_blocks
from engine.model.model_runner import ModelRunner
from engine.model.weight_type import choose_device
from engine.output_processor import OutputProcessor
from engine.sampling_params import Acceptance
from engine.speculation.auto_planner import AutoPlanner
from engine.speculation.base import Speculator
from engine.speculation.drafter import Drafter
from engine.speculation.drafters import build_drafters, predictions_of
from engine.speculation.factory import (
    Draft,
    build_speculator,
    load_drafts,
    lookup_settings,
    max_draft_nodes,
    wants_probe,
)
from engine.speculation.measurements import Measurements, MethodMeasurements
from engine.speculation.planner import FixedPlanner, Planner
from engine.speculation_probe import log_probe, probe_speculation
from engine.tokenizer import Tokenizer

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Engine:
    """An engine ready to step.

    Attributes:
        core: The loop's body.
        runner: The target, for whoever wants to look at its rows between two steps.
        model: What the server may know of the model.
        tokenizer: The model's; None serves token ids only.
    """

    core: EngineCore
    runner: ModelRunner
    model: ModelInfo
    tokenizer: Tokenizer | None


def build_engine(config: EngineConfig) -> Engine:
    """Loads the models a config names and builds the engine around them.

    Raises:
        StartupError: A setting cannot hold; the message says what to do.
    """
    check_cache_type(config.cache.kv_cache_dtype, choose_device(config.model.device))
    target = load_causal_lm(config.model)
    drafts = load_drafts(config.speculation, target, config.model)
    parts = _parts(config, target, drafts, None)
    parts.calibrate()
    engine = parts.engine()
    if engine.tokenizer is None or not wants_probe(config.speculation):
        return engine
    # Books of its own: the probe leaves nothing in prefix cache and counters. It drafts whether or not that
    # pays, and so gives the planner its first figures.
    core = parts.core(prefix_caching=False, planner=FixedPlanner())
    result = probe_speculation(core, engine.tokenizer)
    log_probe(result, config.speculation.method)
    return replace(engine, model=replace(engine.model, probed_acceptance=result.acceptance))


def assemble(
    config: EngineConfig,
    target: LoadedModel,
    drafts: Sequence[Draft] = (),
    speculator: Speculator | None = None,
    *,
    calibrates: bool = False,
) -> Engine:
    """Builds an engine around models that are in memory already.

    Args:
        config: The settings; which models it names does not matter here.
        target: The model that is served.
        drafts: The draft models or the head, if the speculation method has any.
        speculator: Used instead of the one the config names.
        calibrates: Whether the target's passes are timed for the planner; else it learns from steps alone.
    """
    parts = _parts(config, target, drafts, speculator)
    if calibrates:
        parts.calibrate()
    return parts.engine()


@dataclass(frozen=True, slots=True)
class _Parts:
    """What cores are made of. Two of them must never have work at the same time: they share the caches."""

    config: EngineConfig
    target: LoadedModel
    runner: ModelRunner
    num_blocks: int
    drafters: tuple[Drafter, ...]
    measurements: Measurements
    tokenizer: Tokenizer | None

    def engine(self) -> Engine:
        """The engine."""
        core = self.core(prefix_caching=self.config.cache.prefix_caching)
        return Engine(
            core, self.runner, _model_info(self.config, self.target, self.tokenizer), self.tokenizer
        )

    def calibrate(self) -> None:
        """Times passes of the target, if anybody goes by what they take."""
        if not self.drafters or self.config.speculation.planner != "auto":
            return
        num_slots = self.num_blocks * self.config.cache.block_size
        limits = CalibrationLimits(
            min(num_slots, self.target.max_model_len), self.config.scheduler.max_num_batched_tokens
        )
        calibrate(self.runner, self.measurements.cost, limits)
        table = self.measurements.cost.table()
        curve = ", ".join(f"{rows} rows {1000 * seconds:.3g} ms" for rows, seconds, _ in table)
        logger.info("planner: a pass of the target takes: %s", curve)

    def core(self, *, prefix_caching: bool, planner: Planner | None = None) -> EngineCore:
        """A core with books of its own over the models and caches."""
        config, target = self.config, self.target
        kv = KVCacheManager(self.num_blocks, config.cache.block_size, prefix_caching=prefix_caching)
        scheduler = Scheduler(
            kv,
            max_num_seqs=config.scheduler.max_num_seqs,
            max_num_batched_tokens=config.scheduler.max_num_batched_tokens,
        )
        drafting = None
        if self.drafters:
            planner = planner or _planner(config, self.measurements)
            drafting = Drafting(self.drafters, planner, self.measurements, predictions_of(self.drafters))
        return EngineCore(
            self.runner,
            scheduler,
            OutputProcessor(self.tokenizer),
            _limits(config, target, self.tokenizer),
            drafting,
        )


def _parts(
    config: EngineConfig, target: LoadedModel, drafts: Sequence[Draft], speculator: Speculator | None
) -> _Parts:
    dtype = choose_cache_type(config.cache.kv_cache_dtype, target)
    backend = choose_backend(target.operators, target.device, records=not config.model.enforce_eager)
    plan = plan_blocks(
        config.cache,
        config.scheduler,
        [_footprint(model, config, target) for model in (target, *drafts)],
        target.max_model_len,
        target.device,
        0 if backend.recorded is None else reserved_bytes(target, drafts),
    )
    logger.info(
        "kv cache: %d blocks of %d tokens, %s, %.2f GiB for %s (%s)",
        plan.num_blocks,
        config.cache.block_size,
        str(dtype).removeprefix("torch."),
        plan.total_bytes / GIB,
        "target and draft" if drafts else "the target",
        plan.reason,
    )
    if speculator is None:
        speculator = build_speculator(config, target, drafts, plan.num_blocks)
    drafters = build_drafters(config, target, speculator)
    _log_speculation(config, drafts, is_on=speculator is not None)
    cache = PagedKVCache(target.layers, plan.num_blocks, config.cache.block_size, dtype, target.device)
    runner = ModelRunner(target.module, cache, backend, target.vocab_size, target.operators, target.weights)
    tokenizer = None if target.tokenizer is None else Tokenizer(target.tokenizer)
    measurements = Measurements(
        [MethodMeasurements(each.method, each.needs.estimates, each.needs.shape) for each in drafters]
    )
    return _Parts(config, target, runner, plan.num_blocks, drafters, measurements, tokenizer)


def _footprint(model: Draft, config: EngineConfig, target: LoadedModel) -> CacheFootprint:
    """A draft model's cache is of the type that fits it, a head's as its target's."""
    wanted = config.cache.kv_cache_dtype
    if isinstance(model, LoadedModel):
        return CacheFootprint(model.layers, choose_cache_type(wanted, model))
    extra = model.numbers_per_block * model.dtype.itemsize
    return CacheFootprint(model.layers, choose_cache_type(wanted, target), extra)


def _log_speculation(config: EngineConfig, drafts: Sequence[Draft], *, is_on: bool) -> None:
    if not is_on:
        predictions = "the requests' own predictions alone" if config.speculation.predictions else "none"
        logger.info("speculation: %s", predictions)
        return
    logger.info(
        "speculation: %s, at most %d draft tokens per step%s, accepted by %s",
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


def _limits(config: EngineConfig, target: LoadedModel, tokenizer: Tokenizer | None) -> EngineLimits:
    return EngineLimits(
        target.max_model_len,
        target.vocab_size,
        target.eos_token_ids,
        config.scheduler.max_num_queued,
        _grammars(target, tokenizer),
        config.speculation.policy,
    )


def _grammars(target: LoadedModel, tokenizer: Tokenizer | None) -> GrammarCompiler:
    size = target.vocab_size
    eos_token_ids = frozenset(token for token in target.eos_token_ids if token < size)

    def read_vocabulary() -> GrammarVocabulary:
        assert tokenizer is not None, "without one nothing is compiled"
        return GrammarVocabulary(
            tokens=tuple(map(tokenizer.token_bytes, range(size))),
            special_token_ids=frozenset(
                token for token in tokenizer.special_ids if token < target.vocab_size
            ),
            eos_token_ids=eos_token_ids,
            encode=partial(tokenizer.encode, add_special_tokens=False),
        )

    if tokenizer is None or not tokenizer.is_bytewise:
        return GrammarCompiler("a format needs a tokenizer whose texts are its tokens' bytes strung together")
    if not eos_token_ids:
        return GrammarCompiler("a format has an end, and this model has no end-of-text token to say so")
    return GrammarCompiler(read_vocabulary)


def _planner(config: EngineConfig, measurements: Measurements) -> Planner:
    return AutoPlanner(measurements) if config.speculation.planner == "auto" else FixedPlanner()


def _model_info(config: EngineConfig, target: LoadedModel, tokenizer: Tokenizer | None) -> ModelInfo:
    return ModelInfo(
        name=target.name,
        vocab_size=target.vocab_size,
        max_model_len=target.max_model_len,
        method=config.speculation.method,
        max_draft_tokens=max(
            max_draft_nodes(settings)
            for settings in (config.speculation, lookup_settings(config.speculation))
            if settings is not None
        ),
        has_chat_template=tokenizer is not None and tokenizer.has_chat_template,
        chat_template="" if tokenizer is None else tokenizer.chat_template,
        tool_template="" if tokenizer is None else tokenizer.tool_template,
        acceptance=config.speculation.policy,
        weights=target.weights,
        takes_predictions=config.speculation.predictions,
    )
