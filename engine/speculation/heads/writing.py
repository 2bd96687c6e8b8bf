"""Writes heads in the layouts that other engines read too: EAGLE-3 and EAGLE-1 as their authors', Medusa."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from engine.speculation.heads.config import EagleConfig
from engine.speculation.heads.eagle import EagleHead
from engine.speculation.heads.medusa import MedusaHeads


def save_eagle_head(
    folder: Path, head: EagleHead, *, target: str, dtype: torch.dtype = torch.bfloat16
) -> None:
    """Writes config.json and model.safetensors.

    An EAGLE-3 head goes out in its authors' layout: `midlayer.`, offsets in d2t, t2d; `layers.N.` where there
    are several layers. Layer ids stand there in both conventions, each in the place of its readers.

    Args:
        folder: Where to; what stands there already is replaced, each file as a whole.
        head: The head.
        target: Name of the model that it drafts for.
        dtype: Type of the weights in the file.

    Raises:
        OSError: The files cannot be written.
    """
    config = head.config
    prefix = "midlayer." if config.family == "eagle3" and config.num_layers == 1 else "layers.0."
    tensors = {
        name.replace("layers.0.", prefix, 1) if name.startswith("layers.0.") else name: tensor.to(dtype)
        for name, tensor in head.state_dict().items()
    }
    if head.draft_to_target is not None:
        tensors |= _vocabulary(head.draft_to_target, config)
    _write(folder, _eagle_fields(config, target, dtype), "model.safetensors", tensors)


def save_medusa_heads(
    folder: Path, heads: MedusaHeads, *, target: str, dtype: torch.dtype = torch.bfloat16
) -> None:
    """Writes config.json and medusa_lm_head.safetensors, or model.safetensors in vLLM's form.

    Heads with output layers of the whole vocabulary, or with none, go out as their authors name the tensors;
    that form has no place for a smaller vocabulary or one output layer for all heads, vLLM's has.

    Args:
        folder: Where to; what stands there already is replaced, each file as a whole.
        heads: The heads.
        target: Name of the model that they draft for.
        dtype: Type of the weights in the file.

    Raises:
        OSError: The files cannot be written.
    """
    config = heads.config
    is_plain = heads.draft_to_target is None and not config.shared_lm_head
    tensors: dict[str, torch.Tensor] = {}
    for name, tensor in heads.state_dict().items():
        kind, index, *rest = name.split(".")
        if is_plain:
            place = f"{index}.{'.'.join(rest)}" if kind == "blocks" else f"{index}.{config.num_layers}.weight"
        else:
            place = f"blocks.{index}.layers.{rest[0]}.{rest[-1]}" if kind == "blocks" else name
        tensors[place] = tensor.to(dtype)
    if heads.draft_to_target is not None:
        tensors["token_map"] = heads.draft_to_target
    rows = config.draft_vocab_size
    fields: dict[str, Any] = {
        "architectures": ["MedusaModel"],
        "model_type": "medusa",
        "base_model_name_or_path": target,
        "medusa_num_heads": config.num_heads,
        "medusa_num_layers": config.num_layers,
        "num_heads": config.num_heads,
        "num_hidden_layers": config.num_layers,
        "hidden_size": config.hidden_size,
        "vocab_size": config.vocab_size,
        "truncated_vocab_size": rows or config.vocab_size,
        "original_lm_head": config.shared_lm_head,
        "medusa_fc_bias": config.block_bias,
        "torch_dtype": str(dtype).removeprefix("torch."),
    }
    if config.choices is not None:
        fields["medusa_choices"] = config.choices
    _write(folder, fields, "medusa_lm_head.safetensors" if is_plain else "model.safetensors", tensors)


def _vocabulary(ids: torch.Tensor, config: EagleConfig) -> dict[str, torch.Tensor]:
    if config.family == "eagle":
        return {"token_map": ids}
    is_drafted = torch.zeros(config.vocab_size, dtype=torch.bool)
    is_drafted[ids.cpu()] = True
    return {"d2t": ids - torch.arange(len(ids), device=ids.device), "t2d": is_drafted}


def _eagle_fields(config: EagleConfig, target: str, dtype: torch.dtype) -> dict[str, Any]:
    rope = dict(config.rope)
    theta = rope.pop("rope_theta")
    is_third = config.family == "eagle3"
    fields: dict[str, Any] = {
        "architectures": ["LlamaForCausalLMEagle3" if is_third else "LlamaForCausalLMEagle"],
        "model_type": "qwen3" if config.qk_norm else "llama",
        "base_model_name_or_path": target,
        "hidden_size": config.hidden_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "intermediate_size": config.intermediate_size,
        "hidden_act": config.activation,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": theta,
        "rope_scaling": None if rope == {"rope_type": "default"} else rope,
        "max_position_embeddings": config.max_positions,
        "attention_bias": config.qkv_bias and config.o_bias,
        "mlp_bias": config.mlp_bias,
        "vocab_size": config.vocab_size,
        "tie_word_embeddings": config.tied_lm_head,
        "torch_dtype": str(dtype).removeprefix("torch."),
    }
    if config.windows:
        kinds = ["full_attention" if window is None else "sliding_attention" for window in config.windows]
        fields |= {"layer_types": kinds, "sliding_window": max(window or 0 for window in config.windows)}
    if config.qkv_bias and not config.o_bias:
        fields["qkv_bias"] = True
    if config.fc_bias or not is_third:
        fields["bias"] = config.fc_bias
    return fields | (_eagle3_fields(config) if is_third else {})


def _eagle3_fields(config: EagleConfig) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "target_hidden_size": config.target_hidden_size,
        "norm_before_fc": config.norm_before_fc,
        "fc_norm": config.fc_norm,
        "norm_before_residual": config.norm_before_residual,
        "norm_output": config.norm_output,
        "embed_requires_grad": config.own_embeddings,
    }
    if config.draft_vocab_size is not None:
        fields["draft_vocab_size"] = config.draft_vocab_size
    if config.features == "last":
        return fields | {"eagle_config": {"use_aux_hidden_state": False}}
    nested: dict[str, Any] = {"use_aux_hidden_state": True}
    if min(config.features) > 0:  # The embeddings are no layer's output.
        nested["eagle_aux_hidden_state_layer_ids"] = [state - 1 for state in config.features]
    return fields | {
        "num_aux_hidden_states": len(config.features),
        "eagle_aux_hidden_state_layer_ids": list(config.features),
        "eagle_config": nested,
    }


def _write(folder: Path, fields: Mapping[str, Any], name: str, tensors: Mapping[str, torch.Tensor]) -> None:
    """Writes both files beside those that are there, and then puts them in their place."""
    folder.mkdir(parents=True, exist_ok=True)
    weights, description = folder / f".{name}.part", folder / ".config.json.part"
    plain = {key: tensor.detach().to("cpu", copy=True).contiguous() for key, tensor in tensors.items()}
    save_file(plain, weights, metadata={"format": "pt"})
    description.write_text(json.dumps(fields, indent=2) + "\n", encoding="utf-8")
    os.replace(weights, folder / name)
    os.replace(description, folder / "config.json")
