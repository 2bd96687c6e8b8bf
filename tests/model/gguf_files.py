"""Tiny GGUF files, written the way llama.cpp's converter writes them."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from gguf import GGMLQuantizationType, GGUFWriter, TokenType
from gguf.quants import quantize
from transformers import PreTrainedModel

from tests.tiny import CHAT_TEMPLATE, byte_tokenizer, tiny_model

MERGED = ("ab", "12")
SPECIAL = ("<bos>", "<eos>", "<|im_end|>")
NUM_TOKENS = 256 + len(MERGED) + len(SPECIAL)
NUM_PADDED = NUM_TOKENS + 3
EOS_ID = 256 + len(MERGED) + 1

_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


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
    config = module.config
    writer = GGUFWriter(path, arch)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(theta)
    writer.add_rope_dimension_count(8)
    writer.add_vocab_size(NUM_PADDED)
    if rope_scaling is not None:
        writer.add_string(f"{arch}.rope.scaling.type", rope_scaling)
    _add_tokenizer(writer, pre)
    for name, tensor in _tensors(module, arch):
        if name == leave_out:
            continue
        data = tensor.numpy()
        if tensor.ndim > 1 and quantisation != GGMLQuantizationType.F32:
            writer.add_tensor(name, quantize(data, quantisation), raw_dtype=quantisation)
        else:
            writer.add_tensor(name, data)
    if rope_divisors is not None:
        writer.add_tensor("rope_freqs.weight", np.array(rope_divisors, dtype=np.float32))
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
    for name, tensor in module.state_dict().items():
        stem, _, kind = name.rpartition(".")
        block = ""
        if stem.startswith("model.layers."):
            _, _, index, stem = stem.split(".", 3)
            block = f"blk.{index}."
        if arch == "llama" and stem.endswith(("q_proj", "k_proj")):
            heads = config.num_attention_heads if "q_proj" in stem else config.num_key_value_heads
            # llama.cpp rotates neighbouring pairs, transformers the two halves of a head.
            halves = tensor.reshape(heads, 2, tensor.shape[0] // heads // 2, tensor.shape[1])
            tensor = halves.swapaxes(1, 2).reshape(tensor.shape).contiguous()
        yield f"{block}{_NAMES[stem]}.{kind}", tensor
