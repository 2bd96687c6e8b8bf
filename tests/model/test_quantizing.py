"""Quantised weights, on a CPU: what torchao makes of a tiny model, and who is told that it cannot be had."""

import importlib.util
from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from engine.config import DType, ModelConfig, Quantization
from engine.errors import StartupError
from engine.model import loader
from engine.model.attention.reference import ReferenceAttention
from engine.model.attention.tiles import SplitRules
from engine.model.input_batch import SequenceSlice
from engine.model.kv_cache import PagedKVCache
from engine.model.loader import load_causal_lm, wrap_model
from engine.model.model_runner import ModelRunner
from engine.model.quantizing import check_plain, check_quantization, move_quantized
from engine.model.weight_type import WeightPlan, unfit_weight
from tests.model.tape import TapeRecorder
from tests.tiny import save_tiny, tiny_model

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 1)
needs_torchao = pytest.mark.skipif(
    importlib.util.find_spec("torchao") is None,
    reason="torchao is not installed; it comes with the dev extra",
)
NUM_LINEARS = 14
"""Of two layers: four of attention, three of the MLP."""
SCHEMES: tuple[Quantization, ...] = ("int8", "fp8")
"""Those that torchao multiplies on a CPU, too."""


def logits_of(model: PreTrainedModel) -> torch.Tensor:
    """As the engine computes them: a prompt, then a token."""
    loaded = wrap_model(model, None, name="tiny")
    cache = PagedKVCache(loaded.layers, 4, 8, loaded.dtype, CPU)
    runner = ModelRunner(loaded.module, cache, ReferenceAttention(), loaded.vocab_size)
    passes = (SequenceSlice([5, 6, 7, 8], 0, [2, 0], rows=4), SequenceSlice([9], 4, [2, 0]))
    return torch.cat([runner.forward(runner.build([piece])) for piece in passes])


def rounding(weight: torch.Tensor, scheme: Quantization) -> torch.Tensor:
    """By how much a scheme may change each weight: half a step."""
    largest = weight.abs().amax(dim=1, keepdim=True)
    if scheme == "int8":
        return largest / 127 / 2
    # e4m3: four bits of significance; what is less than 2 ** -6 of the largest, 448, has a step of 2 ** -9.
    return torch.maximum(weight.abs() / 16, largest / 448 * 2**-10)


@needs_torchao
@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("arch", ["llama", "gemma2"])  # The second ties its output layer to its embedding.
def test_a_model_says_what_it_would_with_rounded_weights(arch: str, scheme: Quantization) -> None:
    model, rounded = tiny_model(arch), tiny_model(arch)
    plain = logits_of(tiny_model(arch))
    names = move_quantized(model, CPU, scheme)
    assert len(names) == NUM_LINEARS
    assert not any("lm_head" in name for name in names)
    for name in names:
        own, other = model.get_submodule(name).weight, rounded.get_submodule(name).weight
        assert type(own) is not nn.Parameter
        assert bool(((own.dequantize() - other).abs() <= 1.001 * rounding(other, scheme)).all())
        other.copy_(own.dequantize())
    logits = logits_of(model)
    torch.testing.assert_close(logits, logits_of(rounded), rtol=1e-4, atol=1e-4)
    assert not torch.allclose(logits, plain, atol=1e-3)


@needs_torchao
def test_only_linear_layers_are_held_otherwise(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    model = tiny_model("llama")
    before = {name: weight.clone() for name, weight in model.named_parameters()}
    names = move_quantized(model, CPU, "int8")
    after = dict(model.named_parameters())
    assert after.keys() == before.keys()
    for name, weight in before.items():
        if name.removesuffix(".weight") in names:
            assert type(after[name]) is not nn.Parameter
            assert after[name].shape == weight.shape
        else:
            assert torch.equal(after[name], weight)
    # A byte per weight, and the rows' factors.
    assert "14 of 14 linear layers are held in int8: 0.00 GiB" in caplog.text
    assert unfit_weight(model) is None
    model.get_input_embeddings().weight[3, 3] = float("nan")
    assert unfit_weight(model) == "model.embed_tokens.weight"


@needs_torchao
def test_layers_that_four_bits_do_not_fit_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of 32 weights are one group, rows of 48 are none; torchao's own packing needs a GPU."""
    from torchao import quantization

    configs = []
    monkeypatch.setattr(quantization, "quantize_", lambda linear, config: configs.append(config))
    names = move_quantized(tiny_model("llama"), CPU, "int4")
    assert len(names) == NUM_LINEARS - 2
    assert not any("down_proj" in name for name in names)
    assert {(config.group_size, config.int4_packing_format) for config in configs} == {
        (32, "tile_packed_to_4d")
    }


@needs_torchao
def test_a_model_without_linear_layers_is_refused() -> None:
    with pytest.raises(StartupError, match="quantization is int8, but GPT2LMHeadModel has no linear layer"):
        move_quantized(tiny_model("gpt2"), CPU, "int8")


@needs_torchao
def test_the_loader_quantises_what_it_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU stands in for the GPU."""
    save_tiny(tmp_path)
    monkeypatch.setattr(loader, "check_quantization", lambda *_: None)
    monkeypatch.setattr(loader, "takes_operators", lambda *_: False)
    monkeypatch.setattr(
        loader, "plan_weights", lambda *_, **__: WeightPlan("float32", torch.float32, None, strict=False)
    )
    plain = load_causal_lm(ModelConfig(model=str(tmp_path), device="cpu"))
    loaded = load_causal_lm(ModelConfig(model=str(tmp_path), device="cpu", quantization="int8"))
    assert (plain.weights, loaded.weights) == ("float32", "int8")
    assert loaded.dtype == torch.float32
    is_plain = {name: type(weight) is nn.Parameter for name, weight in loaded.module.named_parameters()}
    assert sum(not plain for plain in is_plain.values()) == NUM_LINEARS


@pytest.mark.parametrize(
    ("wanted", "dtype", "device", "message"),
    [
        (
            "int8",
            "auto",
            CPU,
            "quantization is int8, which is for GPUs, but the device is cpu: .* dtype auto",
        ),
        ("fp8", "auto", CUDA, "needs a GPU of compute capability 8.9 or more, but cuda:1 has 8.6"),
        ("int4", "float16", CUDA, "int4, which multiplies in bfloat16 alone, but dtype is float16"),
    ],
)
def test_what_cannot_be_had_is_refused(
    wanted: Quantization, dtype: DType, device: torch.device, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 6))
    with pytest.raises(StartupError, match=message):
        check_quantization(wanted, dtype, device)
    check_quantization(None, dtype, device)
    check_quantization("int4", "auto", CUDA)
    check_quantization("int8", "float16", CUDA)


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(
        StartupError, match=r"needs the package torchao: pip install 'outrider\[quantization\]'"
    ):
        check_quantization("int8", "auto", CUDA)


def test_a_quantised_checkpoint_is_refused() -> None:
    config = PreTrainedConfig(quantization_config={"quant_method": "gptq"})
    check_plain(None, config)
    check_plain("int8", PreTrainedConfig())
    with pytest.raises(StartupError, match="quantization is int8, but the checkpoint is quantised already"):
        check_plain("int8", config)


@needs_torchao
@pytest.mark.parametrize("scheme", SCHEMES)
def test_passes_with_quantised_weights_are_replayed(
    scheme: Quantization, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What torchao launches can be recorded: it asks the device nothing. A tape stands in for CUDA graphs."""
    pytest.importorskip("triton", reason="triton is not installed; it comes for Linux on x86-64 alone")
    from engine.model.attention import triton, triton_kernels

    recorder = TapeRecorder(triton_kernels)
    monkeypatch.setattr(triton, "kernels", recorder)
    model = tiny_model("llama", num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1)
    move_quantized(model, CPU, scheme)
    loaded = wrap_model(model, None, name="tiny")
    rows = []
    for backend in (ReferenceAttention(), triton.TritonAttention(SplitRules(1, 16), recorder)):
        cache = PagedKVCache(loaded.layers, 4, 8, loaded.dtype, CPU)
        runner = ModelRunner(model, cache, backend, loaded.vocab_size)
        passes = [SequenceSlice([token], place, [2, 0]) for place, token in enumerate((5, 6, 7))]
        rows.append(torch.cat([runner.forward(runner.build([piece])) for piece in passes]))
    torch.testing.assert_close(*rows, rtol=1e-4, atol=1e-4)
    assert (len(recorder.tapes), recorder.num_replays) == (1, 3)


def test_the_loader_refuses_before_it_looks_for_a_model() -> None:
    config = ModelConfig(model="no/such-model", device="cpu", quantization="fp8", offline=True)
    with pytest.raises(StartupError, match="quantization is fp8, which is for GPUs"):
        load_causal_lm(config)
