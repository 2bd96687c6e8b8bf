"""How transformers' models reach our attention: one registered function, one metadata argument.

A model loaded with `attn_implementation=ATTENTION_NAME` calls `_attend` once per layer with rotated queries
and keys. The function hands them to the backend in the metadata, which writes the new keys and values to
their slots and attends. Causality, trees and sliding windows are entirely ours: transformers builds no
mask for a name it has no mask function for. Source of the contract: transformers' AttentionInterface, 5.x.
"""

from dataclasses import dataclass, field
from typing import Protocol

import torch
from transformers import AttentionInterface, PreTrainedModel

from engine.errors import ModelNotSupported
from engine.model.input_batch import InputBatch
from engine.model.kv_cache import LayerShape, PagedKVCache
from engine.model.recording import Recorder
from engine.model.static_batch import StaticBatch

ATTENTION_NAME = "outrider_paged"


@dataclass(frozen=True, slots=True)
class LayerOptions:
    """What a layer asks of attention beyond plain softmax.

    Attributes:
        scale: Factor on the query-key products.
        window: Sliding window in positions: a query sees keys with position_q - position_k < window.
        softcap: Cap c of Gemma 2: scores become c * tanh(scores / c).
        sinks: gpt-oss' attention sinks: per head a logit that joins the softmax's denominator, [num_heads].
    """

    scale: float
    window: int | None
    softcap: float | None
    sinks: torch.Tensor | None


class AttentionPlan(Protocol):
    """Attention for one forward pass: what all layers share (masks, indices) is worked out once."""

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, options: LayerOptions
    ) -> torch.Tensor:
        """Stores a layer's new keys and values, then attends each token to the slots it may see.

        Args:
            layer: Index of the layer.
            query: [1, num_heads, num_tokens, key_dim].
            key: [1, num_kv_heads, num_tokens, key_dim].
            value: [1, num_kv_heads, num_tokens, value_dim].
            options: The layer's wishes.

        Returns:
            [1, num_tokens, num_heads, value_dim].
        """


class StaticPlan(AttentionPlan, Protocol):
    """Attention for all passes of a bucket, over tables that stay where they are."""

    def fill(self, batch: InputBatch) -> None:
        """Takes the next batch in, which is on the host and in the plan's StaticBatch."""


class RecordedAttention(Protocol):
    """Attention for passes that are recorded."""

    @property
    def recorder(self) -> Recorder:
        """What records them."""

    def plan(self, batch: StaticBatch, cache: PagedKVCache) -> StaticPlan:
        """Prepares the passes over `batch` of the model that owns `cache`."""


class AttentionBackend(Protocol):
    """A way to compute attention on some kind of device."""

    @property
    def recorded(self) -> RecordedAttention | None:
        """The same for recorded passes; None where each has to be planned anew."""

    def plan(self, batch: InputBatch, cache: PagedKVCache) -> AttentionPlan:
        """Prepares one forward pass over `batch` of the model that owns `cache`."""


@dataclass(slots=True)
class ResidualSink:
    """Where a pass leaves the residual streams that somebody wants to see.

    Attributes:
        layers: Layers whose input is wanted; the number of layers stands for what the last one gives.
        states: By layer, [T, hidden_size].
    """

    layers: tuple[int, ...] = ()
    states: dict[int, torch.Tensor] = field(default_factory=dict)


@dataclass(slots=True)
class AttentionMetadata:
    """What one forward pass tells the layers, and which of them have attended.

    Attributes:
        plan: How this pass attends, and the cache it writes to; two models in a process are two caches.
        residuals: What layers that are one operator are to write out.
        layers_seen: Layers that have attended in this pass.
    """

    plan: AttentionPlan
    residuals: ResidualSink = field(default_factory=ResidualSink)
    layers_seen: set[int] = field(default_factory=set)

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, options: LayerOptions
    ) -> torch.Tensor:
        """See AttentionPlan, whose shapes are those of transformers."""
        if layer in self.layers_seen:
            raise RuntimeError(f"attention layer {layer} was called twice in one forward pass")
        self.layers_seen.add(layer)
        return self.plan.attend(layer, query, key, value, options)


@dataclass(slots=True)
class LayerProbe:
    """Stands in for AttentionMetadata in a first pass that only asks what the layers look like."""

    shapes: dict[int, LayerShape] = field(default_factory=dict)
    repeated: set[int] = field(default_factory=set)

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, options: LayerOptions
    ) -> torch.Tensor:
        """Records the shape; the output is zeros [1, T, H, value_dim]."""
        if layer in self.shapes:
            self.repeated.add(layer)
        self.shapes[layer] = LayerShape(key.shape[1], key.shape[3], value.shape[3])
        return query.new_zeros(1, query.shape[2], query.shape[1], value.shape[3])


class _Attends(Protocol):
    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, options: LayerOptions
    ) -> torch.Tensor: ...


def _attend(  # noqa: PLR0913, transformers calls it with these
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    outrider: _Attends,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **_: object,
) -> tuple[torch.Tensor, None]:
    """The registered attention function; transformers fixes its parameters."""
    options = LayerOptions(
        scale=query.shape[-1] ** -0.5 if scaling is None else scaling,
        window=sliding_window,
        softcap=softcap,
        sinks=s_aux,
    )
    layer = module.layer_idx
    assert isinstance(layer, int)
    return outrider.attend(layer, query, key, value, options), None


def register() -> None:
    """Makes ATTENTION_NAME known to transformers; calling it again changes nothing."""
    AttentionInterface.register(ATTENTION_NAME, _attend)


def probe_layers(module: PreTrainedModel) -> tuple[LayerShape, ...]:
    """The cache shape of each attention layer, found by running two tokens through the model.

    Args:
        module: A model loaded with ATTENTION_NAME.

    Raises:
        ModelNotSupported: Layers do not attend exactly once per forward pass.
    """
    probe = LayerProbe()
    tokens = torch.zeros(1, 2, dtype=torch.int64, device=module.device)
    with torch.inference_mode():
        module(
            input_ids=tokens,
            position_ids=torch.arange(2, device=module.device)[None],
            use_cache=False,
            outrider=probe,
        )
    if not probe.shapes:
        raise ModelNotSupported(
            f"{type(module).__name__} never calls the attention interface of transformers, "
            "so its keys and values cannot be paged"
        )
    missing = sorted(set(range(max(probe.shapes) + 1)) - set(probe.shapes))
    if missing or probe.repeated:
        raise ModelNotSupported(
            f"{type(module).__name__} does not attend exactly once per layer "
            f"(layers without attention: {missing}, with several: {sorted(probe.repeated)}), "
            "so its state cannot be paged"
        )
    return tuple(probe.shapes[layer] for layer in sorted(probe.shapes))
