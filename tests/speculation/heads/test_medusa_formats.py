"""Medusa heads in every format compute what the formula says."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.speculation.heads.medusa_reading import read_medusa_heads
from tests.speculation.heads.checkpoints import write
from tests.speculation.heads.reference import Weights, reference_medusa
from tests.speculation.heads.running import TARGET

_GENERATOR = torch.Generator().manual_seed(3)
HIDDEN = torch.randn(16, generator=_GENERATOR)
LM_HEAD = torch.randn(40, 16, generator=_GENERATOR) / 4
IDS = torch.tensor([7, 2, 39, 11, 0, 23])


def blocks(num_heads: int, num_layers: int, *, bias: bool = True) -> Weights:
    """Residual blocks by their authors' names."""
    generator = torch.Generator().manual_seed(num_heads)
    tensors = {}
    for head in range(num_heads):
        for layer in range(num_layers):
            name = f"{head}.{layer}.linear"
            tensors[f"{name}.weight"] = torch.randn(16, 16, generator=generator) / 4
            if bias:
                tensors[f"{name}.bias"] = torch.randn(16, generator=generator)
    return tensors


def outputs(num_heads: int, rows: int = 40) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(rows)
    return [torch.randn(rows, 16, generator=generator) / 4 for _ in range(num_heads)]


def vllm_names(tensors: Weights) -> Weights:
    renamed = {}
    for name, tensor in tensors.items():
        head, layer, _, kind = name.split(".")
        renamed[f"blocks.{head}.layers.{layer}.{kind}"] = tensor
    return renamed


@dataclass(frozen=True)
class Case:
    tensors: Weights
    weights: Weights
    lm_heads: list[torch.Tensor]
    num_layers: int = 1
    config: dict[str, Any] | None = None
    file: str = "medusa_lm_head.safetensors"
    ids: torch.Tensor | None = None


def _separate(num_heads: int, num_layers: int, **more: Any) -> Case:
    weights, heads = blocks(num_heads, num_layers), outputs(num_heads)
    tensors = weights | {f"{i}.{num_layers}.weight": each for i, each in enumerate(heads)}
    return Case(tensors, weights, heads, num_layers, **more)


def _medusa2() -> Case:
    """A whole model: its own tensors stand beside the heads'."""
    case = _separate(2, 1)
    tensors = {f"medusa_head.{name}": tensor for name, tensor in case.tensors.items()}
    base = {"model.embed_tokens.weight": torch.zeros(40, 16), "lm_head.weight": torch.zeros(40, 16)}
    config = {"model_type": "llama", "hidden_size": 16, "num_hidden_layers": 8}
    return Case(base | tensors, case.weights, case.lm_heads, config=config, file="model.safetensors")


def _vllm(prefix: str = "", *, bias: bool = False, picks: bool = False, shared: bool = False) -> Case:
    weights = blocks(3, 1, bias=bias)
    heads = outputs(1 if shared else 3, 40 if picks or shared else 6)
    tensors = vllm_names(weights) | {f"lm_heads.{i}.weight": each for i, each in enumerate(heads)}
    config: dict[str, Any] = {"model_type": "medusa", "num_heads": 3, "num_hidden_layers": 1}
    config |= {"original_lm_head": shared, "medusa_fc_bias": bias, "vocab_size": 40}
    if not shared:
        tensors["token_map"] = IDS
        config["truncated_vocab_size"] = 6
    scored = [each[IDS] for each in heads] if picks else heads * 3 if shared else heads
    return Case(
        {f"{prefix}{name}": tensor for name, tensor in tensors.items()},
        weights,
        scored,
        config=config,
        file="model.safetensors",
        ids=None if shared else IDS,
    )


CASES = {
    "separate heads": _separate(5, 1),
    "as .pt, with a config of two": _separate(5, 1, file="medusa_lm_head.pt", config={"medusa_num_heads": 2}),
    "two blocks": _separate(2, 2),
    "medusa 2": _medusa2(),
    "target's lm_head": Case(blocks(3, 1), blocks(3, 1), [LM_HEAD] * 3, config={"version": "2"}),
    "target's lm_head, two blocks": Case(blocks(3, 2), blocks(3, 2), [LM_HEAD] * 3, 2),
    "vllm": _vllm(),
    "vllm with bias and prefix": _vllm("medusa_heads.", bias=True),
    "vllm, whole lm_heads": _vllm(picks=True),
    "vllm, one lm_head": _vllm(shared=True),
}


@pytest.mark.parametrize("name", CASES)
def test_heads_compute_what_the_formula_says(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    heads = read_medusa_heads(write(tmp_path, case.config or {}, case.tensors, case.file), TARGET)
    scores = heads(torch.stack([HIDDEN, -HIDDEN])[None], lambda x: x @ LM_HEAD.T)
    assert scores.shape[:3] == (len(case.lm_heads), 1, 2)
    for place, hidden in enumerate((HIDDEN, -HIDDEN)):
        expected = reference_medusa(case.weights, case.num_layers, hidden, case.lm_heads).float()
        torch.testing.assert_close(scores[:, 0, place], expected, atol=1e-4, rtol=1e-4)
    if case.ids is None:
        assert heads.draft_to_target is None
    else:
        assert heads.draft_to_target is not None
        assert heads.draft_to_target.tolist() == case.ids.tolist()


def test_a_tree_comes_with_the_heads(tmp_path: Path) -> None:
    case = CASES["separate heads"]
    folder = write(tmp_path, {"medusa_choices": [[0, 0], [1], [0]]}, case.tensors, case.file)
    assert read_medusa_heads(folder, TARGET).config.choices == ((0,), (1,), (0, 0))
