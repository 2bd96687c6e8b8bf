"""Replaces parts of a model's layers by equal ones that take a few operators instead of dozens.

Most of a small model's step is the calling of small operators. Norms, gated feed-forward layers and rotary
attention have the same formula in nearly all architectures that follow Llama, under many class names. A part
is replaced where its children say that it might be one, and a trial with random input says that it is.
"""

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import nn

from engine.model.attention.interface import LayerOptions
from engine.model.cpu_ops.build import CpuOperators
from engine.model.fused_layers import (
    Activation,
    AttentionSettings,
    FusedAttention,
    FusedMlp,
    FusedNorm,
    MlpSettings,
    NormSettings,
    Settings,
)
from engine.model.merging import GATE_UP, QKV, find_linears, merge_linear

logger = logging.getLogger(__name__)

_TRIAL_ROWS = 3
_TOLERANCE = 1e-4
"""Largest difference relative to a row's largest result: other orders of summation make 1e-6."""


@dataclass(frozen=True, slots=True)
class FusedPart:
    """A part of a model that was replaced.

    Attributes:
        path: Its name in the model.
        settings: Of the layer that replaced it.
    """

    path: str
    settings: Settings


def fuse_layers(module: nn.Module, operators: CpuOperators) -> tuple[FusedPart, ...]:
    """Replaces what can be, in place.

    Args:
        module: A float32 model on a CPU with its plain weights.
        operators: The C++ operators.
    """
    # By name: a list of the layers would keep the replaced ones and their weights until the end.
    parts = fuse_paths(module, [path for path, _ in module.named_modules() if path], operators)
    log_fused(parts)
    return parts


def fuse_paths(module: nn.Module, paths: Sequence[str], operators: CpuOperators) -> tuple[FusedPart, ...]:
    """Does what `fuse_layers` does to some parts of a model, whose weights alone have to be there.

    Args:
        module: The model.
        paths: Names of parts that may be replaced, each before its own parts.
        operators: The C++ operators.
    """
    parts: list[FusedPart] = []
    for path in paths:
        if any(path.startswith(f"{part.path}.") for part in parts):
            continue
        child = module.get_submodule(path)
        for make in (fused_norm, fused_mlp, fused_attention):
            if (fused := make(child, operators)) is not None:
                module.set_submodule(path, fused)
                parts.append(FusedPart(path, fused.settings))
                break
    return tuple(parts)


def log_fused(parts: Sequence[FusedPart]) -> None:
    """Says how many parts of each kind were replaced."""
    counts = Counter(part.settings.kind for part in parts)
    logger.info("fused layers: %s", ", ".join(f"{n} {kind}" for kind, n in counts.items()) or "none")


def restore_fused_layers(module: nn.Module, parts: Sequence[FusedPart], operators: CpuOperators) -> None:
    """Replaces the parts that `fuse_layers` replaced in an equal model; no trial is made.

    Args:
        module: A model as transformers builds it; its weights may lie on the meta device.
        parts: What was replaced.
        operators: The C++ operators.
    """
    for part in parts:
        fused = _rebuilt(module.get_submodule(part.path), part.settings, operators)
        module.set_submodule(part.path, fused)


def _rebuilt(child: nn.Module, settings: Settings, operators: CpuOperators) -> nn.Module:
    match settings:
        case NormSettings(eps=eps):
            return FusedNorm(child.get_parameter("weight").detach(), eps, operators)
        case MlpSettings(activation=activation):
            *pair, down = _found(child, (*GATE_UP, "down_proj"))
            return FusedMlp(_merged(pair), down, activation, operators)
        case AttentionSettings():
            *three, out = _found(child, (*QKV, "o_proj"))
            return FusedAttention(_merged(three), out, settings, operators)


def _found(child: nn.Module, names: Sequence[str]) -> list[nn.Linear]:
    layers = find_linears(child, names)
    assert layers is not None, "the part was fused before"
    return layers


def _merged(layers: Sequence[nn.Linear]) -> nn.Linear:
    merged = merge_linear(layers)
    assert merged is not None, "the layers were merged before"
    return merged


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


def fused_mlp(module: nn.Module, operators: CpuOperators) -> FusedMlp | None:
    """An equal gated feed-forward layer, or None."""
    layers = find_linears(module, (*GATE_UP, "down_proj"))
    if layers is None or len(dict(module.named_children())) > 4 or _own_parameters(module):
        return None
    gate, up, down = layers
    if (merged := merge_linear([gate, up])) is None or gate.out_features != up.out_features:
        return None
    x = _trial(gate.in_features)
    activations: tuple[Activation, ...] = ("silu", "gelu_tanh")
    for activation in activations:
        fused = FusedMlp(merged, down, activation, operators)
        if _equal(partial(module, x), partial(fused, x)):
            return fused
    return None


@dataclass(slots=True)
class _Recorder:
    """Stands in for AttentionMetadata in a trial: notes what a layer asks, and answers with its values."""

    seen: list[torch.Tensor] = field(default_factory=list)
    options: list[LayerOptions] = field(default_factory=list)

    def settings(self, layer: int) -> AttentionSettings:
        """What the layer asked, once it has."""
        query, key, _ = self.seen
        [asked] = self.options
        return AttentionSettings(
            layer, query.shape[1], key.shape[1], asked.scale, asked.window, asked.softcap
        )

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, options: LayerOptions
    ) -> torch.Tensor:
        """Half of each head's values; any function of the right shape would do."""
        self.seen = [query, key, value]
        self.options.append(options)
        return value.transpose(1, 2).repeat_interleave(query.shape[1] // key.shape[1], dim=2) * 0.5


def fused_attention(module: nn.Module, operators: CpuOperators) -> FusedAttention | None:
    """An equal attention layer, or None: with norms on its queries, other rotary positions and so on."""
    layers = find_linears(module, (*QKV, "o_proj"))
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
    theirs, ours = _Recorder(), _Recorder()
    expected = _attempt(partial(_run, module, x, positions, theirs))
    if expected is None or len(theirs.options) != 1 or theirs.options[0].sinks is not None:
        return None
    fused = FusedAttention(merged, layers[3], theirs.settings(layer), operators)
    result = _attempt(partial(_run, fused, x, positions, ours))
    if result is None or not _close(result, expected) or not all(map(_close, ours.seen, theirs.seen)):
        return None
    return fused


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
    if (expected := _attempt(original)) is None:
        return False
    with torch.inference_mode():
        return _close(ours(), expected)


def _attempt(module: Callable[[], torch.Tensor]) -> torch.Tensor | None:
    """What a module of unknown manners gives; None if it cannot be called like this."""
    with torch.inference_mode():
        try:
            return module()
        except (TypeError, RuntimeError, AttributeError, ValueError):
            return None
