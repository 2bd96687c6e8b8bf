"""A trial at start: a model must say the same on the paged cache as in transformers' own forward pass.

Some models call the attention function as agreed and still mean more than it computes: a mask of their own,
attention to what comes later. Nothing in their config says so, but their logits do.
"""

import logging
import sys
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from engine.errors import ModelNotSupported
from engine.model.attention.interface import ATTENTION_NAME, AttentionBackend
from engine.model.input_batch import InputBatch, SequenceSlice
from engine.model.kv_cache import LayerShape, PagedKVCache
from engine.model.model_runner import ModelRunner

logger = logging.getLogger(__name__)

_NUM_TOKENS = 6
_BLOCK_SIZE = 4
_TOLERANCE = 1e-3
"""Largest difference relative to the largest logit. Orders of summation make 1e-5, another mask makes 1."""


@dataclass(frozen=True, slots=True)
class Trial:
    """What transformers' own forward pass says.

    Attributes:
        tokens: A few token ids.
        logits: [len(tokens), rows of the head].
    """

    tokens: list[int]
    logits: torch.Tensor


def run_trial(module: PreTrainedModel) -> Trial | None:
    """Runs a few tokens through a model as it came; None where there is nothing to compare with.

    Only float32 tells small differences from wrong ones: in 16 bits a router of experts may flip by rounding.
    Other types are let pass.

    Args:
        module: A model set to ATTENTION_NAME, with its own layers and weights.
    """
    if module.dtype != torch.float32:
        return None
    rows: int = module.get_input_embeddings().weight.shape[0]
    tokens = [(index * 37 + 11) % rows for index in range(_NUM_TOKENS)]
    module.set_attn_implementation("eager")
    try:
        if module.config._attn_implementation != "eager":
            logger.info("%s has no attention of its own to compare ours with", type(module).__name__)
            return None
        with torch.inference_mode():
            ids = torch.tensor([tokens], device=module.get_input_embeddings().weight.device)
            return Trial(tokens, module(input_ids=ids, use_cache=False).logits[0])
    finally:
        module.set_attn_implementation(ATTENTION_NAME)


def check_paged_logits(
    module: PreTrainedModel, layers: tuple[LayerShape, ...], backend: AttentionBackend, trial: Trial
) -> None:
    """Runs a trial's tokens on a paged cache, in two chunks, and compares the logits.

    Args:
        module: The model, its layers fused if they will be, its weights still plain.
        layers: Cache shape of each attention layer.
        backend: How it will attend.
        trial: What it has to say.

    Raises:
        ModelNotSupported: The logits differ.
    """
    check_logits(module, paged_logits(module, layers, backend, trial.tokens), trial)


def check_logits(module: PreTrainedModel, ours: torch.Tensor, trial: Trial) -> None:
    """Compares logits of a paged cache with those of a trial.

    Raises:
        ModelNotSupported: They differ.
    """
    difference = (ours - trial.logits).abs().max().item()
    largest = trial.logits.abs().max().item()
    if not difference <= _TOLERANCE * largest:
        raise ModelNotSupported(
            f"{type(module).__name__} gives other logits on a paged cache than in transformers' own forward "
            f"pass (they differ by {difference:g}, the largest is {largest:g}): its attention is more than a "
            "causal softmax over keys and values, so its answers would be wrong"
        )


def paged_logits(
    module: PreTrainedModel, layers: tuple[LayerShape, ...], backend: AttentionBackend, tokens: list[int]
) -> torch.Tensor:
    """Runs tokens on a paged cache, in two chunks.

    Args:
        module: A model set to ATTENTION_NAME.
        layers: Cache shape of each attention layer.
        backend: How it attends.
        tokens: At most two blocks of _BLOCK_SIZE.

    Returns:
        float32 [len(tokens), rows of the head].
    """
    cache = PagedKVCache(layers, 2, _BLOCK_SIZE, module.dtype, module.device)
    runner = ModelRunner(module, cache, backend, sys.maxsize)
    half = len(tokens) // 2
    rows = []
    for begin, end in ((0, half), (half, len(tokens))):
        piece = SequenceSlice(tokens[begin:end], begin, [1, 0], rows=end - begin)
        rows.append(runner.forward(runner.build([piece])))
    return torch.cat(rows)


def paged_logits_in_one_pass(
    module: PreTrainedModel, layers: tuple[LayerShape, ...], backend: AttentionBackend, tokens: list[int]
) -> torch.Tensor:
    """Runs tokens on a paged cache in one pass: two chunks side by side, the later one first.

    The second chunk reads keys and values that the first one writes in the same pass, as a draft reads its
    ancestors'. A layer that mixes neighbouring rows in any other way finds other neighbours than in a prompt.

    Args:
        module: A float32 model on a CPU set to ATTENTION_NAME; a layer's weights need to be there no sooner
            than it is called.
        layers: Cache shape of each attention layer.
        backend: How it attends.
        tokens: At most two blocks of _BLOCK_SIZE.

    Returns:
        float32 [len(tokens), rows of the head].
    """
    device = torch.device("cpu")
    cache = PagedKVCache(layers, 2, _BLOCK_SIZE, torch.float32, device)
    half = len(tokens) // 2
    first = SequenceSlice(tokens[:half], 0, [1, 0], rows=half)
    second = SequenceSlice(tokens[half:], half, [1, 0], rows=len(tokens) - half)
    batch = InputBatch.build([second, first], _BLOCK_SIZE, device)
    rows = ModelRunner(module, cache, backend, sys.maxsize).forward(batch)
    return torch.cat([rows[len(second) :], rows[: len(second)]])
