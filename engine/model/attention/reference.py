"""The reference backend: attention in plain torch on any device, one sequence after the other."""

from collections.abc import Sequence

import torch
from torch.nn import functional

from engine.model.attention.interface import AttentionPlan, LayerOptions
from engine.model.input_batch import InputBatch, SequenceSpan
from engine.model.kv_cache import PagedKVCache


class ReferenceAttention:
    """Gathers each sequence's keys and values and runs torch's own kernels over them."""

    @property
    def recorded(self) -> None:
        """Each pass is planned anew."""

    def plan(self, batch: InputBatch, cache: PagedKVCache) -> AttentionPlan:
        """Prepares one forward pass."""
        return ReferencePlan(batch, cache)


class ReferencePlan:
    """One forward pass of ReferenceAttention. Masks are built once per window and serve all layers."""

    def __init__(self, batch: InputBatch, cache: PagedKVCache) -> None:
        self._batch = batch
        self._cache = cache
        self._masks: dict[int | None, list[torch.Tensor | None]] = {}

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, options: LayerOptions
    ) -> torch.Tensor:
        """See AttentionPlan."""
        self._cache.write(layer, self._batch.slots, key[0].transpose(0, 1), value[0].transpose(0, 1))
        masks = self._masks_for(options.window)
        parts = []
        for index, span in enumerate(self._batch.spans):
            slots = self._batch.context_slots[index]
            # In the model's type whatever the cache's is.
            keys, values = self._cache.read(layer, slots, query.dtype)
            parts.append(attend_one(query[0, :, span.begin : span.end], keys, values, masks[index], options))
        return (parts[0] if len(parts) == 1 else torch.cat(parts))[None]

    def _masks_for(self, window: int | None) -> Sequence[torch.Tensor | None]:
        if window not in self._masks:
            self._masks[window] = [
                visibility(self._batch, index, span, window) for index, span in enumerate(self._batch.spans)
            ]
        return self._masks[window]


def visibility(batch: InputBatch, index: int, span: SequenceSpan, window: int | None) -> torch.Tensor | None:
    """Which slots of a sequence each of its tokens in the pass may see.

    Windows compare positions, not slots: siblings of a tree lie in different slots at one position.

    Returns:
        Bool [num_tokens, num_slots], or None where every token sees every slot.
    """
    if span.end - span.begin == 1 and not span.has_tree and (window is None or span.num_slots <= window):
        return None
    device = batch.visible.device
    own = slice(span.begin, span.end)
    mask = torch.arange(span.num_slots, device=device) < batch.visible[own, None]
    if span.has_tree:
        num_nodes = span.num_slots - span.num_committed
        bits = batch.ancestors[own, None] >> torch.arange(num_nodes, device=device)
        mask[:, span.num_committed :] |= (bits & 1).bool()
    if window is not None:
        mask &= batch.positions[own, None] - batch.context_positions[index] < window
    return mask


def attend_one(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor | None,
    options: LayerOptions,
) -> torch.Tensor:
    """Attention of one sequence.

    The query heads of a group are folded into the query length, so that grouped keys and values are read
    where they are instead of being repeated.

    Args:
        query: [num_heads, num_tokens, key_dim].
        keys: [num_slots, num_kv_heads, key_dim].
        values: [num_slots, num_kv_heads, value_dim].
        mask: Bool [num_tokens, num_slots]; None sees everything.
        options: The layer's wishes.

    Returns:
        [num_tokens, num_heads, value_dim].
    """
    num_heads, num_tokens, key_dim = query.shape
    num_kv_heads = keys.shape[1]
    group = num_heads // num_kv_heads
    folded = query.reshape(num_kv_heads, group * num_tokens, key_dim)
    if mask is not None and group > 1:
        mask = mask.repeat(group, 1)
    keys, values = keys.transpose(0, 1), values.transpose(0, 1)  # [num_kv_heads, num_slots, dim]
    if options.softcap is None and options.sinks is None:
        out = functional.scaled_dot_product_attention(
            folded[None], keys[None], values[None], attn_mask=mask, scale=options.scale
        )[0]
    else:
        out = _attend_by_hand(folded, keys, values, mask, options)
    return out.view(num_heads, num_tokens, -1).transpose(0, 1)


def _attend_by_hand(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor | None,
    options: LayerOptions,
) -> torch.Tensor:
    """What torch's kernel cannot do: a cap on the scores, and sinks in the softmax's denominator."""
    scores = (query.float() @ keys.float().transpose(1, 2)) * options.scale
    if options.softcap is not None:
        scores = torch.tanh(scores / options.softcap) * options.softcap
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf"))
    if options.sinks is not None:
        num_kv_heads, num_rows, _ = scores.shape
        group = options.sinks.shape[0] // num_kv_heads
        sinks = options.sinks.float().view(num_kv_heads, group, 1)
        sinks = sinks.expand(-1, -1, num_rows // group).reshape(num_kv_heads, num_rows, 1)
        weights = torch.cat([scores, sinks], dim=-1).softmax(dim=-1)[..., :-1]
    else:
        weights = scores.softmax(dim=-1)
    return (weights @ values.float()).to(query.dtype)
