"""The decoder layers of EAGLE heads; how keys and values are kept is left to the caller."""

from typing import Protocol

import torch
from torch import nn
from transformers.activations import ACT2FN
from transformers.models.llama.configuration_llama import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from engine.speculation.heads.config import EagleConfig

Rotation = tuple[torch.Tensor, torch.Tensor]
"""Cosines and sines of the positions, [B, T, head_dim] each."""


class Attend(Protocol):
    """Attention, as the caller computes it: over a paged cache, or over a whole text in training.

    Scores are scaled by the config's `scale`; its `window` holds where it has one.
    """

    def __call__(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, /
    ) -> torch.Tensor:
        """Attends each token to what it may see, itself included.

        Args:
            layer: Index of the head's layer.
            query: [B, num_heads, T, head_dim], rotated.
            key: [B, num_kv_heads, T, head_dim], rotated; those of these T tokens alone.
            value: [B, num_kv_heads, T, head_dim].

        Returns:
            [B, T, num_heads, head_dim].
        """


class Rotary(nn.Module):
    """Rotary position embeddings of a head.

    Args:
        config: The head's.
    """

    def __init__(self, config: EagleConfig) -> None:
        super().__init__()
        self._embedding = LlamaRotaryEmbedding(
            LlamaConfig(
                hidden_size=config.num_heads * config.head_dim,
                num_attention_heads=config.num_heads,
                head_dim=config.head_dim,
                max_position_embeddings=config.max_positions,
                rope_parameters=dict(config.rope),
            )
        )

    def forward(self, like: torch.Tensor, positions: torch.Tensor) -> Rotation:
        """Cosines and sines.

        Args:
            like: A tensor of the type they should have.
            positions: int64 [B, T].
        """
        rotation: Rotation = self._embedding(like, positions)
        return rotation


class Attention(nn.Module):
    """Self-attention with rotary positions and grouped heads.

    Args:
        config: The head's.
        layer: Index of the layer.
        input_size: Width of what it reads.
    """

    def __init__(self, config: EagleConfig, layer: int, input_size: int) -> None:
        super().__init__()
        self._layer = layer
        self._head_dim = config.head_dim
        queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        self.q_proj = nn.Linear(input_size, queries, bias=config.qkv_bias)
        self.k_proj = nn.Linear(input_size, keys, bias=config.qkv_bias)
        self.v_proj = nn.Linear(input_size, keys, bias=config.qkv_bias)
        self.o_proj = nn.Linear(queries, config.hidden_size, bias=config.o_bias)
        self.q_norm = norm(config.head_dim, config) if config.qk_norm else None
        self.k_norm = norm(config.head_dim, config) if config.qk_norm else None

    def forward(self, x: torch.Tensor, rotation: Rotation, attend: Attend) -> torch.Tensor:
        """Attends.

        Args:
            x: [B, T, input_size].
            rotation: Of the tokens' positions.
            attend: See Attend.

        Returns:
            [B, T, hidden_size].
        """
        query, key, value = (
            projection(x).unflatten(-1, (-1, self._head_dim))
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        if self.q_norm is not None and self.k_norm is not None:
            query, key = self.q_norm(query), self.k_norm(key)
        query, key = apply_rotary_pos_emb(query.transpose(1, 2), key.transpose(1, 2), *rotation)
        seen = attend(self._layer, query, key, value.transpose(1, 2))
        out: torch.Tensor = self.o_proj(seen.flatten(-2))
        return out


class Mlp(nn.Module):
    """Llama's gated feed-forward layer.

    Args:
        config: The head's.
    """

    def __init__(self, config: EagleConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=config.mlp_bias)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=config.mlp_bias)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=config.mlp_bias)
        self.act_fn = ACT2FN[config.activation]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[B, T, hidden_size], both ways."""
        out: torch.Tensor = self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))
        return out


class DecoderLayer(nn.Module):
    """A layer of Llama's form.

    Args:
        config: The head's.
        layer: Its index.
        norms_input: Whether attention reads a normed input.
    """

    def __init__(self, config: EagleConfig, layer: int, *, norms_input: bool = True) -> None:
        super().__init__()
        self.input_layernorm = norm(config.hidden_size, config) if norms_input else None
        self.self_attn = Attention(config, layer, config.hidden_size)
        self.post_attention_layernorm = norm(config.hidden_size, config)
        self.mlp = Mlp(config)

    def forward(self, x: torch.Tensor, rotation: Rotation, attend: Attend) -> torch.Tensor:
        """[B, T, hidden_size], both ways."""
        normed = x if self.input_layernorm is None else self.input_layernorm(x)
        x = x + self.self_attn(normed, rotation, attend)
        out: torch.Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out


class JoiningLayer(nn.Module):
    """EAGLE-3's first layer: attention reads the token's embedding and the hidden state side by side.

    Args:
        config: The head's.
    """

    def __init__(self, config: EagleConfig) -> None:
        super().__init__()
        self._norm_before_residual = config.norm_before_residual
        self.input_layernorm = norm(config.hidden_size, config)
        self.hidden_norm = norm(config.hidden_size, config)
        self.self_attn = Attention(config, 0, 2 * config.hidden_size)
        self.post_attention_layernorm = norm(config.hidden_size, config)
        self.mlp = Mlp(config)

    def forward(
        self, embeddings: torch.Tensor, hidden: torch.Tensor, rotation: Rotation, attend: Attend
    ) -> torch.Tensor:
        """Everything [B, T, hidden_size]."""
        normed = self.hidden_norm(hidden)
        joined = torch.cat((self.input_layernorm(embeddings), normed), dim=-1)
        residual = normed if self._norm_before_residual else hidden
        x = residual + self.self_attn(joined, rotation, attend)
        out: torch.Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out


def norm(size: int, config: EagleConfig) -> nn.RMSNorm:
    """A norm of the head's kind."""
    return nn.RMSNorm(size, eps=config.rms_norm_eps)
