"""What a model must be to run on a paged KV cache, checked before its weights are read.

Attention is ours and keeps keys and values alone. A model with any other memory of the past, or whose
numbers depend on who shares its batch, would answer wrongly: it is refused, with the reason.
"""

import importlib.util
from collections.abc import Mapping
from typing import Any

from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from engine.errors import ModelNotSupported, StartupError

PAGEABLE_LAYERS = frozenset({"full_attention", "sliding_attention"})

_STATE_FIELDS = ("ssm_state_size", "mamba_d_state", "state_size", "conv_L_cache", "linear_num_value_heads")
"""Config fields of architectures that carry a recurrent or convolution state."""

_QUANTISATION_PACKAGES = {
    "gptq": "gptqmodel",
    "awq": "gptqmodel",
    "bitsandbytes": "bitsandbytes",
    "aqlm": "aqlm",
    "hqq": "hqq",
    "compressed-tensors": "compressed_tensors",
    "torchao": "torchao",
    "quanto": "optimum.quanto",
    "eetq": "eetq",
}


def text_config(config: PreTrainedConfig) -> PreTrainedConfig:
    """The part of a config that describes the language model; the config itself where there is one part."""
    text: PreTrainedConfig = config.get_text_config(decoder=True)
    return text


def check_config(config: PreTrainedConfig) -> None:
    """Refuses what its config already shows to be unfit.

    Raises:
        ModelNotSupported: The architecture cannot be paged.
        StartupError: The checkpoint is quantised by a package that is not installed.
    """
    text = text_config(config)
    what = f"model type {config.model_type!r}"
    if config.is_encoder_decoder:
        raise ModelNotSupported(f"{what} is an encoder-decoder; Outrider serves decoder-only language models")
    layer_types = set(getattr(text, "layer_types", None) or ())
    if foreign := sorted(layer_types - PAGEABLE_LAYERS):
        raise ModelNotSupported(
            f"{what} has layers of the kind {', '.join(foreign)}; only full_attention and "
            "sliding_attention keep their whole past in keys and values, which is what can be paged"
        )
    if state := [name for name in _STATE_FIELDS if getattr(text, name, None)]:
        raise ModelNotSupported(
            f"{what} keeps a recurrent state ({', '.join(state)} in its config), which cannot be paged "
            "or rolled back when a draft is rejected"
        )
    if shared := getattr(text, "num_kv_shared_layers", None):
        raise ModelNotSupported(
            f"{what} shares keys and values between layers (num_kv_shared_layers = {shared}); "
            "layers without a cache of their own are not supported"
        )
    _check_quantisation(config)
    _check_class(config, what)


def check_class(model_class: type[PreTrainedModel]) -> None:
    """Refuses a model class that transformers marks as unfit for an attention function from outside.

    Raises:
        ModelNotSupported: Its attention cannot be replaced, or it is recurrent.
    """
    name = model_class.__name__
    if model_class._is_stateful:
        raise ModelNotSupported(
            f"{name} keeps a recurrent state, which cannot be paged or rolled back when a draft is rejected"
        )
    if not model_class._supports_attention_backend:
        raise ModelNotSupported(
            f"{name} computes attention in its own code (transformers: _supports_attention_backend is "
            "false), so its keys and values cannot be paged; choose a model of another architecture"
        )


def context_limit(config: PreTrainedConfig, wanted: int | None) -> int:
    """The tokens that prompt and answer may share.

    Args:
        config: The model's config.
        wanted: max_model_len as asked for; None takes the largest that is exact.

    Raises:
        ModelNotSupported: The model would compute other frequencies than asked for by this length.
        StartupError: The model has fewer positions, or does not say how many.
    """
    text = text_config(config)
    limit: int | None = getattr(text, "max_position_embeddings", None)
    rope = _ropes(text)
    for parameters in rope:
        if parameters.get("rope_type") != "longrope":
            continue
        fixed = int(parameters["original_max_position_embeddings"])
        if wanted is not None and wanted > fixed:
            raise ModelNotSupported(
                f"max_model_len is {wanted}, but this model's rotary frequencies (longrope) change for the "
                f"whole batch once one sequence is longer than {fixed} tokens, so that requests would "
                f"change each other's text; set max_model_len to at most {fixed}"
            )
        limit = fixed if limit is None else min(limit, fixed)
    if limit is None:
        if wanted is None:
            raise StartupError(
                f"the config of model type {config.model_type!r} does not say how many positions the model "
                "has; set max_model_len"
            )
        return wanted
    if wanted is None or wanted <= limit:
        return limit if wanted is None else wanted
    raise StartupError(_too_long(wanted, limit, rope))


def _too_long(wanted: int, limit: int, rope: list[Mapping[str, Any]]) -> str:
    head = f"max_model_len is {wanted}, but the model has {limit} positions"
    if any(parameters.get("rope_type") == "dynamic" for parameters in rope):
        return (
            f"{head} and scales its rotary frequencies by the longest sequence in the batch beyond them "
            f"(dynamic NTK), so that requests would change each other's text; set max_model_len to at most "
            f"{limit}"
        )
    if rope:
        return (
            f"{head} (max_position_embeddings); rotary positions beyond them were never trained. Set "
            f"max_model_len to at most {limit}, or give the model's config a rope scaling for longer texts"
        )
    return f"{head}, each of them learned; set max_model_len to at most {limit}"


def _ropes(text: PreTrainedConfig) -> list[Mapping[str, Any]]:
    """The rotary parameters, one mapping per layer type where they differ; empty without rotary positions."""
    parameters = getattr(text, "rope_parameters", None)
    if not parameters:
        return []
    nested = [value for value in parameters.values() if isinstance(value, Mapping)]
    return nested or [parameters]


def _check_quantisation(config: PreTrainedConfig) -> None:
    quantisation = getattr(config, "quantization_config", None)
    if not quantisation:
        return
    fields = quantisation if isinstance(quantisation, Mapping) else quantisation.to_dict()
    method = str(fields.get("quant_method", "")).lower()
    package = _QUANTISATION_PACKAGES.get(method)
    if package is not None and importlib.util.find_spec(package.partition(".")[0]) is None:
        raise StartupError(
            f"the checkpoint is quantised with {method}, which needs the package {package!r}: install it, "
            "or choose the unquantised model or a GGUF file"
        )


def _check_class(config: PreTrainedConfig, what: str) -> None:
    if "AutoModelForCausalLM" in (getattr(config, "auto_map", None) or {}):
        return  # The class comes with the model and is checked when it is loaded.
    try:
        model_class = AutoModelForCausalLM._model_mapping[type(config)]
    except KeyError:
        raise ModelNotSupported(
            f"{what} has no causal language model in transformers; a model that also takes images or sound "
            "is served only where transformers can load its language model alone"
        ) from None
    check_class(model_class)
