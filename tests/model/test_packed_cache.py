"""A packed model comes out of the cache as it went in, and whatever is wrong there costs time alone."""

import errno
import json
import logging
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from engine.config import ModelConfig
from engine.model import loader, packed_cache
from engine.model.attention.choice import choose_backend
from engine.model.input_batch import SequenceSlice
from engine.model.kv_cache import PagedKVCache
from engine.model.linear import packed_fp16_unavailable
from engine.model.loaded_model import LoadedModel
from engine.model.loader import load_causal_lm
from engine.model.model_runner import ModelRunner
from engine.model.packing import NarrowEmbedding
from engine.model.tensor_file import DamagedFile, TensorFile, write_tensors
from tests.operators import need_operators, share_operators
from tests.tiny import ARCHITECTURES, byte_tokenizer, save_tiny, tiny_model

pytestmark = pytest.mark.skipif(packed_fp16_unavailable() is not None, reason="no FBGEMM on this machine")


class Machine:
    """A folder with a model, and a cache."""

    def __init__(self, path: Path, arch: str = "llama", **config: Any) -> None:
        need_operators()
        self.folder = path / "some model"
        self.cache = path / "cache"
        # As published checkpoints are, so that embeddings fit into 16 bits.
        tiny_model(arch, **config).bfloat16().save_pretrained(self.folder)
        byte_tokenizer().save_pretrained(self.folder)
        share_operators(self.cache)

    def load(self, dtype: str = "int8", **settings: object) -> LoadedModel:
        fixed = {"model": str(self.folder), "device": "cpu", "offline": True, "cache_dir": self.cache}
        return load_causal_lm(ModelConfig.model_validate({**fixed, "dtype": dtype, **settings}))

    @property
    def entries(self) -> list[str]:
        return sorted(path.name for path in (self.cache / "packed").glob("*"))

    @property
    def entry(self) -> Path:
        [name] = self.entries
        return self.cache / "packed" / name


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


@pytest.fixture
def no_plain_weights(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Forbids, once called, that the checkpoint be read."""

    def forbid() -> None:
        monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", None)
        monkeypatch.setattr(loader, "read_model", None)

    return forbid


def logits(model: LoadedModel) -> torch.Tensor:
    cache = PagedKVCache(model.layers, 2, 16, model.dtype, model.device)
    runner = ModelRunner(model.module, cache, choose_backend(model.operators, model.device), model.vocab_size)
    return runner.forward(runner.build([SequenceSlice(list(range(20)), 0, [1, 0], rows=20)]))


@pytest.mark.parametrize("dtype", ["float16", "int8"])
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_the_second_load_gives_the_same_model(
    arch: str, dtype: str, tmp_path: Path, no_plain_weights: Callable[[], None]
) -> None:
    machine = Machine(tmp_path, arch)
    first = machine.load(dtype)
    no_plain_weights()
    second = machine.load(dtype)
    assert torch.equal(logits(first), logits(second))
    assert (second.layers, second.eos_token_ids, second.vocab_size, second.weights) == (
        *(first.layers, first.eos_token_ids, first.vocab_size),
        dtype,
    )
    names = {name: type(part) for name, part in first.module.named_modules()}
    assert {name: type(part) for name, part in second.module.named_modules()} == names
    assert second.module.dtype == second.dtype == torch.float32
    assert not second.module.training
    assert not any(parameter.requires_grad for parameter in second.module.parameters())


def test_without_operators(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, no_plain_weights: Callable[[], None]
) -> None:
    with_operators = machine.load("float16")
    monkeypatch.setattr(loader, "load_operators", lambda _: None)
    first = machine.load("float16")
    no_plain_weights()
    assert torch.equal(logits(first), logits(machine.load("auto")))
    assert type(first.module.model.layers[0].mlp) is not type(with_operators.module.model.layers[0].mlp)


@pytest.mark.parametrize("tied", [False, True])
def test_biases_tied_heads_and_the_embedding(
    tied: bool, tmp_path: Path, no_plain_weights: Callable[[], None]
) -> None:
    machine = Machine(tmp_path, "qwen2", tie_word_embeddings=tied)
    first = machine.load()
    no_plain_weights()
    second = machine.load()
    assert torch.equal(logits(first), logits(second))
    for model in (first, second):
        embedding = model.module.get_input_embeddings()
        assert isinstance(embedding, NarrowEmbedding)
        assert embedding.weight.dtype == torch.bfloat16
    plain = tiny_model("qwen2", tie_word_embeddings=tied).bfloat16().get_input_embeddings()
    ids = torch.arange(259)[None]
    assert torch.equal(second.module.get_input_embeddings()(ids), plain(ids).float())


def test_types_have_entries_of_their_own_that_say_what_they_are(machine: Machine) -> None:
    machine.load("float16")
    machine.load("int8")
    assert [name.rpartition("-")[0].rpartition("-")[0] for name in machine.entries] == [
        "some-model-float16",
        "some-model-int8",
    ]
    machine.load("float32")
    assert len(machine.entries) == 2


def test_another_model_in_the_same_folder_is_packed_anew_and_the_old_one_goes(machine: Machine) -> None:
    first, entry = logits(machine.load()), machine.entry
    save_tiny(machine.folder, seed=5)
    second = logits(machine.load())
    assert not torch.equal(first, second)
    assert machine.entry != entry


def cut(entry: Path) -> None:
    tensors = entry / "tensors.bin"
    os.truncate(tensors, tensors.stat().st_size - 1)


def flip(entry: Path) -> None:
    tensors = entry / "tensors.bin"
    content = bytearray(tensors.read_bytes())
    content[len(content) // 2] ^= 1
    tensors.write_bytes(content)


def change_a_number(entry: Path) -> None:
    index = entry / "index.json"
    index.write_text(index.read_text().replace('"eps":', '"eps":1', 1))


DAMAGE: dict[str, Callable[[Path], object]] = {
    "cut": cut,
    "flipped bit": flip,
    "tensors gone": lambda entry: (entry / "tensors.bin").unlink(),
    "index gone": lambda entry: (entry / "index.json").unlink(),
    "index broken": lambda entry: (entry / "index.json").write_text('{"recipe": 1}'),
    "a number in the index": change_a_number,
    "empty": lambda entry: list(map(Path.unlink, entry.iterdir())),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_a_damaged_entry_is_made_anew(kind: str, machine: Machine, caplog: pytest.LogCaptureFixture) -> None:
    expected = logits(machine.load())
    DAMAGE[kind](machine.entry)
    assert torch.equal(logits(machine.load()), expected)
    assert "cannot be used and are made anew" in caplog.text
    caplog.clear()
    assert torch.equal(logits(machine.load()), expected)
    assert caplog.text == ""


def test_a_model_with_a_tensor_that_was_not_kept_is_made_anew(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    every = packed_cache._tensors
    monkeypatch.setattr(
        packed_cache,
        "_tensors",
        lambda *args: (entry for entry in every(*args) if "inv_freq" not in entry[0]),
    )
    expected = logits(machine.load())
    assert torch.equal(logits(machine.load()), expected)
    assert "model.rotary_emb.inv_freq is not there" in caplog.text


def test_a_model_with_code_of_its_own_is_not_kept(machine: Machine) -> None:
    config = machine.folder / "config.json"
    fields = {**json.loads(config.read_text()), "auto_map": {"AutoTokenizer": ["x.Y", None]}}
    config.write_text(json.dumps(fields))
    machine.load()
    assert machine.entries == []


def test_a_full_disk_costs_the_entry_alone(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(path: Path, tensors: object) -> None:
        path.write_bytes(b"some of it")
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("engine.model.packed_cache.write_tensors", full)
    assert logits(machine.load()).isfinite().all()
    assert "cannot be kept, so that the next start packs them again" in caplog.text
    assert "No space left" in caplog.text
    assert machine.entries == []


def test_a_cache_that_cannot_be_written(machine: Machine, caplog: pytest.LogCaptureFixture) -> None:
    (machine.cache / "packed").write_text("a file where the folder should be")
    assert logits(machine.load()).isfinite().all()
    assert "cannot be kept" in caplog.text


def test_it_can_be_cleared(machine: Machine) -> None:
    expected = logits(machine.load())
    shutil.rmtree(machine.cache / "packed")
    assert torch.equal(logits(machine.load()), expected)
    assert len(machine.entries) == 1


def test_a_load_says_where_its_weights_come_from(machine: Machine, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    machine.load()
    assert f"packed weights kept in {machine.entry}" in caplog.text
    machine.load()
    assert f"packed weights read from {machine.entry}" in caplog.text


def test_tensors_of_all_kinds_in_a_file(tmp_path: Path) -> None:
    tensors = {
        "a": torch.randn(3, 5).T,
        "b": torch.randn(7).bfloat16(),
        "scalar": torch.tensor(4),
        "none": torch.empty(0, 3),
        "bool": torch.tensor([True, False]),
    }
    index = write_tensors(tmp_path / "file", tensors.items())
    file = TensorFile(tmp_path / "file", index)
    for name, tensor in tensors.items():
        assert torch.equal(file.read(name), tensor)
        assert file.read(name).dtype == tensor.dtype
    file.close()
    with pytest.raises(DamagedFile, match="gone cannot be read"):
        TensorFile(tmp_path / "gone", index)
