"""Gets a causal language model into memory, on the right device and in the right type.

name ─▶ folder ─▶ config ─▶ fit to be paged? ─┬─▶ weights ─▶ fused ─▶ checked ─▶ packed ─┬─▶ LoadedModel
                                              ├─▶ the same, one layer after the other ───┤
                                              └─▶ packed weights of an earlier start ────┘
"""

import logging
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast

import torch
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from engine.config import DType, ModelConfig
from engine.model.attention.interface import ATTENTION_NAME, register
from engine.model.checkpoint import Checkpoint
from engine.model.cpu_ops.build import CpuOperators, load_operators
from engine.model.layer_stack import stack_layers
from engine.model.loaded_model import LoadedModel
from engine.model.outline import NotStreamable, check_folder, outline
from engine.model.packed_cache import PackedCache, packed_key
from engine.model.packing import PackedLayer, packed_dtypes
from engine.model.pages import gather, return_freed_memory
from engine.model.preparation import Recipe, prepare
from engine.model.quantizing import check_plain, check_quantization, move_quantized
from engine.model.reading import read_config, read_model, read_skeleton, read_tokenizer
from engine.model.sources import ModelSources
from engine.model.straight_pass import straighten
from engine.model.streaming import prepare_by_parts, probe_bare
from engine.model.support import check_class, check_config, context_limit
from engine.model.tensor_file import DamagedFile
from engine.model.vocabulary import end_token_ids, sampled_vocab_size
from engine.model.weight_type import (
    WeightPlan,
    check_dtype,
    choose_device,
    plan_weights,
    settle,
    takes_operators,
    unfit_weight,
    widen,
)

__all__ = ["LoadedModel", "load_causal_lm", "wrap_model"]

logger = logging.getLogger(__name__)

_READ_WHOLE = "all weights are read, in float32, before the first is packed"


def load_causal_lm(config: ModelConfig, *, rounds: bool = False) -> LoadedModel:
    """Finds, checks and loads a model.

    Args:
        config: Which model, and how to hold it.
        rounds: See `plan_weights`.

    Raises:
        ModelNotFound: No source has the model.
        ModelNotSupported: It cannot run on a paged KV cache.
        StartupError: A setting cannot hold on this machine or for this model.
    """
    register()
    device = choose_device(config.device)
    check_dtype(config.dtype, device)
    check_quantization(config.quantization, config.dtype, device)
    # A first start converts a model and compiles the operators; neither has to wait for the other.
    with ThreadPoolExecutor(1, "operators") as pool:
        wants_operators = takes_operators(config.dtype, device)
        pending = pool.submit(load_operators, config.cache_folder) if wants_operators else None
        folder = ModelSources.of(config).find(config.model, config.revision)
        model_config = read_config(folder, config)
        check_config(model_config)
        check_plain(config.quantization, model_config)
        max_model_len = context_limit(model_config, config.max_model_len)
        tokenizer = read_tokenizer(folder, config)
        operators = None if pending is None else pending.result()
    plan = plan_weights(config.dtype, device, operators, rounds=rounds)
    logger.info("loading %s from %s on %s", config.model, folder, device)
    ready = _Source(config, folder, model_config, rounds).read(plan, device, operators)
    return _loaded(ready, tokenizer, operators, name=config.model, max_model_len=max_model_len)


def wrap_model(
    module: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | None,
    *,
    name: str,
    max_model_len: int | None = None,
    dtype: DType | None = None,
    operators: CpuOperators | None = None,
) -> LoadedModel:
    """Makes a model that is in memory ready for the engine, in place.

    Args:
        module: A causal language model.
        tokenizer: Its tokenizer.
        name: What it is called.
        max_model_len: Tokens that prompt and answer may share; None takes the model's own limit.
        dtype: How a float32 model on a CPU is to hold its weights; None leaves them as they are.
        operators: The C++ operators, for a float32 model on a CPU.

    Raises:
        ModelNotSupported: It cannot run on a paged KV cache.
        StartupError: max_model_len is more than the model has, or its weights cannot be held so.
    """
    register()
    check_config(module.config)
    limit = context_limit(module.config, max_model_len)
    plan = WeightPlan(str(module.dtype).removeprefix("torch."), module.dtype, None, strict=True)
    if dtype is not None:
        plan = plan_weights(dtype, module.device, operators)
    _set_up(module)
    ready = _Ready(module, prepare(module, plan, operators), plan)
    return _loaded(ready, tokenizer, operators, name=name, max_model_len=limit)


@dataclass(frozen=True, slots=True)
class _Ready:
    """A module that can run, what was done to it, and how it is held."""

    module: PreTrainedModel
    recipe: Recipe
    plan: WeightPlan


@dataclass(frozen=True, slots=True)
class _Source:
    """A folder with a model, and the settings to read it by."""

    config: ModelConfig
    folder: Path
    model_config: PreTrainedConfig
    rounds: bool

    def read(self, plan: WeightPlan, device: torch.device, operators: CpuOperators | None) -> _Ready:
        """From the packed weights of an earlier start, or from the plain ones."""
        if plan.packer is None or not self._can_be_kept:
            if plan.packer is not None:
                logger.info("%s: it has code of its own or quantised layers", _READ_WHOLE)
            return self._read_plain(plan, device, operators)
        cache = PackedCache(self.config.cache_folder / "packed")
        wanted = f"{self.config.dtype}-rounded" if self.rounds else self.config.dtype
        key = packed_key(self.config.model, self.folder, wanted, plan.dtype, operators)
        if cache.find(key) is not None:
            module = _set_up(read_skeleton(self.folder, self.model_config))
            if (recipe := cache.fill(key, module, plan.packer, operators)) is not None:
                return _Ready(module, recipe, plan)
        # What a conversion has left behind is not to add to what follows.
        return_freed_memory()
        if (ready := self._read_by_parts(plan, operators)) is None:
            return_freed_memory()
            ready = self._read_plain(plan, device, operators)
        return_freed_memory()
        _settled(ready, self.config.model)  # What is refused is not kept.
        cache.store(key, ready.module, ready.recipe)
        return ready

    @property
    def _can_be_kept(self) -> bool:
        """Whether the config alone says what the module is: no code of its own, no quantised layers."""
        return not any(getattr(self.model_config, name, None) for name in ("auto_map", "quantization_config"))

    def _read_by_parts(self, plan: WeightPlan, operators: CpuOperators | None) -> _Ready | None:
        """Packs each part as it is read; None, with the reason in the log, where all has to be read first."""
        try:
            check_folder(self.folder, self.model_config)
            checkpoint = Checkpoint(self.folder)
            bare = _set_up(read_skeleton(self.folder, self.model_config))
            found = outline(bare, checkpoint)
            shapes = probe_bare(bare)
            module = _set_up(read_skeleton(self.folder, self.model_config, with_buffers=True))
            recipe = prepare_by_parts(module, shapes, found, checkpoint, plan, operators)
        except (NotStreamable, DamagedFile) as error:
            logger.info("%s: %s", _READ_WHOLE, error)
            return None
        return _Ready(module, recipe, plan)

    def _read_plain(self, plan: WeightPlan, device: torch.device, operators: CpuOperators | None) -> _Ready:
        module = read_model(self.folder, self.config, self.model_config, plan.activations)
        if plan.activations == torch.float16 and (name := unfit_weight(module)) is not None:
            plan = widen(plan, name)
            module = read_model(self.folder, self.config, self.model_config, plan.activations)
        _set_up(module)
        quantization = self.config.quantization
        if quantization is None:
            module.to(device)
        else:
            move_quantized(module, device, quantization)
            plan = replace(plan, dtype=quantization)
        return _Ready(module, prepare(module, plan, operators), plan)


def _set_up(module: PreTrainedModel) -> PreTrainedModel:
    """Checks a module's class, and switches to our attention and to inference."""
    check_class(type(module))
    module.eval().requires_grad_(False)
    if module.config._attn_implementation != ATTENTION_NAME:
        module.set_attn_implementation(ATTENTION_NAME)
    return module


def _settled(ready: _Ready, name: str) -> WeightPlan:
    return settle(ready.plan, packed_dtypes(ready.module, ready.recipe.packed), name)


def _loaded(
    ready: _Ready,
    tokenizer: PreTrainedTokenizerBase | None,
    operators: CpuOperators | None,
    *,
    name: str,
    max_model_len: int,
) -> LoadedModel:
    module = ready.module
    shapes = ready.recipe.layers
    plan = _settled(ready, name)
    gather(cast("PackedLayer", module.get_submodule(path)) for path in ready.recipe.packed)
    if operators is not None and plan.packer is not None and stack_layers(module, shapes, operators):
        straighten(module, shapes, operators)
    loaded = LoadedModel(
        name=name,
        module=module,
        tokenizer=tokenizer,
        layers=shapes,
        vocab_size=sampled_vocab_size(module, tokenizer),
        max_model_len=max_model_len,
        eos_token_ids=end_token_ids(module, tokenizer),
        device=module.device,
        dtype=plan.activations,
        weights=plan.dtype,
        operators=operators,
    )
    logger.info(
        "%s: %s, %s weights on %s, %d layers, %d tokens of vocabulary, context %d, answers end at ids %s",
        loaded.name,
        type(module).__name__,
        loaded.weights,
        loaded.device,
        len(loaded.layers),
        loaded.vocab_size,
        loaded.max_model_len,
        sorted(loaded.eos_token_ids),
    )
    return loaded
