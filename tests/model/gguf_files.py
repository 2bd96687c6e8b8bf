"""Tiny GGUF files, written the way llama.cpp's converter writes them."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from gguf import MODEL_ARCH_NAMES, GGMLQuantizationType, GGUFWriter, TokenType, get_tensor_name_map
from gguf.quants import quantize
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from tests.tiny import CHAT_TEMPLATE, byte_tokenizer, tiny_model

MERGED = ("ab", "12")
SPECIAL = ("<bos>", "<eos>", "<|im_end|>")
NUM_TOKENS = 256 + len(MERGED) + len(SPECIAL)
NUM_PADDED = NUM_TOKENS + 3
EOS_ID = 256 + len(MERGED) + 1


def source_model(arch: str) -> PreTrainedModel:
    """The model that `write_gguf` puts into the file."""
    return tiny_model(
        arch,
        vocab_size=NUM_PADDED,
        intermediate_size=64,
        head_dim=8,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    )


def write_gguf(
    path: Path,
    arch: str = "llama",
    *,
    quantisation: GGMLQuantizationType = GGMLQuantizationType.F32,
    pre: str = "smollm",
    theta: float = 10000.0,
    rope_divisors: Sequence[float] | None = None,
    rope_scaling: str | None = None,
    leave_out: str | None = None,
) -> Path:
    """Writes `source_model(arch)` and a byte-level tokenizer whose last ids are padding."""
    module = source_model(arch)
    writer = _begin(path, arch, module, pre=pre, theta=theta)
    if rope_scaling is not None:
        writer.add_string(f"{arch}.rope.scaling.type", rope_scaling)
    for name, tensor in _tensors(module, arch):
        if name != leave_out:
            _add_tensor(writer, name, tensor, quantisation)
    if rope_divisors is not None:
        writer.add_tensor("rope_freqs.weight", np.array(rope_divisors, dtype=np.float32))
    return _end(writer, path)


def write_model(
    path: Path,
    arch: str,
    module: PreTrainedModel,
    quantisation: GGMLQuantizationType = GGMLQuantizationType.F32,
) -> Path:
    """Writes any model under llama.cpp's names and in its shapes, but nothing added to its norms.

    Args:
        path: The file.
        arch: Its architecture as GGUF files have it.
        module: Where the weights come from.
        quantisation: How matrices are stored.
    """
    writer = _begin(path, arch, module)
    writer.add_pad_token_id(EOS_ID)
    for name, tensor in _tensors(module, arch):
        _add_tensor(writer, name, tensor, quantisation)
    return _end(writer, path)


def _begin(
    path: Path, arch: str, module: PreTrainedModel, *, pre: str = "smollm", theta: float = 10000.0
) -> GGUFWriter:
    config = module.config.to_dict()
    config |= {name: config[given] for name, given in module.config.attribute_map.items() if given in config}
    writer = GGUFWriter(path, arch)
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config.get("intermediate_size") or 4 * config["hidden_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config.get("num_key_value_heads", config["num_attention_heads"]))
    writer.add_layer_norm_rms_eps(config.get("rms_norm_eps", 1e-5))
    writer.add_layer_norm_eps(config.get("layer_norm_epsilon", 1e-5))
    writer.add_rope_freq_base(theta)
    writer.add_rope_dimension_count(8)
    writer.add_key_length(8)
    writer.add_value_length(8)
    writer.add_vocab_size(NUM_PADDED)
    if experts := config.get("num_experts"):
        writer.add_expert_count(experts)
        writer.add_expert_used_count(config["num_experts_per_tok"])
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    _add_tokenizer(writer, pre)
    return writer


def _add_tensor(
    writer: GGUFWriter, name: str, tensor: torch.Tensor, quantisation: GGMLQuantizationType
) -> None:
    data = tensor.numpy()
    if tensor.ndim > 1 and quantisation != GGMLQuantizationType.F32:
        writer.add_tensor(name, quantize(data, quantisation), raw_dtype=quantisation)
    else:
        writer.add_tensor(name, np.ascontiguousarray(data))


def _end(writer: GGUFWriter, path: Path) -> Path:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add_tokenizer(writer: GGUFWriter, pre: str) -> None:
    vocabulary = json.loads(byte_tokenizer().backend_tokenizer.to_str())["model"]["vocab"]
    tokens = [token for token, _ in sorted(vocabulary.items(), key=lambda item: item[1])][:256]
    padding = [f"[PAD{index}]" for index in range(NUM_TOKENS, NUM_PADDED)]
    kinds = [TokenType.NORMAL] * (256 + len(MERGED)) + [TokenType.CONTROL] * 3 + [TokenType.UNUSED] * 3
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list([*tokens, *MERGED, *SPECIAL, *padding])
    writer.add_token_types(kinds)
    writer.add_token_merges([" ".join(token) for token in MERGED])
    writer.add_bos_token_id(EOS_ID - 1)
    writer.add_eos_token_id(EOS_ID)
    writer.add_add_bos_token(False)
    writer.add_chat_template(CHAT_TEMPLATE)


def _tensors(module: PreTrainedModel, arch: str) -> Iterator[tuple[str, torch.Tensor]]:
    config = module.config
    [known] = [key for key, name in MODEL_ARCH_NAMES.items() if name == arch]
    names = get_tensor_name_map(known, config.num_hidden_layers)
    tied = module.all_tied_weights_keys
    for name, tensor in module.state_dict().items():
        if name in tied:
            continue
        stem, _, kind = name.rpartition(".")
        if kind == "gate_up_proj":
            gate, up = tensor.chunk(2, dim=1)
            yield f"{names.get_name(f'{stem}.gate_proj')}.weight", gate
            yield f"{names.get_name(f'{stem}.up_proj')}.weight", up
        elif kind == "down_proj":
            yield f"{names.get_name(name)}.weight", tensor
        elif arch == "llama" and stem.endswith(("q_proj", "k_proj")):
            heads = config.num_attention_heads if "q_proj" in stem else config.num_key_value_heads
            # llama.cpp rotates neighbouring pairs, transformers the two halves of a head.
            halves = tensor.reshape(heads, 2, tensor.shape[0] // heads // 2, tensor.shape[1])
            yield f"{names.get_name(stem)}.{kind}", halves.swapaxes(1, 2).reshape(tensor.shape)
        elif isinstance(module.get_submodule(stem), Conv1D) and tensor.ndim > 1:
            yield f"{names.get_name(stem)}.{kind}", tensor.T
        elif stem.endswith("shared_expert_gate"):
            yield f"{names.get_name(stem)}.{kind}", tensor[0]
        else:
            yield f"{names.get_name(stem)}.{kind}", tensor
