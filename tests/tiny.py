"""Seeded two-layer models and a byte tokenizer, built in memory: a second on two cores."""

from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

from engine.model.attention.interface import ATTENTION_NAME, register

BOS, EOS, IM_END = 256, 257, 258
VOCAB_SIZE = 259
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] + ':' + message['content'] + '<|im_end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant:' }}{% endif %}"
)

_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 512,
    "initializer_range": 0.4,
    "pad_token_id": None,
    "bos_token_id": BOS,
    "eos_token_id": EOS,
}
_GPT2 = {
    "vocab_size": VOCAB_SIZE,
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 512,
    "initializer_range": 0.4,
    "bos_token_id": BOS,
    "eos_token_id": EOS,
}
_NEOX = {key: value for key, value in _COMMON.items() if key not in ("num_key_value_heads", "head_dim")}
_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
_CONFIGS: dict[str, dict[str, Any]] = {
    "llama": _COMMON,
    "qwen2": {**_COMMON, "use_sliding_window": False},
    "qwen3": _COMMON,
    "mistral": {**_COMMON, "sliding_window": 6},
    "gemma2": {**_COMMON, "sliding_window": 6, "query_pre_attn_scalar": 8, "attn_logit_softcapping": 5.0},
    "gemma3_text": {**_COMMON, "sliding_window": 6, "query_pre_attn_scalar": 8},
    "phi3": _COMMON,
    "gpt2": _GPT2,
    "gpt_neox": _NEOX,
    "gpt_oss": {
        **_COMMON,
        **_EXPERTS,
        "sliding_window": 6,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    },
    "mixtral": {**_COMMON, **_EXPERTS, "sliding_window": None},
}
ARCHITECTURES = tuple(_CONFIGS)


def tiny_model(
    arch: str = "llama", seed: int = 0, *, attention: str = ATTENTION_NAME, **config: Any
) -> PreTrainedModel:
    """A seeded fp32 model; keyword arguments override its config. The global generator is left as it was."""
    register()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model: PreTrainedModel = AutoModelForCausalLM.from_config(
            AutoConfig.for_model(arch, **{**_CONFIGS[arch], **config}),
            attn_implementation=attention,
            dtype=torch.float32,
        )
    # Random attention sinks are zeros by default, which would hide a backend that forgets them.
    for name, parameter in model.named_parameters():
        if name.endswith("sinks"):
            parameter.data.normal_(generator=torch.Generator().manual_seed(seed))
    return model.eval().requires_grad_(False)


def round_to_four_bits(model: PreTrainedModel) -> PreTrainedModel:
    """Gives linear layers the weights that a converted file of 4-bit blocks has, where rows are
    whole blocks."""
    for layer in model.modules():
        if isinstance(layer, torch.nn.Linear) and layer.in_features % 32 == 0:
            layer.weight.data = few_bits(layer.weight.data)
    return model


def few_bits(weight: torch.Tensor, bits: int = 4) -> torch.Tensor:
    """Weights as GGUF's Q4_1 and Q5_1 round them, and float16 then: float32 [outputs, inputs], both ways."""
    blocks, largest = weight.view(len(weight), -1, 32), 2**bits - 1
    least, top = (bound.half().float() for bound in blocks.aminmax(dim=2, keepdim=True))
    scale = ((top - least) / largest).half().float()
    numbers = ((blocks - least) / scale).round().clamp(0, largest)
    weights: torch.Tensor = (numbers * scale + least).half().float().flatten(1)
    return weights


def round_to_six_bits(model: PreTrainedModel) -> PreTrainedModel:
    """Likewise with blocks of Q6_K, where rows are whole blocks of those."""
    for layer in model.modules():
        if isinstance(layer, torch.nn.Linear) and layer.in_features % 256 == 0:
            layer.weight.data = six_bits(layer.weight.data)
    return model


def six_bits(weight: torch.Tensor) -> torch.Tensor:
    """Weights as GGUF's Q6_K rounds them, and float16 then: float32 [outputs, inputs], both ways."""
    halves = weight.view(len(weight), -1, 16, 16)
    # The weight farthest from zero gets the number -32, and the farthest of these scales the step -128.
    farthest = halves.gather(3, halves.abs().argmax(3, keepdim=True)) / -32
    scale = farthest.gather(2, farthest.abs().argmax(2, keepdim=True)) / -128
    scale = scale.half().float()
    step = (farthest / scale).round().clamp(-128, 127)
    numbers = (halves / (scale * step)).nan_to_num().round().clamp(-32, 31)
    weights: torch.Tensor = (scale * step * numbers).half().float().flatten(1)
    return weights


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """Ids 0 to 255 are bytes, then <bos>, <eos> and <|im_end|>; no token is added by itself."""
    alphabet = _byte_alphabet()
    tokenizer = Tokenizer(models.BPE(vocab={char: byte for byte, char in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [AddedToken(text, special=True) for text in ("<bos>", "<eos>", "<|im_end|>")]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<bos>",
        eos_token="<eos>",
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )


def save_tiny(path: Path, arch: str = "llama", seed: int = 0, **config: Any) -> Path:
    """Writes a Hugging Face folder with a tiny model and the byte tokenizer."""
    tiny_model(arch, seed, **config).save_pretrained(path)
    byte_tokenizer().save_pretrained(path)
    return path


def _byte_alphabet() -> list[str]:
    """GPT-2's printable stand-ins for the 256 bytes, in byte order."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    stand_ins = iter(range(256, 512))
    return [chr(byte) if byte in printable else chr(next(stand_ins)) for byte in range(256)]
