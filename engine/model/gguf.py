"""GGUF files become Hugging Face folders, once: weights dequantised, the tokenizer rebuilt and checked.

transformers says what the metadata and the tensors mean. What it leaves out of a file's metadata is mended
here, or the file is refused, since a model that is a little wrong looks like a bad model:

- how text is split before the merges apply (tokenizer.ggml.pre),
- ids that only pad the vocabulary,
- rotary scaling.
"""

import json
import logging
import math
import tempfile
from pathlib import Path

import torch
from gguf import TokenType
from tokenizers import Tokenizer, pre_tokenizers
from transformers import (
    TOKENIZER_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

from engine.errors import StartupError
from engine.model.gguf_file import GgufFile
from engine.model.gguf_weights import write_weights
from engine.model.support import check_config

logger = logging.getLogger(__name__)

_SINGLE_DIGITS = frozenset(
    {"smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"}
)
"""Learned with every digit on its own and GPT-2's splitting otherwise. Source: llama.cpp, llama-vocab.cpp."""

_GPT2_SPLIT = frozenset({"gpt-2", "phi-2", "jina-es", "jina-de", "mpt", "olmo", "jais"})


def convert_gguf(file: Path, folder: Path) -> None:
    """Writes the model in a GGUF file as a Hugging Face folder.

    Its weights are read, converted and written one after the other. Quantised matrices are stored as float16,
    everything else exactly.

    Args:
        file: The GGUF file.
        folder: An empty folder.

    Raises:
        ModelNotSupported: The architecture cannot be paged.
        StartupError: The file cannot be read, or means something that would be lost.
        OSError: The folder takes no more.
    """
    logger.info("converting %s; this happens once", file)
    try:
        source = GgufFile(file)
        config = _read_config(source)
    except (ValueError, OSError, KeyError, IndexError, NotImplementedError) as error:
        raise StartupError(f"{file} cannot be read as a GGUF model: {error}") from error
    check_config(config)
    _read_rope(source, config)
    tokenizer = _convert_tokenizer(source, config)
    tokenizer.save_pretrained(folder)
    config.eos_token_id = tokenizer.eos_token_id
    config.bos_token_id = tokenizer.bos_token_id
    module = _save_config(config, folder)
    write_weights(source, module, folder)


def _read_config(source: GgufFile) -> PreTrainedConfig:
    """The config that transformers makes of a file's metadata."""
    embedding = source.tensors.get("token_embd.weight")
    size = {} if embedding is None else {"vocab_size": embedding.shape[0]}
    # transformers' reader takes ten seconds for a large vocabulary, of which a config says the size alone.
    with tempfile.TemporaryDirectory() as scratch:
        added = {} if f"{source.architecture}.vocab_size" in source.fields else size
        source.write_outline(Path(scratch) / source.path.name, **added)
        config: PreTrainedConfig = AutoConfig.from_pretrained(scratch, gguf_file=source.path.name)
    # Of some architectures transformers counts the tokens, which the outline has none of.
    config.update(size)
    config.name_or_path = str(source.path.parent)
    # The folder holds plain weights; this would make transformers look for blocks in it.
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    return config


def _save_config(config: PreTrainedConfig, folder: Path) -> PreTrainedModel:
    """Writes what describes the model, and returns the model, its weights on the meta device."""
    with torch.device("meta"):
        module: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    config.architectures = [type(module).__name__]
    config.save_pretrained(folder)
    if module.generation_config is not None:
        module.generation_config.save_pretrained(folder)
    return module


def _convert_tokenizer(source: GgufFile, config: PreTrainedConfig) -> PreTrainedTokenizerFast:
    # The one that AutoTokenizer would choose, after it has read the config once more.
    kind = TOKENIZER_MAPPING.get(type(config), PreTrainedTokenizerFast)
    if not issubclass(kind, PreTrainedTokenizerFast):
        kind = PreTrainedTokenizerFast
    try:
        read = kind.from_pretrained(source.path.parent, gguf_file=source.path.name)
    except (ValueError, OSError, KeyError, NotImplementedError) as error:
        raise StartupError(f"the tokenizer of {source.path} cannot be rebuilt: {error}") from error
    backend: Tokenizer = read.backend_tokenizer
    if source.fields.get("tokenizer.ggml.model") == "gpt2":
        _set_splitting(backend, str(source.fields.get("tokenizer.ggml.pre") or "default"), source.path)
    size = _vocab_size(source)
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


def _vocab_size(source: GgufFile) -> int:
    """Ids of the file that stand for something; the ones behind them only round the vocabulary's size up."""
    types = source.fields.get("tokenizer.ggml.token_type")
    if not isinstance(types, list):
        return len(source.fields["tokenizer.ggml.tokens"])
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


def _read_rope(source: GgufFile, config: PreTrainedConfig) -> None:
    """Takes over rotary scaling that transformers leaves in the file, or refuses the file."""
    rope = config.rope_parameters if hasattr(config, "rope_parameters") else None
    if not rope or rope.get("rope_type", "default") != "default":
        return
    architecture = source.architecture
    kind = source.fields.get(f"{architecture}.rope.scaling.type")
    if kind not in (None, "none") or "rope_factors_long.weight" in source.tensors:
        raise StartupError(
            f"{source.path} scales its rotary positions ({kind or 'longrope'}), which is not read from GGUF "
            f"files of the architecture {architecture!r}: use the model's Hugging Face checkpoint"
        )
    if "rope_freqs.weight" in source.tensors:
        divisors = torch.from_numpy(source.read("rope_freqs.weight")).flatten()
        if bool((divisors != 1).any()):
            config.rope_parameters = _llama3_rope(divisors, dict(rope), source.path)


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
