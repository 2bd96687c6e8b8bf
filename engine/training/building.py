"""New heads for a target: their shapes, and weights to start from, the target's where it has like ones."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from engine.config import ModelConfig
from engine.model.attention.interface import register
from engine.model.hidden_states import decoder_layers
from engine.model.reading import read_config, read_model
from engine.model.sources import ModelSources
from engine.model.support import text_config
from engine.speculation.heads.config import DEFAULT_ROPE, EagleConfig, MedusaConfig, default_features
from engine.speculation.heads.eagle import EagleHead, build_eagle_head
from engine.speculation.heads.medusa import MedusaHeads
from engine.training.vocabulary import DraftVocabulary

logger = logging.getLogger(__name__)

Method = Literal["eagle3", "eagle", "medusa"]

_NEW_STD = 0.02


@dataclass(frozen=True, slots=True)
class TargetParts:
    """What of a target training needs beside its features.

    Attributes:
        config: Its config.
        layer: Weights of its last layer, by name.
        norm: Weight of its final norm; None where that does more than multiply, as Gemma's.
        embeddings: float32 [vocab_size, hidden_size], as the first layer sees them.
        output: float32 [vocab_size, hidden_size], what lm_head multiplies the last state by.
    """

    config: PreTrainedConfig
    layer: Mapping[str, torch.Tensor]
    norm: torch.Tensor | None
    embeddings: torch.Tensor
    output: torch.Tensor

    @classmethod
    def load(cls, config: ModelConfig) -> "TargetParts":
        """Reads them from the target's plain weights.

        Raises:
            StartupError: It cannot be found or read.
        """
        register()
        folder: Path = ModelSources.of(config).find(config.model, config.revision)
        return cls.of(read_model(folder, config, read_config(folder, config), torch.float32))

    @classmethod
    def of(cls, module: PreTrainedModel) -> "TargetParts":
        """Takes them from a model with plain weights."""
        config = text_config(module.config)
        _, layers = decoder_layers(module)
        layer = {name: weight.detach().float() for name, weight in layers[-1].state_dict().items()}
        embedding, output = module.get_input_embeddings(), module.get_output_embeddings()
        with torch.no_grad():
            rows = embedding(torch.arange(embedding.weight.shape[0])).float().clone()
        weight = output.weight.detach().float()
        # A divisor or factor on the logits is one on the weights as well; a soft cap changes no order.
        weight = weight * getattr(config, "logit_scale", 1.0) / getattr(config, "logits_scaling", 1.0)
        return cls(config, layer, _plain_norm(module), rows, weight)


def new_eagle(
    parts: TargetParts, family: Literal["eagle", "eagle3"], vocabulary: DraftVocabulary
) -> EagleHead:
    """An EAGLE head of one layer that starts from the target's last.

    Args:
        parts: Of the target.
        family: Which.
        vocabulary: EAGLE-3's own; EAGLE-1 has none, and uses the target's output layer.
    """
    head = build_eagle_head(_eagle_config(parts, family, len(vocabulary)))
    with torch.no_grad():
        for parameter in head.parameters():
            if parameter.dim() == 2:
                parameter.normal_(std=_NEW_STD)
        _start_layer(head, parts)
        if family == "eagle3":
            _start_eagle3(head, parts, vocabulary)
    return head


def new_medusa(parts: TargetParts, num_heads: int) -> MedusaHeads:
    """Medusa heads that start as the identity (Cai et al. 2024, section 2.1)."""
    vocab_size, size = parts.output.shape
    head = MedusaHeads(
        MedusaConfig(hidden_size=size, vocab_size=vocab_size, draft_vocab_size=None, num_heads=num_heads)
    )
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.zero_()
    return head


def _eagle_config(parts: TargetParts, family: Literal["eagle", "eagle3"], rows: int) -> EagleConfig:
    config = parts.config
    size, heads = config.hidden_size, config.num_attention_heads
    base = EagleConfig(
        family=family,
        hidden_size=size,
        target_hidden_size=size,
        vocab_size=len(parts.embeddings),
        draft_vocab_size=None,
        features="last",
        num_heads=heads,
        num_kv_heads=getattr(config, "num_key_value_heads", None) or heads,
        head_dim=getattr(config, "head_dim", None) or size // heads,
        intermediate_size=getattr(config, "intermediate_size", None) or 4 * size,
        rms_norm_eps=getattr(config, "rms_norm_eps", 1e-6),
        rope=_rope(config),
        max_positions=getattr(config, "max_position_embeddings", 2048),
    )
    if family == "eagle":
        return replace(base, fc_bias=True)
    features = default_features(config.num_hidden_layers)
    return replace(base, features=features, draft_vocab_size=rows)


def _rope(config: PreTrainedConfig) -> Mapping[str, Any]:
    """Rotary positions with the target's base, and without its scaling for long texts."""
    parameters = getattr(config, "rope_parameters", None) or {}
    theta = parameters.get("rope_theta", DEFAULT_ROPE["rope_theta"])
    return {"rope_type": "default", "rope_theta": float(theta)}


def _start_layer(head: EagleHead, parts: TargetParts) -> None:
    """Copies the weights of the target's last layer that have the name and shape of the head's.

    What attention reads of the hidden state, EAGLE-3's right half, starts as the target's too.
    """
    copied = 0
    prefix = "layers.0."
    for name, parameter in head.named_parameters():
        weight = parts.layer.get(name.removeprefix(prefix)) if name.startswith(prefix) else None
        if weight is None or parts.norm is None:
            continue
        if weight.shape == parameter.shape:
            parameter.copy_(weight)
        elif parameter.dim() == 2 and parameter.shape == (weight.shape[0], 2 * weight.shape[1]):
            parameter[:, weight.shape[1] :] = weight
            parameter[:, : weight.shape[1]] = weight
        else:
            continue
        copied += 1
    if not copied:
        logger.info("the target's layers are of another form than a head's: it starts from random weights")


def _start_eagle3(head: EagleHead, parts: TargetParts, vocabulary: DraftVocabulary) -> None:
    """The output layer starts as the target's rows, and fc hands the latest of the states through."""
    size = head.config.hidden_size
    weights = dict(head.named_parameters())
    weights["lm_head.weight"].copy_(parts.output[vocabulary.to_target])
    weights["fc.weight"][:, -size:] += torch.eye(size)
    if parts.norm is not None:
        weights["norm.weight"].copy_(parts.norm)
        weights["layers.0.hidden_norm.weight"].copy_(weights["layers.0.input_layernorm.weight"])
    rows = head.draft_to_target
    head.draft_to_target = None if rows is None else vocabulary.to_target.clone()


def _plain_norm(module: PreTrainedModel) -> torch.Tensor | None:
    """The weight of the final norm, if that is root mean square and weight and nothing else."""
    norm = getattr(module.base_model, "norm", None)
    weight = getattr(norm, "weight", None)
    if norm is None or weight is None:
        return None
    probe = torch.linspace(-1, 2, len(weight))[None]
    eps = getattr(text_config(module.config), "rms_norm_eps", 1e-6)
    with torch.no_grad():
        plain = nn.functional.rms_norm(probe, (len(weight),), weight.float(), eps)
        is_plain = torch.allclose(norm(probe).float(), plain, atol=1e-5, rtol=1e-4)
    return weight.detach().float().clone() if is_plain else None
