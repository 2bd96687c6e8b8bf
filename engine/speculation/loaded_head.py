"""Draft heads ready to run beside their target: on its device, their weights held as its weights are."""

import logging
from dataclasses import dataclass
from typing import cast

import torch
from torch import nn

from engine.config import DType, ModelConfig
from engine.head_config import EagleSpeculation, MedusaSpeculation
from engine.model.fusion import fuse_layers
from engine.model.hidden_states import HiddenSelection
from engine.model.kv_cache import LayerShape
from engine.model.loaded_model import LoadedModel
from engine.model.packing import pack_linear_layers
from engine.model.weight_type import plan_weights
from engine.speculation.heads.config import Features
from engine.speculation.heads.eagle import EagleHead
from engine.speculation.heads.eagle_reading import read_eagle_head
from engine.speculation.heads.finding import find_head, head_hub
from engine.speculation.heads.medusa import MedusaHeads
from engine.speculation.heads.medusa_reading import read_medusa_heads
from engine.speculation.heads.shipped import SHIPPED, shipped_head
from engine.speculation.heads.target import TargetShape

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LoadedEagle:
    """An EAGLE head.

    Attributes:
        name: What it was asked for by.
        head: In evaluation mode.
        dtype: Type of its activations.
        max_model_len: Tokens that it can follow: as many as the target, its positions being relative.
    """

    name: str
    head: EagleHead
    dtype: torch.dtype
    max_model_len: int

    @property
    def layers(self) -> tuple[LayerShape, ...]:
        """Cache shape of each layer."""
        config = self.head.config
        shape = LayerShape(config.num_kv_heads, config.head_dim, config.head_dim)
        return (shape,) * config.num_layers

    @property
    def hidden_states(self) -> HiddenSelection:
        """What it reads of the target."""
        return selection_of(self.head.config.features)

    @property
    def numbers_per_block(self) -> int:
        """Kept for each block of the pool: the feature of its last position."""
        return self.head.config.num_features * self.head.config.target_hidden_size


@dataclass(frozen=True, slots=True)
class LoadedMedusa:
    """Medusa heads.

    Attributes:
        name: What they were asked for by.
        heads: In evaluation mode.
        dtype: Type of their activations.
        max_model_len: Tokens that they can follow: as many as the target, since they see no positions.
    """

    name: str
    heads: MedusaHeads
    dtype: torch.dtype
    max_model_len: int

    layers: tuple[LayerShape, ...] = ()
    numbers_per_block: int = 0


LoadedHead = LoadedEagle | LoadedMedusa


def load_head(
    speculation: EagleSpeculation | MedusaSpeculation, target: LoadedModel, config: ModelConfig
) -> LoadedHead:
    """Finds and reads the head that the settings name, and checks that it fits the target.

    Args:
        speculation: Which head.
        target: The model that it drafts for.
        config: The target's settings; cache folder and network hold for the head as well.

    Raises:
        ModelNotFound: There is no such head.
        ModelNotSupported: It is of another kind, or for another target.
        StartupError: It is damaged.
    """
    hub = head_hub(config.cache_dir and config.cache_dir / "hub", offline=config.offline)
    shape = TargetShape.of(target.module.config)
    if speculation.head == SHIPPED:
        folder = shipped_head(speculation.method, shape)
    else:
        folder = find_head(speculation.head, hub, speculation.head_revision)
    match speculation:
        case EagleSpeculation(layer_convention=convention):
            wanted = None if convention == "auto" else convention
            eagle = read_eagle_head(folder, shape, convention=wanted, dtype=target.dtype)
            return wrap_eagle(eagle, target, name=speculation.head)
        case MedusaSpeculation():
            medusa = read_medusa_heads(folder, shape, dtype=target.dtype)
            return wrap_medusa(medusa, target, name=speculation.head)


def wrap_eagle(head: EagleHead, target: LoadedModel, *, name: str) -> LoadedEagle:
    """Makes a head in memory, of the target's type, ready to run beside the target, in place."""
    _prepare(head, target)
    return LoadedEagle(name, head, target.dtype, target.max_model_len)


def wrap_medusa(heads: MedusaHeads, target: LoadedModel, *, name: str) -> LoadedMedusa:
    """Makes heads in memory, of the target's type, ready to run beside the target, in place."""
    _prepare(heads, target)
    return LoadedMedusa(name, heads, target.dtype, target.max_model_len)


def selection_of(features: Features) -> HiddenSelection:
    """What to tap of the target for a head's features."""
    return HiddenSelection(last=True) if features == "last" else HiddenSelection(features)


def _prepare(head: nn.Module, target: LoadedModel) -> None:
    head.to(target.device).eval().requires_grad_(False)
    if target.device.type != "cpu":
        return
    if target.operators is not None:
        fuse_layers(head, target.operators)
    packer = plan_weights(cast("DType", target.weights), target.device, target.operators).packer
    if packer is not None:
        pack_linear_layers(head, packer)
