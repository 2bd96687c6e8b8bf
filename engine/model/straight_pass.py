"""The forward pass of a model whose layers are one operator, without what transformers puts around them.

What is left of such a model is an embedding, rotary positions, the layers, a norm and a head. transformers'
own forward makes a mask that nobody reads, looks for options that nobody has set and wraps each result in a
class of its own, which takes longer than all of these but the layers and the head.
"""

import logging
import sys
from dataclasses import dataclass, replace

import torch
from torch import nn
from transformers import PreTrainedModel

from engine.model.attention.cpu import CpuAttention
from engine.model.attention.interface import AttentionMetadata
from engine.model.cpu_ops.build import CpuOperators
from engine.model.fused_layers import FusedNorm
from engine.model.input_batch import SequenceSlice
from engine.model.kv_cache import LayerShape, PagedKVCache
from engine.model.layer_stack import LayerStack
from engine.model.model_runner import ModelRunner

logger = logging.getLogger(__name__)

_NUM_TOKENS, _NUM_ROWS = 6, 4


@dataclass(frozen=True, slots=True)
class Hidden:
    """What a base model gives: [1, T, hidden_size]."""

    last_hidden_state: torch.Tensor


@dataclass(frozen=True, slots=True)
class Scores:
    """What a causal model gives: [1, R, rows of the head]."""

    logits: torch.Tensor


class StraightBase:
    """Stands for a base model's forward.

    Args:
        embedding: Its embedding.
        rotary: What gives its rotary positions.
        layers: All its layers.
        norm: What follows them.
    """

    def __init__(self, embedding: nn.Module, rotary: nn.Module, layers: nn.Module, norm: nn.Module) -> None:
        self._embedding = embedding
        self._rotary = rotary
        self._layers = layers
        self._norm = norm

    @classmethod
    def of(cls, base: PreTrainedModel) -> "StraightBase | None":
        """That of a base model which has these four parts; None for any other."""
        embedding = base.get_input_embeddings()
        children = [child for child in base.children() if child is not embedding]
        lists = [child for child in children if isinstance(child, nn.ModuleList)]
        norms = [child for child in children if isinstance(child, FusedNorm)]
        others = [child for child in children if next(child.parameters(), None) is None]
        if (len(children), len(lists), len(norms), len(others)) != (3, 1, 1, 1):
            return None
        [layers], [norm], [rotary] = lists, norms, others
        if len(layers) != 1 or not isinstance(layers[0], LayerStack):
            return None
        return cls(embedding, rotary, layers[0], norm)

    def __call__(
        self,
        *,
        input_ids: torch.Tensor,
        position_ids: torch.Tensor,
        outrider: AttentionMetadata,
    ) -> Hidden:
        """As the base model is called: int64 [1, T], twice."""
        hidden = self._embedding(input_ids)
        positions = self._rotary(hidden, position_ids=position_ids)
        return Hidden(self._norm(self._layers(hidden, position_embeddings=positions, outrider=outrider)))


class StraightModel:
    """Stands for a causal model's forward.

    Args:
        base: Its base model, which is still called as a module, so that its hooks are.
        head: What makes logits of what that gives.
    """

    def __init__(self, base: nn.Module, head: nn.Module) -> None:
        self._base = base
        self._head = head

    def __call__(
        self,
        *,
        input_ids: torch.Tensor,
        position_ids: torch.Tensor,
        outrider: AttentionMetadata,
        logits_to_keep: torch.Tensor,
        **_: object,
    ) -> Scores:
        """As ModelRunner calls a model."""
        result = self._base(input_ids=input_ids, position_ids=position_ids, outrider=outrider)
        return Scores(self._head(result.last_hidden_state.index_select(1, logits_to_keep)))


def straighten(module: PreTrainedModel, shapes: tuple[LayerShape, ...], operators: CpuOperators) -> bool:
    """Gives a stacked model the forward passes of above, in place, if they give the same bits.

    Args:
        module: A float32 model on a CPU whose decoder layers are a LayerStack.
        shapes: Cache shape of each attention layer.
        operators: The C++ operators.

    Returns:
        Whether it has them; the log tells why not.
    """
    base, head = module.base_model, module.get_output_embeddings()
    straight = None if base is module else StraightBase.of(base)
    if straight is None or set(module.children()) != {base, head}:
        logger.info("the model's own forward pass is used: there is more around its layers than usual")
        return False
    expected = _logits_far_apart(module, shapes, operators)
    base.forward = straight
    module.forward = StraightModel(base, head)
    try:
        if torch.equal(_logits_far_apart(module, shapes, operators), expected):
            return True
        reason = "without what is around its layers the result is another"
    except (TypeError, ValueError) as error:
        reason = f"a part of it is called in another way ({error})"
    del base.forward, module.forward
    logger.info("the model's own forward pass is used: %s", reason)
    return False


def _logits_far_apart(
    module: PreTrainedModel, shapes: tuple[LayerShape, ...], operators: CpuOperators
) -> torch.Tensor:
    """Logits at positions from the context's beginning to its end: what depends on them shows it."""
    cache = PagedKVCache(shapes, 1, _NUM_TOKENS, module.dtype, module.device)
    runner = ModelRunner(module, cache, CpuAttention(operators), sys.maxsize)
    tokens = [(index * 37 + 11) % 97 for index in range(_NUM_TOKENS)]
    batch = runner.build([SequenceSlice(tokens, 0, [0], rows=_NUM_ROWS)])
    last = module.config.get_text_config().max_position_embeddings - 1
    positions = [last * index // (_NUM_TOKENS - 1) for index in range(_NUM_TOKENS)]
    return runner.forward(replace(batch, positions=torch.tensor(positions)))
