"""Reads the parts of a Hugging Face folder; what is wrong with them becomes a StartupError that names it."""

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)
from transformers.utils import logging as transformers_logging

from engine.config import ModelConfig
from engine.errors import StartupError
from engine.model.attention.interface import ATTENTION_NAME

_GENERAL_TOKENIZERS = ("PreTrainedTokenizerFast", "TokenizersBackend")


def read_config(folder: Path, config: ModelConfig) -> PreTrainedConfig:
    """The model's config.

    Raises:
        StartupError: It cannot be read, or needs code that may not run.
    """
    _check_descriptions(folder, config)
    try:
        return AutoConfig.from_pretrained(
            folder, trust_remote_code=config.trust_remote_code, local_files_only=True
        )
    except (OSError, ValueError, ImportError, StrictDataclassError) as error:
        raise _startup_error(f"the config of {config.model}", folder, error, config) from error


def _check_descriptions(folder: Path, config: ModelConfig) -> None:
    """Reads the small JSON files beforehand: what transformers says of damaged ones has many forms."""
    for name in ("config.json", "generation_config.json", "tokenizer_config.json"):
        if not (folder / name).is_file():
            continue
        try:
            fields = json.loads((folder / name).read_bytes())
        except (OSError, ValueError) as error:
            raise _startup_error(f"the {name} of {config.model}", folder, error, config) from error
        if not isinstance(fields, dict):
            raise _startup_error(
                f"the {name} of {config.model}", folder, ValueError("it is no JSON object"), config
            )


def read_model(
    folder: Path, config: ModelConfig, model_config: PreTrainedConfig, dtype: torch.dtype
) -> PreTrainedModel:
    """The model with its weights, in the memory of the CPU.

    Raises:
        StartupError: The weights cannot be read, or some are missing.
    """
    try:
        with _bars_on_terminals_only():
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
        raise _startup_error(f"the weights of {config.model}", folder, error, config) from error
    # transformers would fill these with random numbers.
    if missing := sorted(report["missing_keys"]):
        raise StartupError(
            f"the checkpoint in {folder} lacks {len(missing)} weights of {type(module).__name__}, among them "
            f"{', '.join(missing[:3])}: it is incomplete, or its config belongs to another model"
        )
    loaded: PreTrainedModel = module
    return loaded


@contextmanager
def _bars_on_terminals_only() -> Iterator[None]:
    """Keeps transformers' progress bars, which are drawn over each other, out of logs."""
    if sys.stderr.isatty() or not transformers_logging.is_progress_bar_enabled():
        yield
        return
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers_logging.enable_progress_bar()


def read_skeleton(
    folder: Path, model_config: PreTrainedConfig, *, with_buffers: bool = False
) -> PreTrainedModel:
    """The model with float32 weights on the meta device, where they take no memory and have no values.

    Args:
        folder: Where it lies.
        model_config: Its config.
        with_buffers: Whether what it computes for itself (tables of rotary frequencies) is on the CPU.
    """
    with _parameters_on_meta() if with_buffers else torch.device("meta"):
        module: PreTrainedModel = AutoModelForCausalLM.from_config(
            model_config, attn_implementation=ATTENTION_NAME, dtype=torch.float32
        )
    if (folder / "generation_config.json").is_file():
        module.generation_config = GenerationConfig.from_pretrained(folder, local_files_only=True)
    return module


@contextmanager
def _parameters_on_meta() -> Iterator[None]:
    handle = register_module_parameter_registration_hook(_moved_to_meta)
    try:
        yield
    finally:
        handle.remove()


def _moved_to_meta(_module: nn.Module, _name: str, parameter: nn.Parameter | None) -> Any:
    """What torch registers in the place of a new parameter; None is the parameter itself."""
    # One that is there already may have come from another layer, with which it is to stay one and the same.
    if parameter is None or parameter.is_meta:
        return None
    return nn.Parameter(parameter.detach().to("meta"), requires_grad=parameter.requires_grad)


def read_tokenizer(folder: Path, config: ModelConfig) -> PreTrainedTokenizerBase:
    """The tokenizer, with the chat template that the settings name.

    Raises:
        StartupError: There is none, or it cannot be read.
    """
    # A folder that names the general class means its tokenizer.json as it stands; AutoTokenizer would rebuild
    # it by the habits of the model's type.
    reader = PreTrainedTokenizerFast if _is_general_tokenizer(folder) else AutoTokenizer
    try:
        tokenizer: PreTrainedTokenizerBase = reader.from_pretrained(
            folder, trust_remote_code=config.trust_remote_code, local_files_only=True
        )
    except (OSError, ValueError, ImportError) as error:
        raise _startup_error(f"the tokenizer of {config.model}", folder, error, config) from error
    # Some classes come up with an empty vocabulary when their files are missing.
    files = sorted(set(tokenizer.vocab_files_names.values()))
    if not any((folder / file).is_file() for file in files):
        raise StartupError(f"the folder {folder} has no tokenizer: none of {', '.join(files)} is there")
    if config.chat_template is not None:
        tokenizer.chat_template = read_chat_template(config.chat_template)
    return tokenizer


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


def _is_general_tokenizer(folder: Path) -> bool:
    description = folder / "tokenizer_config.json"
    if not (folder / "tokenizer.json").is_file() or not description.is_file():
        return False
    fields = json.loads(description.read_text(encoding="utf-8"))
    return fields.get("tokenizer_class") in _GENERAL_TOKENIZERS and "auto_map" not in fields


def _startup_error(what: str, folder: Path, error: Exception, config: ModelConfig) -> StartupError:
    what = f"{what} in {folder} cannot be read"
    if "trust_remote_code" in str(error) and not config.trust_remote_code:
        return StartupError(
            f"{what}: the model comes with Python code of its own, which is not run unless you set "
            "trust_remote_code (--trust-remote-code). Read the code first: it runs with your rights"
        )
    if folder.is_relative_to(config.cache_folder):
        return StartupError(
            f"{what}: {error}. If that was the disk or another process, delete the folder: the next start "
            "makes or fetches it again"
        )
    return StartupError(f"{what}: {error}")
