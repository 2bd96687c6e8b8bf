import importlib.util
from typing import Any

import pytest
from transformers import (
    AutoConfig,
    BloomConfig,
    Gemma3Config,
    LlamaConfig,
    MambaConfig,
    PreTrainedConfig,
    T5Config,
)

from engine.errors import ModelNotSupported, StartupError
from engine.model.loader import wrap_model
from engine.model.support import check_config, context_limit
from tests.tiny import ARCHITECTURES, tiny_model


def config(model_type: str, **fields: Any) -> PreTrainedConfig:
    made: PreTrainedConfig = AutoConfig.for_model(model_type, **fields)
    return made


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_what_we_serve_is_accepted(arch: str) -> None:
    check_config(tiny_model(arch).config)


@pytest.mark.parametrize(
    ("refused", "reason"),
    [
        (T5Config(), "encoder-decoder"),
        (MambaConfig(), "state|linear_attention"),
        (BloomConfig(), "computes attention in its own code"),
        (config("falcon"), "computes attention in its own code"),
        (config("lfm2"), "conv"),
        (config("qwen3_next"), "linear_attention"),
        (config("jamba"), "state|linear_attention"),
        (config("falcon_h1"), "state|hybrid"),
        (config("rwkv"), "state"),
        (config("gemma3n_text"), "num_kv_shared_layers"),
        (config("llama4_text"), "chunked_attention"),
        (config("vit"), "no causal language model"),
    ],
    ids=lambda value: value.model_type if isinstance(value, PreTrainedConfig) else "",
)
def test_what_cannot_be_paged_is_refused_with_the_reason(refused: PreTrainedConfig, reason: str) -> None:
    with pytest.raises(ModelNotSupported, match=reason):
        check_config(refused)


@pytest.mark.parametrize("method", ["gptq", "awq", "bitsandbytes"])
def test_a_quantised_checkpoint_without_its_package_is_refused(
    method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(StartupError, match=f"quantised with {method}, which needs the package"):
        check_config(LlamaConfig(quantization_config={"quant_method": method, "bits": 4}))


def test_the_context_defaults_to_the_models_own() -> None:
    assert context_limit(LlamaConfig(max_position_embeddings=77), None) == 77
    assert context_limit(LlamaConfig(max_position_embeddings=77), 77) == 77
    assert context_limit(LlamaConfig(max_position_embeddings=77), 5) == 5
    assert context_limit(config("gpt2", n_positions=64), None) == 64


def test_more_positions_than_the_model_has_are_refused() -> None:
    with pytest.raises(StartupError, match=r"is 78, but the model has 77 positions \(max_position"):
        context_limit(LlamaConfig(max_position_embeddings=77), 78)
    with pytest.raises(StartupError, match=r"is 65, but the model has 64 positions, each of them learned"):
        context_limit(config("gpt2", n_positions=64), 65)


def test_a_scaled_context_is_the_models_own() -> None:
    rope = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128, "rope_theta": 1e4}
    assert context_limit(LlamaConfig(max_position_embeddings=512, rope_parameters=rope), None) == 512


def test_dynamic_frequencies_are_refused_where_they_would_move() -> None:
    rope = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4}
    dynamic = LlamaConfig(max_position_embeddings=128, rope_parameters=rope)
    assert context_limit(dynamic, None) == 128
    with pytest.raises(StartupError, match=r"dynamic NTK.*at most 128"):
        context_limit(dynamic, 129)


def longrope() -> PreTrainedConfig:
    rope = {
        "rope_type": "longrope",
        "rope_theta": 1e4,
        "short_factor": [1.0] * 4,
        "long_factor": [4.0] * 4,
        "original_max_position_embeddings": 128,
    }
    return config(
        "phi3",
        hidden_size=32,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_hidden_layers=1,
        max_position_embeddings=512,
        original_max_position_embeddings=128,
        rope_parameters=rope,
        pad_token_id=None,
    )


def test_longrope_is_served_up_to_where_it_changes() -> None:
    assert context_limit(longrope(), None) == 128
    assert context_limit(longrope(), 100) == 100
    with pytest.raises(ModelNotSupported, match=r"is 129.*longrope.*at most 128"):
        context_limit(longrope(), 129)


def test_frequencies_per_layer_type_are_looked_into() -> None:
    rope = {
        "full_attention": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    }
    with pytest.raises(StartupError, match="dynamic NTK"):
        context_limit(config("gemma3_text", max_position_embeddings=64, rope_parameters=rope), 65)


def test_a_model_without_a_limit_needs_one() -> None:
    bloom = BloomConfig()
    assert context_limit(bloom, 99) == 99
    with pytest.raises(StartupError, match="set max_model_len"):
        context_limit(bloom, None)


def test_wrapping_checks_as_well() -> None:
    with pytest.raises(StartupError, match="513, but the model has 512"):
        wrap_model(tiny_model("llama"), None, name="a", max_model_len=513)


def test_a_multimodal_wrapper_is_judged_by_its_language_model() -> None:
    wrapper = Gemma3Config(text_config={"max_position_embeddings": 99})
    assert context_limit(wrapper, None) == 99
