"""Replaces parts of a model's layers by equal ones that take a few operators instead of dozens.

Most of a small model's step is the calling of small operators. Norms, gated feed-forward layers and rotary
attention have the same formula in nearly all architectures that follow Llama, under many class names. A part
is replaced where its children say that it might be one, and a trial with random input says that it is.
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn

from engine.model.attention.interface import LayerOptions
from engine.model.cpu_ops.build import CpuOperators

logger = logging.getLogger(__name__)

_TRIAL_ROWS = 3
_TOLERANCE = 1e-4
"""Largest difference relative to a row's largest result: other orders of summation make 1e-6."""


def fuse_layers(module: nn.Module, operators: CpuOperators) -> dict[str, int]:
    """Replaces what can be, in place.

    Args:
        module: A float32 model on a CPU with its plain weights.
        operators: The C++ operators.

    Returns:
        How many parts of each kind were replaced.
    """
    counts = {"norms": 0, "feed-forward": 0, "attention": 0}
    makers: dict[str, _Maker] = {"norms": fused_norm, "feed-forward": fused_mlp, "attention": fused_attention}
    for parent, name, child in list(_children(module)):
        for kind, make in makers.items():
            if (fused := make(child, operators)) is not None:
                setattr(parent, name, fused)
                counts[kind] += 1
                break
    logger.info("fused %s", ", ".join(f"{count} {kind}" for kind, count in counts.items()))
    return counts


_Maker = Callable[[nn.Module, CpuOperators], nn.Module | None]


def _children(module: nn.Module) -> Iterator[tuple[nn.Module, str, nn.Module]]:
    for parent in module.modules():
        for name, child in parent.named_children():
            yield parent, name, child


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

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """float32 [..., size], both ways."""
        result: torch.Tensor = self._rms_norm(x, self.weight, self._eps)
        return result


def fused_norm(module: nn.Module, operators: CpuOperators) -> FusedNorm | None:
    """An equal RMSNorm, or None. Some architectures keep the weight minus one."""
    parameters = dict(module.named_parameters())
    eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    if list(parameters) != ["weight"] or parameters["weight"].dim() != 1 or not isinstance(eps, float):
        return None
    weight = parameters["weight"].detach()
    x = _trial(weight.shape[0])
    for candidate in (weight, 1 + weight):
        fused = FusedNorm(candidate, eps, operators)
        if _equal(partial(module, x), partial(fused, x)):
            return fused
    return None


class FusedMlp(nn.Module):
    """down(activation(gate(x)) * up(x)), with gate and up as one matrix.

    Args:
        gate_up: Both layers, one below the other.
        down: The last layer.
        gate: The operator that multiplies.
    """

    def __init__(self, gate_up: nn.Linear, down: nn.Linear, gate: Any) -> None:
        super().__init__()
        self.gate_up_proj = gate_up
        self.down_proj = down
        self._gate = gate

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """float32 [..., hidden_size], both ways."""
        result: torch.Tensor = self.down_proj(self._gate(self.gate_up_proj(x)))
        return result


def fused_mlp(module: nn.Module, operators: CpuOperators) -> FusedMlp | None:
    """An equal gated feed-forward layer, or None."""
    layers = _linears(module, ("gate_proj", "up_proj", "down_proj"))
    if layers is None or len(dict(module.named_children())) > 4 or _own_parameters(module):
        return None
    gate, up, down = layers
    if (merged := merge_linear([gate, up])) is None or gate.out_features != up.out_features:
        return None
    x = _trial(gate.in_features)
    for operator in (operators.gate_silu, operators.gate_gelu_tanh):
        fused = FusedMlp(merged, down, operator)
        if _equal(partial(module, x), partial(fused, x)):
            return fused
    return None


class FusedAttention(nn.Module):
    """Rotary attention whose queries, keys and values come from one matrix.

    Args:
        qkv: The three layers, one below the other.
        out: The last layer.
        layer: Index of the layer.
        trial: What the module that is replaced asked of attention.
        operators: The C++ operators.
    """

    def __init__(
        self, qkv: nn.Linear, out: nn.Linear, layer: int, trial: "_Recorder", operators: CpuOperators
    ) -> None:
        super().__init__()
        self.qkv_proj = qkv
        self.o_proj = out
        self.layer_idx = layer
        self._options = trial.options[0]
        self._num_heads, self._num_kv_heads = trial.query.shape[1], trial.key.shape[1]
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


@dataclass(slots=True)
class _Recorder:
    """Stands in for AttentionMetadata in a trial: notes what a layer asks, and answers with its values."""

    seen: list[torch.Tensor] = field(default_factory=list)
    options: list[LayerOptions] = field(default_factory=list)

    @property
    def query(self) -> torch.Tensor:
        return self.seen[0]

    @property
    def key(self) -> torch.Tensor:
        return self.seen[1]

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, options: LayerOptions
    ) -> torch.Tensor:
        """Half of each head's values; any function of the right shape would do."""
        self.seen = [query, key, value]
        self.options.append(options)
        return value.transpose(1, 2).repeat_interleave(query.shape[1] // key.shape[1], dim=2) * 0.5


def fused_attention(module: nn.Module, operators: CpuOperators) -> FusedAttention | None:
    """An equal attention layer, or None: with norms on its queries, other rotary positions and so on."""
    layers = _linears(module, ("q_proj", "k_proj", "v_proj", "o_proj"))
    if layers is None or len(dict(module.named_children())) > len(layers) or _own_parameters(module):
        return None
    if (merged := merge_linear(layers[:3])) is None:
        return None
    dim = getattr(module, "head_dim", None)
    layer = getattr(module, "layer_idx", None)
    if not isinstance(dim, int) or not isinstance(layer, int):
        return None
    if layers[1].out_features != layers[2].out_features:
        return None
    x, angles = _trial(layers[0].in_features)[None], _trial(dim)[None]
    positions = (angles.cos(), angles.sin())
    recorders = _Recorder(), _Recorder()

    def original() -> torch.Tensor:
        return _run(module, x, positions, recorders[0])

    def ours() -> torch.Tensor:
        fused = FusedAttention(merged, layers[3], layer, recorders[0], operators)
        return _run(fused, x, positions, recorders[1])

    if not _equal(original, ours) or len(recorders[0].options) != 1:
        return None
    if not all(map(_close, recorders[1].seen, recorders[0].seen)):
        return None
    return FusedAttention(merged, layers[3], layer, recorders[0], operators)


def _run(
    module: nn.Module, x: torch.Tensor, positions: tuple[torch.Tensor, torch.Tensor], recorder: _Recorder
) -> torch.Tensor:
    result: torch.Tensor = module(
        hidden_states=x,
        position_embeddings=positions,
        attention_mask=None,
        # Far apart, so that a layer that uses them for more than the rotation shows it.
        position_ids=torch.tensor([[0, 9000, 400_000]]),
        outrider=recorder,
    )[0]
    return result


def merge_linear(layers: Sequence[nn.Linear]) -> nn.Linear | None:
    """Layers that read the same input as one; None if their inputs differ in size."""
    if len({layer.in_features for layer in layers}) > 1:
        return None
    biases = [layer.bias for layer in layers]
    has_bias = any(bias is not None for bias in biases)
    merged = nn.Linear(1, 1, bias=has_bias)
    merged.in_features, merged.out_features = (
        layers[0].in_features,
        sum(layer.out_features for layer in layers),
    )
    merged.weight = nn.Parameter(torch.cat([layer.weight.detach() for layer in layers]), requires_grad=False)
    if has_bias:
        parts = [
            torch.zeros(layer.out_features) if layer.bias is None else layer.bias.detach() for layer in layers
        ]
        merged.bias = nn.Parameter(torch.cat(parts), requires_grad=False)
    return merged


def _linears(module: nn.Module, names: Sequence[str]) -> list[nn.Linear] | None:
    children = dict(module.named_children())
    layers = [child for name in names if type(child := children.get(name)) is nn.Linear]
    return layers if len(layers) == len(names) else None


def _own_parameters(module: nn.Module) -> bool:
    """Whether a module has weights besides its children's: a trial might not show what they do."""
    return any(True for _ in module.parameters(recurse=False))


def _trial(size: int) -> torch.Tensor:
    """Rows of very different sizes."""
    generator = torch.Generator().manual_seed(size)
    return torch.randn(_TRIAL_ROWS, size, generator=generator) * torch.tensor([[0.01], [1.0], [8.0]])


def _close(ours: torch.Tensor, theirs: torch.Tensor) -> bool:
    if ours.shape != theirs.shape:
        return False
    per_row = theirs.abs().amax(dim=-1, keepdim=True)
    return bool(((ours - theirs).abs() <= _TOLERANCE * per_row + 1e-12).all())


def _equal(original: Callable[[], torch.Tensor], ours: Callable[[], torch.Tensor]) -> bool:
    """Whether both give the same. A module that cannot be called like this is none of ours."""
    with torch.inference_mode():
        try:
            expected = original()
        except (TypeError, RuntimeError, AttributeError, ValueError):
            return False
        return _close(ours(), expected)
