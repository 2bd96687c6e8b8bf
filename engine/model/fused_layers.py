"""The layers that stand where `fusion` has found a model's own ones to be equal.

Each has `settings`: what it is made with besides weights, so that it can be made again without a trial.
"""

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn

from engine.model.attention.interface import LayerOptions
from engine.model.cpu_ops.build import CpuOperators

Activation = Literal["silu", "gelu_tanh"]


@dataclass(frozen=True, slots=True)
class NormSettings:
    """What a FusedNorm is made with besides its weight."""

    eps: float
    kind: Literal["norm"] = "norm"


@dataclass(frozen=True, slots=True)
class MlpSettings:
    """What a FusedMlp is made with besides its layers."""

    activation: Activation
    kind: Literal["feed-forward"] = "feed-forward"


@dataclass(frozen=True, slots=True)
class AttentionSettings:
    """What a FusedAttention is made with besides its layers; the last three are LayerOptions."""

    layer: int
    num_heads: int
    num_kv_heads: int
    scale: float
    window: int | None
    softcap: float | None
    kind: Literal["attention"] = "attention"


Settings = NormSettings | MlpSettings | AttentionSettings


class FusedNorm(nn.Module):
    """RMSNorm as one operator.

    Args:
        weight: float32 [size].
        eps: Added to the mean square.
        operators: The C++ operators.
    """

    def __init__(self, weight: torch.Tensor, eps: float, operators: CpuOperators) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight, requires_grad=False)
        self._eps = eps
        self._rms_norm = operators.rms_norm

    @property
    def settings(self) -> NormSettings:
        """What it was made with."""
        return NormSettings(self._eps)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """float32 [..., size], both ways."""
        result: torch.Tensor = self._rms_norm(x, self.weight, self._eps)
        return result


class FusedMlp(nn.Module):
    """down(activation(gate(x)) * up(x)), with gate and up as one matrix.

    Args:
        gate_up: Both layers, one below the other.
        down: The last layer.
        activation: What gate goes through.
        operators: The C++ operators.
    """

    def __init__(
        self,
        gate_up: nn.Linear,
        down: nn.Linear,
        activation: Activation,
        operators: CpuOperators,
    ) -> None:
        super().__init__()
        self.gate_up_proj = gate_up
        self.down_proj = down
        self.settings = MlpSettings(activation)
        self._gate = {"silu": operators.gate_silu, "gelu_tanh": operators.gate_gelu_tanh}[activation]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """float32 [..., hidden_size], both ways."""
        result: torch.Tensor = self.down_proj(self._gate(self.gate_up_proj(x)))
        return result


class FusedAttention(nn.Module):
    """Rotary attention whose queries, keys and values come from one matrix.

    Args:
        qkv: The three layers, one below the other.
        out: The last layer.
        settings: The layer's index, its heads, and what it asks of attention.
        operators: The C++ operators.
    """

    def __init__(
        self, qkv: nn.Linear, out: nn.Linear, settings: AttentionSettings, operators: CpuOperators
    ) -> None:
        super().__init__()
        self.qkv_proj = qkv
        self.o_proj = out
        self.settings = settings
        self.layer_idx = settings.layer
        self._options = LayerOptions(settings.scale, settings.window, settings.softcap, None)
        self._num_heads, self._num_kv_heads = settings.num_heads, settings.num_kv_heads
        self._rotate = operators.rotate

    def forward(
        self,
        hidden_states: torch.Tensor,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        *,
        outrider: Any,
        **_: object,
    ) -> tuple[torch.Tensor, None]:
        """As transformers calls it: float32 [1, T, hidden_size], both ways."""
        query, key, value = self._rotate(
            self.qkv_proj(hidden_states), *position_embeddings, self._num_heads, self._num_kv_heads
        )
        attended = outrider.attend(self.layer_idx, query, key, value, self._options)
        return self.o_proj(attended.flatten(2)), None
