"""Runs the engine's modules over a text, with attention over all that came before."""

import torch
from torch import nn

from engine.speculation.heads.config import EagleConfig
from engine.speculation.heads.eagle import EagleHead
from engine.speculation.heads.target import TargetShape

TARGET = TargetShape(hidden_size=16, vocab_size=40, num_layers=8, ties_embeddings=False)


class Remembering:
    """Attention for one text that is fed in pieces."""

    def __init__(self, config: EagleConfig) -> None:
        self._config = config
        self._keys: dict[int, torch.Tensor] = {}
        self._values: dict[int, torch.Tensor] = {}

    def __call__(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, /
    ) -> torch.Tensor:
        if layer in self._keys:
            key = torch.cat((self._keys[layer], key), dim=2)
            value = torch.cat((self._values[layer], value), dim=2)
        self._keys[layer], self._values[layer] = key, value
        total, new = key.shape[2], query.shape[2]
        distance = torch.arange(total - new, total)[:, None] - torch.arange(total)
        visible = distance >= 0
        if (window := self._config.window(layer)) is not None:
            visible &= distance < window
        out = nn.functional.scaled_dot_product_attention(
            query, key, value, attn_mask=visible, enable_gqa=True, scale=self._config.scale
        )
        return out.transpose(1, 2)


def run_eagle(
    head: EagleHead,
    embedding: torch.Tensor,
    lm_head: torch.Tensor,
    features: torch.Tensor,
    tokens: list[int],
    drafts: list[int],
) -> torch.Tensor:
    """Logits behind each token, [len(tokens) + len(drafts), rows]: a text in two pieces, then each draft."""
    attend = Remembering(head.config)
    table = embedding if head.embed_tokens is None else head.embed_tokens.weight
    rows = []
    out = torch.zeros(0)
    cut = len(tokens) // 2
    for begin, end in ((0, cut), (cut, len(tokens))):
        out = head(
            table[None, tokens[begin:end]],
            head.fuse(features[None, begin:end].flatten(-2)),
            torch.arange(begin, end)[None],
            attend,
        )
        rows.append(head.logits(out[0], lambda x: x @ lm_head.T))
    for place, token in enumerate(drafts, start=len(tokens)):
        out = head(table[None, [token]], head.carried(out[:, -1:]), torch.tensor([[place]]), attend)
        rows.append(head.logits(out[0], lambda x: x @ lm_head.T))
    return torch.cat(rows)
