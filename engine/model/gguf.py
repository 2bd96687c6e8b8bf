"""GGUF files become Hugging Face folders, once: weights dequantised, the tokenizer rebuilt and checked.

transformers reads the tensors. What it leaves out of a file's metadata is mended here, or the file is
refused, since a model that is a little wrong looks like a bad model:

- how text is split before the merges apply (tokenizer.ggml.pre),
- ids that only pad the vocabulary,
- rotary scaling.
"""

import json
import logging
import math
from pathlib import Path

import torch
from gguf import GGMLQuantizationType, GGUFReader, TokenType
from tokenizers import Tokenizer, pre_tokenizers
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)

from engine.errors import StartupError
from engine.model.support import check_config

logger = logging.getLogger(__name__)

_EXACT_TYPES = (GGMLQuantizationType.F32, GGMLQuantizationType.F16, GGMLQuantizationType.BF16)

_SINGLE_DIGITS = frozenset(
    {"smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"}
)
"""Learned with every digit on its own and GPT-2's splitting otherwise. Source: llama.cpp, llama-vocab.cpp."""

_GPT2_SPLIT = frozenset({"gpt-2", "phi-2", "jina-es", "jina-de", "mpt", "olmo", "jais"})


def convert_gguf(file: Path, folder: Path) -> None:
    """Writes the model in a GGUF file as a Hugging Face folder.

    Quantised matrices are stored as float16, which rounds them by at most 1/2048 of their value, far below
    their own quantisation step; everything else is stored exactly.

    Args:
        file: The GGUF file.
        folder: An empty folder.

    Raises:
        ModelNotSupported: The architecture cannot be paged.
        StartupError: The file cannot be read, or means something that would be lost.
    """
    logger.info("converting %s; this happens once and takes a minute or so per GB", file)
    try:
        reader = GGUFReader(file)
        config: PreTrainedConfig = AutoConfig.from_pretrained(file.parent, gguf_file=file.name)
    except (ValueError, OSError, KeyError, IndexError, NotImplementedError) as error:
        raise StartupError(f"{file} cannot be read as a GGUF model: {error}") from error
    _drop_quantisation(config)
    check_config(config)
    _read_rope(reader, config, file)
    tokenizer = _convert_tokenizer(reader, file)
    config.eos_token_id = tokenizer.eos_token_id
    config.bos_token_id = tokenizer.bos_token_id
    config.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    _save_weights(reader, file, config, folder)


def _drop_quantisation(config: PreTrainedConfig) -> None:
    # The folder holds plain weights; this would make transformers look for blocks in it.
    if hasattr(config, "quantization_config"):
        del config.quantization_config


def _save_weights(reader: GGUFReader, file: Path, config: PreTrainedConfig, folder: Path) -> None:
    module, report = AutoModelForCausalLM.from_pretrained(
        file.parent, gguf_file=file.name, dtype=torch.float32, output_loading_info=True
    )
    if missing := sorted(report["missing_keys"]):
        raise StartupError(f"{file} lacks the weights {', '.join(missing[:5])} ({len(missing)} in all)")
    quantised = any(tensor.tensor_type not in _EXACT_TYPES for tensor in reader.tensors)
    # A head tied to the embedding is the same memory under two names; it must stay one tensor.
    narrowed: dict[int, torch.Tensor] = {}
    weights = {
        name: narrowed.setdefault(tensor.data_ptr(), _narrowed(tensor, quantised))
        for name, tensor in module.state_dict().items()
    }
    _mark_plain(module, config)
    module.save_pretrained(folder, state_dict=weights)


def _mark_plain(module: PreTrainedModel, config: PreTrainedConfig) -> None:
    """Lets transformers save a model that it read from a GGUF file; its weights are plain by now."""
    module.hf_quantizer = None
    module.config = config
    if module.generation_config is not None:
        module.generation_config.eos_token_id = config.eos_token_id
        module.generation_config.bos_token_id = config.bos_token_id


def _narrowed(tensor: torch.Tensor, quantised: bool) -> torch.Tensor:
    """The smallest type that holds the tensor exactly, or float16 for a matrix out of a quantised file."""
    for dtype in (torch.bfloat16, torch.float16):
        if torch.equal(tensor.to(dtype).float(), tensor):
            return tensor.to(dtype)
    if quantised and tensor.ndim > 1 and tensor.abs().max() <= torch.finfo(torch.float16).max:
        return tensor.half()
    return tensor


def _convert_tokenizer(reader: GGUFReader, file: Path) -> PreTrainedTokenizerFast:
    try:
        read: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    except (ValueError, OSError, KeyError, NotImplementedError) as error:
        raise StartupError(f"the tokenizer of {file} cannot be rebuilt: {error}") from error
    backend: Tokenizer = read.backend_tokenizer
    if _field(reader, "tokenizer.ggml.model") == "gpt2":
        _set_splitting(backend, str(_field(reader, "tokenizer.ggml.pre") or "default"), file)
    size = _vocab_size(reader)
    special = {
        name: token
        for name in ("bos_token", "eos_token", "unk_token", "pad_token")
        if (token := getattr(read, name)) is not None and read.convert_tokens_to_ids(token) < size
    }
    return PreTrainedTokenizerFast(
        tokenizer_object=_cut(backend, size),
        chat_template=read.chat_template,
        clean_up_tokenization_spaces=False,
        **special,
    )


def _set_splitting(backend: Tokenizer, pre: str, file: Path) -> None:
    """Splits text the way the vocabulary's merges were learned, where transformers does not know how."""
    if pre in _SINGLE_DIGITS:
        backend.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Digits(individual_digits=True),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
            ]
        )
    elif pre not in _GPT2_SPLIT and isinstance(backend.pre_tokenizer, pre_tokenizers.ByteLevel):
        logger.warning(
            "%s was made for the text splitting %r, which is not known here; GPT-2's is used, and some "
            "texts may become other tokens than in training",
            file.name,
            pre,
        )


def _vocab_size(reader: GGUFReader) -> int:
    """Ids of the file that stand for something; the ones behind them only round the vocabulary's size up."""
    tokens = reader.fields["tokenizer.ggml.tokens"]
    types = _field(reader, "tokenizer.ggml.token_type")
    if not isinstance(types, list):
        return len(tokens.data)
    return max(index for index, kind in enumerate(types) if kind != TokenType.UNUSED) + 1


def _cut(backend: Tokenizer, size: int) -> Tokenizer:
    """Drops ids from `size` on: padding, and tokens that transformers adds by habit of a tokenizer class."""
    description = json.loads(backend.to_str())
    model = description["model"]
    if isinstance(model["vocab"], dict):
        model["vocab"] = {token: index for token, index in model["vocab"].items() if index < size}
    else:
        model["vocab"] = model["vocab"][:size]
    description["added_tokens"] = [token for token in description["added_tokens"] if token["id"] < size]
    return Tokenizer.from_str(json.dumps(description))


def _read_rope(reader: GGUFReader, config: PreTrainedConfig, file: Path) -> None:
    """Takes over rotary scaling that transformers leaves in the file, or refuses the file."""
    rope = config.rope_parameters if hasattr(config, "rope_parameters") else None
    if not rope or rope.get("rope_type", "default") != "default":
        return
    architecture = _field(reader, "general.architecture")
    kind = _field(reader, f"{architecture}.rope.scaling.type")
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    if kind not in (None, "none") or "rope_factors_long.weight" in tensors:
        raise StartupError(
            f"{file} scales its rotary positions ({kind or 'longrope'}), which is not read from GGUF files "
            f"of the architecture {architecture!r}: use the model's Hugging Face checkpoint"
        )
    if (factors := tensors.get("rope_freqs.weight")) is not None:
        divisors = torch.tensor(factors.data).float().flatten()
        if bool((divisors != 1).any()):
            config.rope_parameters = _llama3_rope(divisors, dict(rope), file)


def _llama3_rope(divisors: torch.Tensor, rope: dict[str, object], file: Path) -> dict[str, object]:
    """Llama 3's parameters from the divisors that a GGUF file keeps instead of them.

    The converter computes the divisors from a factor and three constants of Llama 3.1 to 3.3
    (llama.cpp, convert_hf_to_gguf.py); the factor is the largest divisor. The rest is checked.
    """
    found: dict[str, object] = {
        "rope_type": "llama3",
        "factor": divisors.max().item(),
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    theta = float(str(rope["rope_theta"]))
    plain = theta ** -(torch.arange(len(divisors), dtype=torch.float64) / len(divisors))
    wavelength = 2 * math.pi / plain
    smooth = ((8192 / wavelength - 1.0) / (4.0 - 1.0)).clamp(0, 1)
    factor = divisors.max().double()
    expected = 1 / ((1 - smooth) / factor + smooth)
    if not torch.allclose(expected, divisors.double(), rtol=1e-4):
        raise StartupError(
            f"{file} scales its rotary positions in a way that is not Llama 3's: use the model's Hugging "
            "Face checkpoint"
        )
    return {**rope, **found}


def _field(reader: GGUFReader, name: str) -> object:
    field = reader.get_field(name)
    return None if field is None else field.contents()
