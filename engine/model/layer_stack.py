"""All decoder layers of a model as one operator: no Python between a step's first layer and its last.

A layer of a small model takes a quarter of a millisecond, and calling its ten operators one by one takes as
long. Nor does the interpreter's lock have to be taken again after each of them, for which the server's event
loop would otherwise compete with every layer.
"""

import logging
from collections.abc import Sequence
from typing import cast
from weakref import WeakKeyDictionary

import torch
from torch import nn
from transformers import PreTrainedModel

from engine.model.attention.cpu import CpuAttention, CpuPlan
from engine.model.attention.interface import AttentionMetadata
from engine.model.cpu_ops.build import CpuOperators
from engine.model.fused_layers import FusedAttention, FusedMlp, FusedNorm
from engine.model.hidden_states import decoder_layers
from engine.model.kv_cache import LayerShape, PagedKVCache
from engine.model.panel_linear import PanelLinear
from engine.model.self_check import paged_logits

logger = logging.getLogger(__name__)

_NUM_TOKENS = 6


class LayerStack(nn.Module):
    """Stands for all decoder layers of a model, each of the form that Llama gave it.

        x = x + attention(norm(x));  x = x + feed_forward(norm(x))

    Args:
        layers: The decoder layers; they stay its children, though it never calls them.
        parts: Those of each layer, in order.
        operators: The C++ operators.
    """

    def __init__(self, layers: nn.ModuleList, parts: Sequence["LayerParts"], operators: CpuOperators) -> None:
        super().__init__()
        self.layers = layers
        self._operators = operators
        self._numbers = tuple(each.attention.settings.layer for each in parts)
        self._tensors = [tensor for each in parts for tensor in each.parameters()]
        self._sizes = [size for each in parts for size in each.sizes()]
        self._factors = [factor for each in parts for factor in each.factors()]
        # By cache, as engines may share a model; none outlives its cache, whose memory it holds.
        self._held: WeakKeyDictionary[PagedKVCache, object] = WeakKeyDictionary()

    def forward(
        self,
        hidden_states: torch.Tensor,
        *,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        outrider: AttentionMetadata,
        **_: object,
    ) -> torch.Tensor:
        """As transformers calls a decoder layer: float32 [1, T, hidden_size], both ways."""
        outrider.layers_seen.update(self._numbers)
        # Models are stacked for the C++ operators, which no other backend goes with.
        plan = cast("CpuPlan", outrider.plan)
        wanted = outrider.residuals.layers
        result: torch.Tensor
        result, residuals = self._operators.run_layers(
            self._layers_with(plan.cache), hidden_states, *position_embeddings, *plan.tables, wanted
        )
        for place, layer in enumerate(wanted):
            outrider.residuals.states[layer] = residuals[:, place]
        return result

    def _layers_with(self, cache: PagedKVCache) -> object:
        """What the operator runs: handing over hundreds of tensors anew would take longer than a layer."""
        layers = self._held.get(cache)
        if layers is None:
            keys, values = ([each[number] for number in self._numbers] for each in (cache.keys, cache.values))
            layers = self._operators.hold_layers(self._tensors, self._sizes, self._factors, keys, values)
            self._held[cache] = layers
        return layers


class LayerParts:
    """The parts of one decoder layer.

    Args:
        norms: That before attention, and that before the feed-forward layer.
        attention: With packed layers.
        mlp: With packed layers.
    """

    def __init__(self, norms: Sequence[FusedNorm], attention: FusedAttention, mlp: FusedMlp) -> None:
        self.attention = attention
        self._norms = norms
        self._mlp = mlp
        linears = (attention.qkv_proj, attention.o_proj, mlp.gate_up_proj, mlp.down_proj)
        self._linears = [cast("PanelLinear", linear) for linear in linears]

    @classmethod
    def of(cls, layer: nn.Module) -> "LayerParts | None":
        """The parts of a decoder layer, None if it is made of others."""
        children = dict(layer.named_children()).values()
        norms = [child for child in children if isinstance(child, FusedNorm)]
        attentions = [child for child in children if isinstance(child, FusedAttention)]
        mlps = [child for child in children if isinstance(child, FusedMlp)]
        if (len(norms), len(attentions), len(mlps), len(children)) != (2, 1, 1, 4):
            return None
        [attention], [mlp] = attentions, mlps
        linears = (attention.qkv_proj, attention.o_proj, mlp.gate_up_proj, mlp.down_proj)
        if not all(isinstance(linear, PanelLinear) for linear in linears):
            return None
        return cls(norms, attention, mlp)

    def parameters(self) -> list[torch.Tensor]:
        """In the order in which operators.cpp takes them."""
        qkv, out, gate_up, down = (linear.packed for linear in self._linears)
        first, second = (norm.weight.detach() for norm in self._norms)
        return [first, *qkv, *out, second, *gate_up, *down]

    def sizes(self) -> list[int]:
        """Likewise."""
        settings = self.attention.settings
        gelu = self._mlp.settings.activation == "gelu_tanh"
        return [
            settings.num_heads,
            settings.num_kv_heads,
            settings.window or 0,
            int(gelu),
            *(linear.out_features for linear in self._linears),
        ]

    def factors(self) -> list[float]:
        """Likewise."""
        settings = self.attention.settings
        return [*(norm.settings.eps for norm in self._norms), settings.scale, settings.softcap or 0.0]


def stack_layers(module: PreTrainedModel, shapes: tuple[LayerShape, ...], operators: CpuOperators) -> bool:
    """Replaces a model's decoder layers by a LayerStack, in place, if that gives the same bits.

    Args:
        module: A float32 model on a CPU, its layers fused and packed.
        shapes: Cache shape of each attention layer.
        operators: The C++ operators.

    Returns:
        Whether they were replaced; the log tells why not.
    """
    name, layers = decoder_layers(module)
    parts = [LayerParts.of(layer) for layer in layers]
    complete = [each for each in parts if each is not None]
    if not layers or len(complete) < len(parts):
        logger.info("decoder layers are called one by one: they are not all made of fused and packed parts")
        return False
    backend, tokens = CpuAttention(operators), [(index * 37 + 11) % 97 for index in range(_NUM_TOKENS)]
    expected = paged_logits(module, shapes, backend, tokens)
    module.set_submodule(name, nn.ModuleList([LayerStack(layers, complete, operators)]))
    if torch.equal(paged_logits(module, shapes, backend, tokens), expected):
        logger.info("%d decoder layers run as one operator", len(layers))
        return True
    module.set_submodule(name, layers)
    logger.info("decoder layers are called one by one: as one operator they gave another result")
    return False
