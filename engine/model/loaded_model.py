"""LoadedModel: a causal language model in memory, with what the engine has to know of it."""

from dataclasses import dataclass

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from engine.model.cpu_ops.build import CpuOperators
from engine.model.kv_cache import LayerShape


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model that is ready to run on a paged KV cache.

    Attributes:
        name: What it was asked for by; the default of the served name.
        module: The model, in evaluation mode, without gradients, with our attention.
        tokenizer: Its tokenizer; None for models built in memory without one.
        layers: Cache shape of each attention layer.
        vocab_size: Ids from 0 that may be sampled: the tokenizer's, without rows that pad the embedding.
        max_model_len: Tokens that prompt and answer may share.
        eos_token_ids: Ids that end an answer.
        device: Where it runs.
        dtype: Type of its activations.
        weights: Type of its linear layers' weights: "float32", "float16", "bfloat16", "int8", "int6",
            "int5" or "int4" (of those that have so few bits; others are of more then); on a GPU also "fp8".
        operators: The C++ operators of its steps; None where there are none for it.
    """

    name: str
    module: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase | None
    layers: tuple[LayerShape, ...]
    vocab_size: int
    max_model_len: int
    eos_token_ids: frozenset[int]
    device: torch.device
    dtype: torch.dtype
    weights: str
    operators: CpuOperators | None
