"""A model that is packed part by part is the one that is packed as a whole, and is never whole in float32."""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.llama.modeling_llama import LlamaModel

from engine.config import ModelConfig
from engine.errors import ModelNotSupported, StartupError
from engine.model import int8, loader, streaming
from engine.model.checkpoint import Checkpoint
from engine.model.fusion import fuse_paths
from engine.model.linear import packed_fp16_unavailable
from engine.model.loaded_model import LoadedModel
from engine.model.loader import load_causal_lm
from engine.model.outline import NotStreamable
from engine.model.tensor_file import DamagedFile
from tests.model.test_self_check import SMALL
from tests.operators import need_operators, share_operators
from tests.tiny import ARCHITECTURES, byte_tokenizer, tiny_model

pytestmark = pytest.mark.skipif(packed_fp16_unavailable() is not None, reason="no FBGEMM on this machine")

WHOLE = "all weights are read, in float32, before the first is packed"
REARRANGED = ("mixtral", "gpt_oss", "gpt_neox")
"""Architectures whose checkpoints transformers rearranges while it reads them."""


class Machine:
    """A folder with a model, and a cache for each way to pack it."""

    def __init__(self, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        need_operators()
        self.folder = path / "model"
        self._path = path
        self._monkeypatch = monkeypatch

    def save(
        self,
        arch: str = "llama",
        dtype: torch.dtype = torch.bfloat16,
        change: Callable[[dict[str, torch.Tensor]], object] = lambda _: None,
        shard: str = "5GB",
        **config: Any,
    ) -> None:
        module = tiny_model(arch, **config)
        change(module.state_dict())
        module.to(dtype).save_pretrained(self.folder, max_shard_size=shard)
        byte_tokenizer().save_pretrained(self.folder)

    def load(self, name: str, dtype: str = "int8", **settings: object) -> LoadedModel:
        cache = self._path / name
        if not cache.exists():
            share_operators(cache)
        fixed = {"model": str(self.folder), "device": "cpu", "offline": True, "cache_dir": cache}
        return load_causal_lm(ModelConfig.model_validate({**fixed, "dtype": dtype, **settings}))

    def load_whole(self, name: str, dtype: str = "int8") -> LoadedModel:
        def refuse(*_: object) -> None:
            raise NotStreamable("the test wants it so")

        with self._monkeypatch.context() as patch:
            patch.setattr(loader, "outline", refuse)
            return self.load(name, dtype)

    def entry(self, name: str) -> tuple[bytes, bytes]:
        """What is kept: the recipe with the checksum of every tensor, and the tensors."""
        [folder] = (self._path / name / "packed").iterdir()
        return (folder / "index.json").read_bytes(), (folder / "tensors.bin").read_bytes()


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(tmp_path, monkeypatch)


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.INFO, "engine.model")
    return caplog


def check_same_bits(
    machine: Machine, log: pytest.LogCaptureFixture, dtype: str = "int8", *, streams: bool = True
) -> None:
    module = machine.load("parts", dtype).module
    assert (WHOLE in log.text) != streams
    whole = machine.load_whole("whole", dtype).module
    assert f"{WHOLE}: the test wants it so" in log.text
    assert machine.entry("parts") == machine.entry("whole")
    kinds = {name: type(part) for name, part in whole.named_modules()}
    assert {name: type(part) for name, part in module.named_modules()} == kinds
    assert not module.training
    assert not any(weight.requires_grad or weight.is_inference() for weight in module.parameters())


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_the_same_bits_as_from_a_whole_model(
    arch: str, machine: Machine, log: pytest.LogCaptureFixture
) -> None:
    machine.save(arch)
    check_same_bits(machine, log, streams=arch not in REARRANGED)


@pytest.mark.parametrize("arch", ["qwen2", "qwen3", "gemma2"])
def test_the_same_bits_in_float16(arch: str, machine: Machine, log: pytest.LogCaptureFixture) -> None:
    machine.save(arch)
    check_same_bits(machine, log, "float16")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("tied", [False, True])
def test_shards_of_other_types_and_tied_heads(
    tied: bool, dtype: torch.dtype, machine: Machine, log: pytest.LogCaptureFixture
) -> None:
    machine.save("qwen2", dtype, shard="20KB", tie_word_embeddings=tied)
    assert len(list(machine.folder.glob("model-*.safetensors"))) > 2
    check_same_bits(machine, log)


LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}


@pytest.mark.parametrize(
    ("kind", "streams", "settings"),
    [
        ("llama3", True, {**LLAMA3, "original_max_position_embeddings": 64}),
        ("yarn", True, {"factor": 4.0, "original_max_position_embeddings": 128}),
        ("dynamic", False, {"factor": 2.0}),
    ],
)
def test_tables_of_scaled_positions(
    kind: str,
    streams: bool,
    settings: dict[str, float],
    machine: Machine,
    log: pytest.LogCaptureFixture,
) -> None:
    # Dynamic ones ask for the largest position, which has no value on the meta device.
    machine.save(rope_parameters={"rope_type": kind, "rope_theta": 10000.0, **settings})
    check_same_bits(machine, log, streams=streams)


def test_without_operators(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, log: pytest.LogCaptureFixture
) -> None:
    machine.save()
    monkeypatch.setattr(loader, "load_operators", lambda _: None)
    check_same_bits(machine, log, "float16")


def test_layers_that_do_not_fit_stay_in_float32(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, log: pytest.LogCaptureFixture
) -> None:
    def change(weights: dict[str, torch.Tensor]) -> None:
        weights["model.layers.1.mlp.down_proj.weight"][3, 5] = 7e4
        weights["lm_head.weight"][200, 3] = 7e4

    machine.save(change=change)
    with pytest.raises(StartupError, match=r"float16, but the layer lm_head cannot .* largest weight is 7"):
        machine.load("strict", "float16")
    monkeypatch.setattr(loader, "load_operators", lambda _: None)
    check_same_bits(machine, log, "auto")
    for name in ("lm_head", "model.layers.1.mlp.down_proj"):
        assert log.text.count(f"layer {name} stays in float32") == 2


@pytest.mark.parametrize(
    "name", ["model.layers.1.mlp.down_proj", "lm_head", "model.layers.0.input_layernorm", "model.norm"]
)
@pytest.mark.parametrize("dtype", ["int8", "auto"])
def test_what_is_not_finite_is_named(name: str, dtype: str, machine: Machine) -> None:
    machine.save(change=lambda weights: weights[f"{name}.weight"][-1:].fill_(float("inf")))
    with pytest.raises(StartupError, match=rf"not finite: {name}\.weight has weights that .* damaged"):
        machine.load("cache", dtype)


def test_a_wrong_layer_is_found(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    def damage(module: torch.nn.Module, paths: list[str], operators: Any) -> Any:
        parts = fuse_paths(module, paths, operators)
        for part in parts:
            if part.path == "model.layers.1.post_attention_layernorm":
                module.get_submodule(part.path).get_parameter("weight").data *= 1.1
        return parts

    machine.save()
    monkeypatch.setattr(streaming, "fuse_paths", damage)
    with pytest.raises(ModelNotSupported, match="other logits on a paged cache"):
        machine.load("cache")


def test_a_model_that_attends_in_another_way_is_refused(
    machine: Machine, log: pytest.LogCaptureFixture
) -> None:
    # It adds learned scores to its mask: zeros until it is trained.
    config = AutoConfig.for_model("doge", **SMALL)
    module = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    for name, parameter in module.named_parameters():
        if name.endswith("self_attn.A"):
            parameter.data.fill_(2.0)
    module.save_pretrained(machine.folder)
    byte_tokenizer().save_pretrained(machine.folder)
    with pytest.raises(ModelNotSupported, match="other logits on a paged cache"):
        machine.load("cache")
    assert WHOLE not in log.text


def test_a_gguf_file(machine: Machine, tiny_gguf: Path, log: pytest.LogCaptureFixture) -> None:
    machine.folder = tiny_gguf
    check_same_bits(machine, log)


def bin_file(machine: Machine) -> None:
    weights = tiny_model().state_dict()
    (machine.folder / "model.safetensors").unlink()
    torch.save(weights, machine.folder / "pytorch_model.bin")


def two_heads(machine: Machine) -> None:
    file = machine.folder / "model.safetensors"
    weights = safetensors.torch.load_file(file)
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()
    safetensors.torch.save_file(weights, file, {"format": "pt"})


@pytest.mark.parametrize(
    ("change", "tied", "reason"),
    [(bin_file, False, "no safetensors files"), (two_heads, True, "both are in its checkpoint")],
)
def test_what_cannot_be_streamed_is_read_whole(
    change: Callable[[Machine], None],
    tied: bool,
    reason: str,
    machine: Machine,
    log: pytest.LogCaptureFixture,
) -> None:
    machine.save(tie_word_embeddings=tied)
    change(machine)
    machine.load("cache")
    [line] = [line for line in log.messages if line.startswith(WHOLE)]
    assert reason in line


def test_a_model_that_needs_another_layers_weights_is_read_whole(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, log: pytest.LogCaptureFixture
) -> None:
    machine.save()
    forward = LlamaModel.forward

    def forward_with_a_later_layer(
        module: LlamaModel, input_ids: torch.Tensor, inputs_embeds: None = None, **kwargs: Any
    ) -> object:
        embedded = module.embed_tokens(input_ids) + 0 * module.layers[1].input_layernorm.weight
        return forward(module, inputs_embeds=embedded, **kwargs)

    monkeypatch.setattr(LlamaModel, "forward", forward_with_a_later_layer)
    assert machine.load("cache", "float16").weights == "float16"
    assert f"{WHOLE}: it does not run with one layer at a time in memory" in log.text


def is_living(storage: StorageWeakRef) -> bool:
    return not storage.expired()  # type: ignore[no-untyped-call]


class Meter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the bytes of float32 tensors that are in memory at once."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.peak = 0
        self._living: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        # What it is given counts too: transformers reads weights in threads, which no mode sees.
        for tensor in tree_leaves((args, result)):
            if isinstance(tensor, torch.Tensor) and tensor.dtype == torch.float32 and not tensor.is_meta:
                storage = tensor.untyped_storage()
                reference = StorageWeakRef(storage)  # type: ignore[no-untyped-call]
                self._living[reference.cdata] = reference, storage.nbytes()
        self._living = {key: it for key, it in self._living.items() if is_living(it[0])}
        self.peak = max(self.peak, sum(size for _, size in self._living.values()))
        return result


def test_a_model_is_never_whole_in_float32(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    # A few rows of float32 at a time are nothing beside a real layer, but much beside a tiny one.
    monkeypatch.setattr(int8, "_PANELS_AT_A_TIME", 1)
    monkeypatch.setattr(streaming, "_ROWS_AT_A_TIME", 16)
    machine.save("qwen2", num_hidden_layers=12, layer_types=None, max_window_layers=12)
    module = tiny_model("qwen2", num_hidden_layers=12, layer_types=None, max_window_layers=12)
    layer = sum(weight.nbytes for weight in module.model.layers[0].parameters())
    head = module.lm_head.weight.nbytes
    del module
    with Meter() as parts:
        machine.load("parts")
    with Meter() as whole:
        machine.load_whole("whole")
    # The meter sees a whole model. A layer is there twice while its matrices are merged; what is left over
    # is for norms, tables of positions and what goes from layer to layer.
    assert whole.peak > 12 * layer + 2 * head
    assert parts.peak < max(2 * layer, head) + 2 * layer


def test_weights_of_all_types_in_a_file(tmp_path: Path) -> None:
    weights = {
        "a": torch.randn(5, 3),
        "b": torch.randn(7, 2).bfloat16(),
        "c": torch.randn(4).half(),
        "scalar": torch.tensor(2.5),
        "other": torch.arange(3),
    }
    safetensors.torch.save_file(weights, tmp_path / "model.safetensors")
    checkpoint = Checkpoint(tmp_path)
    for name in ("a", "b", "c", "scalar"):
        assert torch.equal(checkpoint.read(name), weights[name])
        assert checkpoint.read(name).dtype == weights[name].dtype
    assert torch.equal(checkpoint.rows("b", 2, 6), weights["b"][2:6])
    assert "other" not in checkpoint.weights


@pytest.mark.parametrize("size", [0, 20, 300])
def test_a_file_that_is_cut(size: int, tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    safetensors.torch.save_file({"a": torch.randn(64, 64)}, file)
    file.write_bytes(file.read_bytes()[:size])
    with pytest.raises(DamagedFile, match=r"can be read|ends before"):
        Checkpoint(tmp_path).read("a")
