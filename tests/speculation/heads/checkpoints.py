"""Writes checkpoints as their authors do: names and configs are spelled out, not taken from the engine."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from tests.speculation.heads.reference import Parts, Weights, random_weights

DRAFT_IDS = torch.tensor([1, 2, 3, 5, 8, 13, 21, 22, 30, 33, 38, 39])
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}


@dataclass(frozen=True)
class Case:
    """A head as a format spells it.

    Attributes:
        parts: What it consists of, for the reference.
        config: What config.json has beside or instead of the sizes.
        spelling: (prefix in vLLM's names, prefix in this format).
        extra: Tensors beside the weights.
        ids: What the draft's ids mean, None for the target's.
        file: The weights' file.
        states: Hidden states of the target that it should read.
    """

    parts: Parts = field(default_factory=Parts)
    config: dict[str, Any] = field(default_factory=dict)
    spelling: tuple[tuple[str, str], ...] = ()
    extra: Weights = field(default_factory=dict)
    ids: torch.Tensor | None = None
    file: str = "model.safetensors"
    states: object = (2, 4, 5)

    def weights(self) -> Weights:
        """The weights by vLLM's names."""
        return random_weights(self.parts)

    def save(self, folder: Path) -> Path:
        """Writes the checkpoint."""
        tensors = {self.spelled(name): tensor for name, tensor in self.weights().items()} | self.extra
        return write(folder, self.config, tensors, self.file)

    def spelled(self, name: str) -> str:
        for ours, theirs in self.spelling:
            if name.startswith(ours):
                return theirs + name[len(ours) :]
        return name


def write(folder: Path, config: dict[str, Any], tensors: Weights, file: str = "model.safetensors") -> Path:
    """A folder with config.json and weights."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    if file.endswith(".safetensors"):
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / file)
    else:
        torch.save(tensors, folder / file)
    return folder


def sizes(parts: Parts, **more: Any) -> dict[str, Any]:
    """What a Llama config says of a layer."""
    return {
        "model_type": "llama",
        "hidden_size": parts.width,
        "num_hidden_layers": parts.num_layers,
        "num_attention_heads": parts.num_heads,
        "num_key_value_heads": parts.num_kv_heads,
        "head_dim": parts.head_dim,
        "intermediate_size": parts.inner,
        "vocab_size": parts.vocab,
        "rms_norm_eps": parts.eps,
        "max_position_embeddings": 2048,
        **more,
    }


def vocabulary() -> Weights:
    """EAGLE-3's two tensors of a draft vocabulary."""
    drafted = torch.zeros(40, dtype=torch.bool)
    drafted[DRAFT_IDS] = True
    return {"d2t": DRAFT_IDS - torch.arange(12), "t2d": drafted}


def eagle3(*, spelling: tuple[tuple[str, str], ...] = (("layers.0.", "midlayer."),), **parts: Any) -> Case:
    """An EAGLE-3 head in its authors' layout, with a draft vocabulary of 12."""
    made = Parts(**parts)
    return Case(
        parts=made,
        config=sizes(made, draft_vocab_size=12, architectures=["LlamaForCausalLMEagle3"]),
        spelling=spelling,
        extra=vocabulary(),
        ids=DRAFT_IDS,
    )


def speculators(layer: dict[str, Any] | None = None, **parts: Any) -> Case:
    """An EAGLE-3 head in the speculators format."""
    made = Parts(**parts)
    config = {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "speculators_version": "0.9.0",
        "draft_vocab_size": 12,
        "transformer_layer_config": {**sizes(made), **(layer or {})},
        "speculators_config": {"algorithm": "eagle3", "verifier": {"name_or_path": "x"}},
    }
    return Case(parts=made, config=config, extra=vocabulary(), ids=DRAFT_IDS)


def eagle1(*, spelling: tuple[tuple[str, str], ...] = (), **parts: Any) -> Case:
    """An EAGLE-1 head in its authors' layout, with the copy of the target's embedding that they add."""
    made = Parts(**{"family": "eagle", "draft_vocab": None, "num_features": 1, **parts})
    return Case(
        parts=made,
        config=sizes(made, bias=made.fc_bias),
        spelling=spelling,
        extra={"embed_tokens.weight": torch.zeros(40, 16)},
        file="pytorch_model.bin",
        states="last",
    )
