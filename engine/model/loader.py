"""Gets a causal language model into memory, on the right device and in the right type.

name ── sources ──▶ folder ── config ──▶ fit to be paged? ──▶ weights ──▶ linear layers packed ──▶ LoadedModel
"""

import json
import logging
from pathlib import Path

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)

from engine.config import ModelConfig
from engine.errors import ModelNotSupported, StartupError
from engine.model.attention.choice import choose_backend
from engine.model.attention.interface import ATTENTION_NAME, probe_layers, register
from engine.model.cpu_ops.build import CpuOperators, load_operators
from engine.model.fusion import fuse_layers
from engine.model.kv_cache import LayerShape
from engine.model.linear_weights import choose_linear_weights, pack_weights
from engine.model.loaded_model import LoadedModel
from engine.model.self_check import check_paged_logits, run_trial
from engine.model.sources import ModelSources
from engine.model.support import check_class, check_config, context_limit
from engine.model.vocabulary import end_token_ids, sampled_vocab_size

__all__ = ["LoadedModel", "load_causal_lm", "wrap_model"]

logger = logging.getLogger(__name__)

_GENERAL_TOKENIZERS = ("PreTrainedTokenizerFast", "TokenizersBackend")
_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


def load_causal_lm(config: ModelConfig) -> LoadedModel:
    """Finds, checks and loads a model.

    Args:
        config: Which model, and how to hold it.

    Raises:
        ModelNotFound: No source has the model.
        ModelNotSupported: It cannot run on a paged KV cache.
        StartupError: A setting cannot hold on this machine or for this model.
    """
    register()
    device = choose_device(config.device)
    dtype = choose_dtype(config.dtype, device)
    takes_operators = device.type == "cpu" and dtype == torch.float32
    operators = load_operators(config.cache_folder) if takes_operators else None
    linear_weights = choose_linear_weights(config.linear_weights, device, dtype, operators)
    folder = ModelSources.of(config).find(config.model, config.revision)
    model_config = _read_config(folder, config)
    check_config(model_config)
    max_model_len = context_limit(model_config, config.max_model_len)
    tokenizer = _read_tokenizer(folder, config)
    logger.info("loading %s from %s: %s on %s", config.model, folder, _short(dtype), device)
    module = _read_weights(folder, config, model_config, dtype).to(device)
    return wrap_model(
        module,
        tokenizer,
        name=config.model,
        max_model_len=max_model_len,
        linear_weights=linear_weights,
        operators=operators,
    )


def wrap_model(
    module: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | None,
    *,
    name: str,
    max_model_len: int | None = None,
    linear_weights: str = "plain",
    operators: CpuOperators | None = None,
) -> LoadedModel:
    """Makes a model that is in memory ready for the engine; its linear layers are packed in place if asked.

    Args:
        module: A causal language model.
        tokenizer: Its tokenizer.
        name: What it is called.
        max_model_len: Tokens that prompt and answer may share; None takes the model's own limit.
        linear_weights: "plain", "packed-fp16" or "packed-int8".
        operators: The C++ operators, for a float32 model on a CPU.

    Raises:
        ModelNotSupported: It cannot run on a paged KV cache.
        StartupError: max_model_len is more than the model has, or the weights cannot be packed here.
    """
    register()
    check_config(module.config)
    check_class(type(module))
    limit = context_limit(module.config, max_model_len)
    module.eval().requires_grad_(False)
    if module.config._attn_implementation != ATTENTION_NAME:
        module.set_attn_implementation(ATTENTION_NAME)
    layers = _probe(module)
    _fuse_and_check(module, layers, operators)
    pack_weights(module, linear_weights, operators)
    loaded = LoadedModel(
        name=name,
        module=module,
        tokenizer=tokenizer,
        layers=layers,
        vocab_size=sampled_vocab_size(module, tokenizer),
        max_model_len=limit,
        eos_token_ids=end_token_ids(module, tokenizer),
        device=module.device,
        dtype=module.dtype,
        linear_weights=linear_weights,
        operators=operators,
    )
    _log_summary(loaded)
    return loaded


def _log_summary(model: LoadedModel) -> None:
    logger.info(
        "%s: %s, %d layers, %d tokens of vocabulary, context %d, answers end at ids %s",
        model.name,
        type(model.module).__name__,
        len(model.layers),
        model.vocab_size,
        model.max_model_len,
        sorted(model.eos_token_ids),
    )


def _fuse_and_check(
    module: PreTrainedModel, layers: tuple[LayerShape, ...], operators: CpuOperators | None
) -> None:
    """Replaces the layers that can be, and holds the result against what the model said before."""
    trial = run_trial(module)
    if operators is not None:
        fuse_layers(module, operators)
    if trial is not None:
        check_paged_logits(module, layers, choose_backend(operators), trial)


def _probe(module: PreTrainedModel) -> tuple[LayerShape, ...]:
    try:
        return probe_layers(module)
    except TypeError as error:
        raise ModelNotSupported(
            f"{type(module).__name__} does not hand its caller's arguments on to attention ({error}), so "
            "attention cannot be told of the paged cache; choose a model of another architecture"
        ) from error


def choose_device(wanted: str) -> torch.device:
    """The device of that name; auto takes a GPU where there is one.

    Raises:
        StartupError: There is no such device here.
    """
    if wanted == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(wanted)
    except RuntimeError:
        raise StartupError(f"device is {wanted!r}; it must be auto, cpu, cuda or cuda:N") from None
    if device.type not in ("cpu", "cuda"):
        raise StartupError(f"device is {wanted!r}; it must be auto, cpu, cuda or cuda:N")
    count = torch.cuda.device_count()
    if device.type == "cuda" and (device.index or 0) >= count:
        raise StartupError(f"device is {wanted!r}, but torch sees {count} CUDA devices here; use cpu or auto")
    return device


def choose_dtype(wanted: str, device: torch.device) -> torch.dtype:
    """The type of the activations; auto: float32 on a CPU, bfloat16 on a GPU, float16 on one without it."""
    if wanted != "auto":
        return _DTYPES[wanted]
    if device.type == "cpu":
        return torch.float32
    return torch.bfloat16 if torch.cuda.is_bf16_supported(including_emulation=False) else torch.float16


def _read_config(folder: Path, config: ModelConfig) -> PreTrainedConfig:
    try:
        return AutoConfig.from_pretrained(
            folder, trust_remote_code=config.trust_remote_code, local_files_only=True
        )
    except (OSError, ValueError, ImportError, StrictDataclassError) as error:
        raise _startup_error(f"the config of {config.model} cannot be read", error, config) from error


def _read_weights(
    folder: Path, config: ModelConfig, model_config: PreTrainedConfig, dtype: torch.dtype
) -> PreTrainedModel:
    try:
        module, report = AutoModelForCausalLM.from_pretrained(
            folder,
            config=model_config,
            dtype=dtype,
            attn_implementation=ATTENTION_NAME,
            trust_remote_code=config.trust_remote_code,
            local_files_only=True,
            output_loading_info=True,
        )
    except (OSError, ValueError, ImportError, RuntimeError, SafetensorError) as error:
        raise _startup_error(f"the weights of {config.model} cannot be read", error, config) from error
    # transformers would fill these with random numbers.
    if missing := sorted(report["missing_keys"]):
        raise StartupError(
            f"the checkpoint in {folder} lacks {len(missing)} weights of {type(module).__name__}, among them "
            f"{', '.join(missing[:3])}: it is incomplete, or its config belongs to another model"
        )
    loaded: PreTrainedModel = module
    return loaded


def _read_tokenizer(folder: Path, config: ModelConfig) -> PreTrainedTokenizerBase:
    # A folder that names the general class means its tokenizer.json as it stands; AutoTokenizer would rebuild
    # it by the habits of the model's type.
    reader = PreTrainedTokenizerFast if _is_general_tokenizer(folder) else AutoTokenizer
    try:
        tokenizer: PreTrainedTokenizerBase = reader.from_pretrained(
            folder, trust_remote_code=config.trust_remote_code, local_files_only=True
        )
    except (OSError, ValueError, ImportError) as error:
        raise _startup_error(
            f"the tokenizer of {config.model} in {folder} cannot be read", error, config
        ) from error
    # Some classes come up with an empty vocabulary when their files are missing.
    files = sorted(set(tokenizer.vocab_files_names.values()))
    if not any((folder / file).is_file() for file in files):
        raise StartupError(f"the folder {folder} has no tokenizer: none of {', '.join(files)} is there")
    if config.chat_template is not None:
        tokenizer.chat_template = read_chat_template(config.chat_template)
    return tokenizer


def _is_general_tokenizer(folder: Path) -> bool:
    description = folder / "tokenizer_config.json"
    if not (folder / "tokenizer.json").is_file() or not description.is_file():
        return False
    fields = json.loads(description.read_text(encoding="utf-8"))
    return fields.get("tokenizer_class") in _GENERAL_TOKENIZERS and "auto_map" not in fields


def _startup_error(what: str, error: Exception, config: ModelConfig) -> StartupError:
    if "trust_remote_code" in str(error) and not config.trust_remote_code:
        return StartupError(
            f"{what}: the model comes with Python code of its own, which is not run unless you set "
            "trust_remote_code (--trust-remote-code). Read the code first: it runs with your rights"
        )
    return StartupError(f"{what}: {error}")


def read_chat_template(path: Path) -> str:
    """A chat template from a file.

    Raises:
        StartupError: The file cannot be read. Whether it parses is found out where it is compiled, by
            ChatTemplate, which knows transformers' own tags.
    """
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise StartupError(f"chat_template {path} cannot be read: {error}") from error


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
