"""What a draft head is made of: read from a checkpoint, or chosen for training."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal

EagleFamily = Literal["eagle", "eagle3"]
Features = tuple[int, ...] | Literal["last"]
"""Which hidden states of the target a head reads.

Numbers index transformers' `output_hidden_states`: state i is the residual stream *into* layer i, so i runs
from 0 (the embeddings) to the number of layers less 1. "last" is the state after the final norm, which
lm_head sees.
"""

DEFAULT_ROPE: Mapping[str, Any] = MappingProxyType({"rope_type": "default", "rope_theta": 10000.0})


def default_features(num_layers: int) -> tuple[int, int, int]:
    """The layers whose inputs EAGLE-3 reads where a checkpoint names none: 2, L // 2 and L - 3.

    Source: EAGLE-3 (Li et al. 2025) and the authors' code. Models of fewer than six layers take what is next.

    Args:
        num_layers: Layers of the target.
    """
    middle = num_layers // 2
    return min(2, middle), middle, max(num_layers - 3, middle)


@dataclass(frozen=True, slots=True, kw_only=True)
class EagleConfig:
    """An EAGLE head of any version.

    Attributes:
        family: "eagle" is EAGLE-1 and 2, whose fc joins embedding and feature; in "eagle3" a layer does.
        hidden_size: Width of the head.
        target_hidden_size: Width of the target's hidden states.
        vocab_size: Ids of the target.
        draft_vocab_size: Rows of the head's own lm_head; None takes the target's.
        features: Which hidden states of the target it reads.
        num_layers: Decoder layers.
        num_heads: Query heads.
        num_kv_heads: Key and value heads.
        head_dim: Width of a head.
        intermediate_size: Width inside the feed-forward layers.
        activation: Of the feed-forward layers, as transformers names it.
        rms_norm_eps: Of all norms.
        rope: Rotary parameters as transformers 5 spells them: rope_type, rope_theta and the type's own.
        max_positions: Positions that the rotary scaling may refer to.
        windows: Sliding window of each layer, None for full attention; empty for full attention throughout.
        qk_norm: Whether queries and keys are normed per head (Qwen 3's layers; Llama's do not).
        qkv_bias: Whether q_proj, k_proj and v_proj have a bias.
        o_bias: Whether o_proj has one.
        mlp_bias: Whether the feed-forward layers have one.
        has_fc: Whether there is an fc layer (EAGLE-3 heads of one hidden state may go without).
        fc_bias: Whether fc has a bias.
        norm_before_fc: EAGLE-3: one norm over all features side by side, before fc.
        fc_norm: EAGLE-3: a norm for each feature, before fc.
        norm_before_residual: EAGLE-3: the first layer's residual is the normed hidden state.
        norm_output: EAGLE-3: the next pass gets the state after the final norm, not before.
        embedding_norm: EAGLE-1 (HASS and others): a norm on the embedding, before fc.
        hidden_norm: EAGLE-1 (HASS): a norm on the hidden state, before fc.
        input_norm: EAGLE-1: whether the first layer norms its input as Llama's does; the authors' does not.
        output_norm: EAGLE-1: a norm before lm_head.
        own_embeddings: Whether the head embeds tokens itself; otherwise the target does.
        tied_lm_head: Whether its own embeddings are its lm_head as well.
    """

    family: EagleFamily
    hidden_size: int
    target_hidden_size: int
    vocab_size: int
    draft_vocab_size: int | None
    features: Features
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    num_layers: int = 1
    activation: str = "silu"
    rms_norm_eps: float = 1e-6
    rope: Mapping[str, Any] = field(default_factory=lambda: DEFAULT_ROPE)
    max_positions: int = 2048
    windows: tuple[int | None, ...] = ()
    qk_norm: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    has_fc: bool = True
    fc_bias: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_before_residual: bool = False
    norm_output: bool = False
    embedding_norm: bool = False
    hidden_norm: bool = False
    input_norm: bool = False
    output_norm: bool = False
    own_embeddings: bool = False
    tied_lm_head: bool = False

    @property
    def num_features(self) -> int:
        """Hidden states of the target that are laid side by side."""
        return 1 if self.features == "last" else len(self.features)

    @property
    def scale(self) -> float:
        """Factor on the query-key products."""
        return float(self.head_dim**-0.5)

    def window(self, layer: int) -> int | None:
        """Sliding window of a layer, in positions; None sees everything."""
        return self.windows[layer] if self.windows else None


@dataclass(frozen=True, slots=True, kw_only=True)
class MedusaConfig:
    """Medusa heads (Cai et al. 2024).

    Attributes:
        hidden_size: Width of the target's hidden states, of which they read the last.
        vocab_size: Ids of the target.
        draft_vocab_size: Rows of the heads' own output layers; None: all heads share the target's lm_head.
        num_heads: Heads; head i predicts the token i + 2 places on, where lm_head predicts the next.
        num_layers: Residual blocks of each head.
        block_bias: Whether the blocks have a bias.
        shared_lm_head: Whether all heads share one output layer of their own (one of draft_vocab_size rows).
        choices: The tree that comes with the heads: index paths, of which (0, 2) is head 1's third best token
            below head 0's best; None where the checkpoint names none.
    """

    hidden_size: int
    vocab_size: int
    draft_vocab_size: int | None
    num_heads: int
    num_layers: int = 1
    block_bias: bool = True
    shared_lm_head: bool = False
    choices: tuple[tuple[int, ...], ...] | None = None

    @property
    def features(self) -> Features:
        """What they read of the target."""
        return "last"
