"""What is written a tensor at a time is what transformers reads of a file as a whole."""

import logging
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from engine.errors import StartupError
from engine.model.checkpoint import Checkpoint
from engine.model.gguf import convert_gguf
from engine.model.gguf_file import GgufFile
from tests.model.gguf_files import NUM_PADDED, source_model, write_gguf, write_model

COMMON: dict[str, Any] = {
    "vocab_size": NUM_PADDED,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 512,
}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", COMMON),
    "qwen2": ("qwen2", COMMON),
    # What transformers leaves in a file's metadata has to be as it is by default.
    "qwen3": ("qwen3", {**COMMON, "head_dim": 128}),
    "gemma2": ("gemma2", COMMON),
    "gemma3": ("gemma3_text", COMMON),
    "phi3": ("phi3", {**COMMON, "pad_token_id": None}),
    "gpt2": ("gpt2", {"vocab_size": NUM_PADDED, "n_embd": 32, "n_layer": 2, "n_head": 4}),
    "qwen2moe": ("qwen2_moe", {**COMMON, "num_experts": 2, "num_experts_per_tok": 2}),
    "qwen3moe": ("qwen3_moe", {**COMMON, "num_experts": 2, "num_experts_per_tok": 2}),
}


def gguf_model(arch: str) -> PreTrainedModel:
    """A tiny model of an architecture, as GGUF files call it, norms and biases random as well."""
    kind, settings = MODELS[arch]
    module: PreTrainedModel = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(kind, **settings), dtype=torch.float32
    )
    generator = torch.Generator().manual_seed(1)
    for weight in module.parameters():
        weight.data.normal_(generator=generator)
    return module.requires_grad_(False)


def as_before(file: Path) -> dict[str, torch.Tensor]:
    """A file's weights as transformers reads them, each in the type that it is to be stored in."""
    module = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
    exact = {GGMLQuantizationType.F32, GGMLQuantizationType.F16, GGMLQuantizationType.BF16}
    quantised = any(tensor.kind not in exact for tensor in GgufFile(file).tensors.values())

    def narrowed(weight: torch.Tensor) -> torch.Tensor:
        for dtype in (torch.bfloat16, torch.float16):
            if weight.to(dtype).float().equal(weight):
                return weight.to(dtype)
        fits = bool(weight.abs().max() <= 65504)
        return weight.half() if quantised and weight.ndim > 1 and fits else weight

    tied = module.all_tied_weights_keys
    return {name: narrowed(weight) for name, weight in module.state_dict().items() if name not in tied}


def convert(file: Path, folder: Path) -> dict[str, torch.Tensor]:
    folder.mkdir()
    convert_gguf(file, folder)
    checkpoint = Checkpoint(folder)
    return {name: checkpoint.read(name) for name in checkpoint.weights}


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, weight in expected.items():
        assert (name, found[name].dtype, found[name].shape) == (name, weight.dtype, weight.shape)
        assert torch.equal(bits(found[name]), bits(weight)), name


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"])
def test_every_type_of_storage(kind: str, tmp_path: Path) -> None:
    file = write_model(tmp_path / "model.gguf", "llama", gguf_model("llama"), GGMLQuantizationType[kind])
    found = convert(file, tmp_path / "folder")
    assert_same(found, as_before(file))
    stored = {"F32": torch.float32, "BF16": torch.bfloat16}.get(kind, torch.float16)
    assert {weight.dtype for weight in found.values() if weight.ndim > 1} == {stored}
    assert {weight.dtype for weight in found.values() if weight.ndim == 1} == {torch.float32}


@pytest.mark.parametrize(
    "arch", ["qwen2", "qwen3", "gemma2", "gemma3", "phi3", "gpt2", "qwen2moe", "qwen3moe"]
)
def test_what_transformers_does_for_an_architecture(arch: str, tmp_path: Path) -> None:
    file = write_model(tmp_path / "model.gguf", arch, gguf_model(arch), GGMLQuantizationType.Q8_0)
    assert_same(convert(file, tmp_path / "folder"), as_before(file))


def test_a_matrix_beyond_float16_stays_as_it_is(tmp_path: Path) -> None:
    module = gguf_model("qwen2")
    module.model.layers[0].mlp.up_proj.weight.data *= 1e5
    file = write_model(tmp_path / "model.gguf", "qwen2", module, GGMLQuantizationType.Q8_0)
    found = convert(file, tmp_path / "folder")
    assert_same(found, as_before(file))
    assert found["model.layers.0.mlp.up_proj.weight"].dtype == torch.float32


def test_large_models_are_written_in_shards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = write_model(tmp_path / "model.gguf", "llama", gguf_model("llama"))
    whole = convert(file, tmp_path / "whole")
    assert load_file(tmp_path / "whole" / "model.safetensors").keys() == whole.keys()
    monkeypatch.setattr("engine.model.gguf_weights._SHARD_BYTES", 20000)
    assert_same(convert(file, tmp_path / "shards"), whole)
    shards = sorted(path.name for path in (tmp_path / "shards").glob("*.safetensors"))
    assert len(shards) > 3
    assert shards[0] == f"model-00001-of-{len(shards):05}.safetensors"
    module = AutoModelForCausalLM.from_pretrained(tmp_path / "shards", dtype=torch.float32)
    assert_same({name: weight for name, weight in module.state_dict().items() if name in whole}, whole)


def test_one_tensor_at_a_time_is_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = write_model(tmp_path / "model.gguf", "llama", gguf_model("llama"), GGMLQuantizationType.Q8_0)
    read, alive = GgufFile.read, list[weakref.ref[np.ndarray]]()

    def watched(self: GgufFile, name: str) -> np.ndarray:
        assert [one for one in alive if one() is not None] == []
        array = read(self, name)
        if array.ndim > 1:
            alive.append(weakref.ref(array))
        return array

    monkeypatch.setattr(GgufFile, "read", watched)
    convert(file, tmp_path / "folder")
    assert len(alive) > 10


def test_it_says_how_far_it_is(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = write_gguf(tmp_path / "model.gguf")
    with caplog.at_level(logging.INFO):
        convert(file, tmp_path / "folder")
    total = len(source_model("llama").state_dict())
    assert f"converted {total} of {total} tensors" in caplog.text
    assert caplog.text.count(" tensors") == 10


def test_a_weight_of_another_shape_is_refused(tmp_path: Path) -> None:
    module = gguf_model("qwen2")
    module.model.layers[1].mlp.up_proj = torch.nn.Linear(32, 96, bias=False, dtype=torch.float32)
    module.requires_grad_(False)
    file = write_model(tmp_path / "model.gguf", "qwen2", module)
    with pytest.raises(StartupError, match=r"layers\.1\.mlp\.up_proj\.weight in the shape \(96, 32\)"):
        convert(file, tmp_path / "folder")


def test_a_type_of_storage_that_is_not_known_is_refused(tmp_path: Path) -> None:
    file = write_model(tmp_path / "model.gguf", "qwen2", gguf_model("qwen2"), GGMLQuantizationType.F16)
    data = file.read_bytes()
    name = b"blk.0.ffn_up.weight"
    place = data.index(name) + len(name) + 4 + 2 * 8
    assert data[place] == GGMLQuantizationType.F16
    file.write_bytes(data[:place] + bytes([GGMLQuantizationType.I16]) + data[place + 1 :])
    with pytest.raises(StartupError, match=r"its tensor blk\.0\.ffn_up\.weight is stored as I16"):
        convert(file, tmp_path / "folder")
