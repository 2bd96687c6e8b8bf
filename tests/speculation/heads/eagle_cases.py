"""EAGLE heads in every format and with every option."""

from dataclasses import replace
from typing import Any

import torch

from tests.speculation.heads.checkpoints import (
    LLAMA3_ROPE,
    Case,
    eagle1,
    eagle3,
    sizes,
    speculators,
    vocabulary,
)
from tests.speculation.heads.reference import Parts

DEFAULT_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
YARN_ROPE = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}


def with_config(case: Case, **fields: Any) -> Case:
    """A case whose config says more."""
    return replace(case, config={**case.config, **fields})


def _scaled(rope: dict[str, Any], theta: float = 500000.0) -> Case:
    return with_config(
        eagle3(rope={**rope, "rope_theta": theta}),
        rope_theta=theta,
        rope_scaling={**rope, "type": rope["rope_type"]},
    )


def _whole(case: Case, **config: Any) -> Case:
    """A case without a draft vocabulary."""
    fields = {key: value for key, value in case.config.items() if key != "draft_vocab_size"}
    return replace(case, config={**fields, **config}, extra={}, ids=None)


_IDS = "eagle_aux_hidden_state_layer_ids"
_ROWS = torch.randn(40, 16, generator=torch.Generator().manual_seed(9))
_MAP = torch.tensor([3, 1, 17, 39, 5])

CASES: dict[str, Case] = {
    # EAGLE-3 of its authors.
    "official": eagle3(),
    "official as .bin": replace(eagle3(), file="pytorch_model.bin"),
    "vllm's names": eagle3(spelling=()),
    "names below model.": eagle3(spelling=(("", "model."),)),
    "with derived values": replace(
        eagle3(), extra={**vocabulary(), "midlayer.self_attn.rotary_emb.inv_freq": torch.zeros(3)}
    ),
    "target's lm_head": _whole(eagle3(draft_vocab=None)),
    "whole vocabulary": _whole(eagle3(draft_vocab=40), draft_vocab_size=40),
    "whole vocabulary, d2t of zeros": replace(
        _whole(eagle3(draft_vocab=40)), extra={"d2t": torch.zeros(40, dtype=torch.int64)}
    ),
    "frozen embeddings": replace(
        eagle3(), extra={**vocabulary(), "embed_tokens.weight": torch.zeros(40, 16)}
    ),
    "trained embeddings": with_config(eagle3(own_embeddings=True), embed_requires_grad=True),
    "narrower than the target": with_config(eagle3(width=12, own_embeddings=True), target_hidden_size=16),
    "tied": _whole(eagle3(draft_vocab=None, own_embeddings=True, tied=True), tie_word_embeddings=True),
    "last state alone": replace(
        with_config(eagle3(num_features=1, fc=False), eagle_config={"use_aux_hidden_state": False}),
        states="last",
    ),
    "two states": replace(
        with_config(eagle3(num_features=2), **{_IDS: [1, 6]}, num_aux_hidden_states=2), states=(1, 6)
    ),
    "norm_before_fc": with_config(eagle3(norm_before_fc=True), norm_before_fc=True),
    "fc_norm": with_config(eagle3(fc_norm=True), fc_norm=True),
    "aux_norm": eagle3(
        fc_norm=True,
        spelling=(
            ("layers.0.", "midlayer."),
            ("fc_norm.0.", "aux_norm_low."),
            ("fc_norm.1.", "aux_norm_mid."),
            ("fc_norm.2.", "aux_norm_high."),
        ),
    ),
    "norm_output": with_config(eagle3(norm_output=True), norm_output=True),
    "norm_before_residual": with_config(eagle3(norm_before_residual=True), norm_before_residual=True),
    "attention_bias": with_config(eagle3(qkv_bias=True, o_bias=True), attention_bias=True),
    "biases of q, k, v alone": eagle3(qkv_bias=True),
    "other biases": with_config(eagle3(mlp_bias=True, fc_bias=True), mlp_bias=True),
    "theta": with_config(eagle3(rope={"rope_type": "default", "rope_theta": 77.0}), rope_theta=77.0),
    "rope_parameters": with_config(
        eagle3(rope={"rope_type": "default", "rope_theta": 77.0}),
        rope_parameters={"rope_type": "default", "rope_theta": 77.0},
    ),
    "linear rope": _scaled({"rope_type": "linear", "factor": 4.0}, 10000.0),
    "llama3 rope": _scaled(LLAMA3_ROPE, 100.0),
    "yarn rope": _scaled(YARN_ROPE, 100.0),
    # Speculators.
    "speculators, silent": speculators(norm_before_residual=True),
    "speculators": with_config(
        speculators(norm_before_residual=False), norm_before_residual=False, **{_IDS: [2, 4, 5]}
    ),
    "speculators, qwen3": speculators({"model_type": "qwen3"}, qk_norm=True, norm_before_residual=True),
    "speculators, two layers": speculators(num_layers=2, norm_before_residual=True),
    "speculators, sliding": speculators(
        {"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 3},
        num_layers=2,
        norm_before_residual=True,
        windows=(None, 3),
    ),
    "speculators, qwen3 sliding": speculators(
        {"model_type": "qwen3", "use_sliding_window": True, "sliding_window": 3, "max_window_layers": 0},
        qk_norm=True,
        norm_before_residual=True,
        windows=(3,),
    ),
    "speculators, norms": with_config(
        speculators(norm_before_fc=True, norm_output=True),
        norm_before_fc=True,
        norm_output=True,
        norm_before_residual=False,
    ),
    # EAGLE-1 and 2.
    "eagle 1": eagle1(fc_bias=True),
    "eagle 1 without bias": eagle1(),
    "eagle 1 as safetensors": replace(eagle1(fc_bias=True), file="model.safetensors", extra={}),
    "eagle 1 of qwen2": with_config(eagle1(qkv_bias=True), qkv_bias=True),
    "eagle 1, two layers": eagle1(num_layers=2),
    "eagle 1 with a copy of lm_head": replace(eagle1(), extra={"lm_head.weight": torch.zeros(40, 16)}),
    "hass": with_config(eagle1(embedding_norm=True, hidden_norm=True), add_para_norm=True),
    "hass, its authors' names": eagle1(
        embedding_norm=True,
        hidden_norm=True,
        output_norm=True,
        spelling=(
            ("embedding_layernorm", "embed_layernorm"),
            ("hidden_states_layernorm", "hidden_layernorm"),
            ("pre_lm_head_layernorm", "lm_head_layernorm"),
        ),
    ),
    "hass, vllm's names": eagle1(
        embedding_norm=True,
        hidden_norm=True,
        spelling=(("embedding_layernorm", "enorm"), ("hidden_states_layernorm", "hnorm")),
    ),
    "eagle 1, token_map": replace(
        eagle1(draft_vocab=5), extra={"token_map": _MAP}, ids=_MAP, file="model.safetensors"
    ),
}


def _speculators_eagle1(**parts: Any) -> Case:
    made = Parts(**{"family": "eagle", "draft_vocab": None, "num_features": 1, **parts})
    config = {
        "speculators_model_type": "eagle",
        "layernorms": made.output_norm,
        "fusion_bias": made.fc_bias,
        "transformer_layer_config": sizes(made),
    }
    return Case(
        parts=made,
        config=config,
        spelling=(("fc.", "fusion_fc."), ("layers.0.", "transformer.")),
        states="last",
    )


CASES["speculators, eagle 1"] = _speculators_eagle1()
CASES["speculators, eagle 1 with bias"] = _speculators_eagle1(fc_bias=True)
CASES["speculators, eagle 1 with norms"] = _speculators_eagle1(
    embedding_norm=True, input_norm=True, output_norm=True
)
