import json
import logging
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, BloomConfig, T5Config

from engine.config import ModelConfig
from engine.errors import ModelNotFound, ModelNotSupported, StartupError
from engine.model.attention.choice import choose_backend
from engine.model.attention.interface import ATTENTION_NAME
from engine.model.input_batch import SequenceSlice
from engine.model.int8 import Int8Linear
from engine.model.kv_cache import LayerShape, PagedKVCache
from engine.model.linear import PackedLinear, packed_fp16_unavailable
from engine.model.linear_weights import choose_linear_weights
from engine.model.loader import (
    LoadedModel,
    choose_device,
    choose_dtype,
    load_causal_lm,
    wrap_model,
)
from engine.model.model_runner import ModelRunner
from engine.model.packing import LinearPart
from tests.operators import need_operators, operators
from tests.tiny import ARCHITECTURES, EOS, IM_END, VOCAB_SIZE, byte_tokenizer, save_tiny, tiny_model

CPU = torch.device("cpu")
needs_packing = pytest.mark.skipif(packed_fp16_unavailable() is not None, reason="no FBGEMM here")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return save_tiny(tmp_path / "model")


def load(folder: Path, **settings: object) -> LoadedModel:
    return load_causal_lm(ModelConfig.model_validate({"model": str(folder), "offline": True, **settings}))


def rewrite(file: Path, **fields: object) -> None:
    file.write_text(json.dumps({**json.loads(file.read_text()), **fields}))


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_a_local_folder_gives_the_model_that_was_saved(arch: str, tmp_path: Path) -> None:
    loaded = load(save_tiny(tmp_path, arch), linear_weights="plain")
    wrapped = wrap_model(tiny_model(arch), byte_tokenizer(), name=str(tmp_path), operators=operators())
    saved = wrapped.module.state_dict()
    assert all(torch.equal(tensor, saved[name]) for name, tensor in loaded.module.state_dict().items())
    assert loaded.tokenizer is not None
    assert loaded.tokenizer.get_vocab() == byte_tokenizer().get_vocab()
    for model in (loaded, wrapped):
        assert model.name == str(tmp_path)
        assert model.vocab_size == VOCAB_SIZE
        assert model.max_model_len == 512
        assert model.eos_token_ids == {EOS, IM_END}
        assert len(model.layers) == 2
        assert (model.device, model.dtype, model.linear_weights) == (CPU, torch.float32, "plain")
        assert not model.module.training
        assert not any(parameter.requires_grad for parameter in model.module.parameters())
        assert model.module.config._attn_implementation == ATTENTION_NAME


def test_the_layers_of_the_cache(folder: Path) -> None:
    assert load(folder).layers == (LayerShape(2, 8, 8),) * 2


@needs_packing
def test_on_a_cpu_linear_layers_are_packed(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        model = load(folder, linear_weights="packed-fp16")
    assert model.linear_weights == "packed-fp16"
    count = 15 if operators() is None else 9  # Operators go with merged layers.
    assert sum(isinstance(layer, PackedLinear | LinearPart) for layer in model.module.modules()) == count
    assert f"{count} linear layers" in caplog.text
    assert "float32 on cpu" in caplog.text


@needs_packing
def test_a_model_is_the_same_after_every_load(folder: Path) -> None:
    tokens = list(range(10))
    logits = []
    for _ in range(2):
        model = load(folder)
        cache = PagedKVCache(model.layers, 1, 16, model.dtype, model.device)
        runner = ModelRunner(model.module, cache, choose_backend(model.operators), model.vocab_size)
        logits.append(runner.forward(runner.build([SequenceSlice(tokens, 0, [0], rows=10)])))
    assert torch.equal(*logits)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_other_types_on_a_cpu_keep_plain_weights(dtype: str, folder: Path) -> None:
    model = load(folder, dtype=dtype)
    assert model.dtype == getattr(torch, dtype)
    assert model.linear_weights == "plain"
    with pytest.raises(StartupError, match=f"dtype is {dtype}, and packed weights take float32"):
        load(folder, dtype=dtype, linear_weights="packed-fp16")


def test_what_auto_chooses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert choose_device("auto") == CPU
    assert choose_dtype("auto", CPU) == torch.float32
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    cuda = choose_device("auto")
    assert cuda.type == "cuda"
    for has_bf16, dtype in ((True, torch.bfloat16), (False, torch.float16)):
        monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda has_bf16=has_bf16, **_: has_bf16)
        assert choose_dtype("auto", cuda) == dtype
    assert choose_linear_weights("auto", cuda, torch.bfloat16, None) == "plain"
    with pytest.raises(StartupError, match="packed weights are for CPUs"):
        choose_linear_weights("packed-fp16", cuda, torch.float32, None)


def test_a_machine_without_fbgemm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "DEFAULT")
    assert choose_linear_weights("auto", CPU, torch.float32, None) == "plain"
    with pytest.raises(StartupError, match="FBGEMM needs AVX2"):
        choose_linear_weights("packed-fp16", CPU, torch.float32, None)
    with pytest.raises(StartupError, match="FBGEMM needs AVX2"):
        wrap_model(tiny_model("llama"), None, name="a", linear_weights="packed-fp16")


def test_eight_bits_without_operators_are_refused() -> None:
    with pytest.raises(StartupError, match="linear_weights is packed-int8, but there are no C"):
        choose_linear_weights("packed-int8", CPU, torch.float32, None)
    with pytest.raises(StartupError, match="use linear_weights=plain"):
        wrap_model(tiny_model("llama"), None, name="a", linear_weights="packed-int8")


def test_eight_bits_with_operators(folder: Path) -> None:
    need_operators()
    model = load(folder)  # What auto takes.
    assert model.linear_weights == "packed-int8"
    assert sum(isinstance(layer, Int8Linear) for layer in model.module.modules()) == 9


@pytest.mark.parametrize("name", ["gpu", "cuda:99", "mps", "cuda:x"])
def test_a_device_that_is_not_there_is_refused(name: str) -> None:
    with pytest.raises(StartupError, match=f"device is '{name}'"):
        choose_device(name)


def test_the_context_can_be_shortened_but_not_stretched(folder: Path) -> None:
    assert load(folder, max_model_len=100).max_model_len == 100
    with pytest.raises(StartupError, match="max_model_len is 513, but the model has 512"):
        load(folder, max_model_len=513)


def test_a_chat_template_from_a_file(folder: Path, tmp_path: Path) -> None:
    template = tmp_path / "chat.jinja"
    template.write_text("{% for m in messages %}[{{ m.content }}]{% endfor %}")
    tokenizer = load(folder, chat_template=template).tokenizer
    assert tokenizer is not None
    assert tokenizer.apply_chat_template([{"role": "user", "content": "x"}], tokenize=False) == "[x]"
    with pytest.raises(StartupError, match=r"gone\.jinja cannot be read"):
        load(folder, chat_template=tmp_path / "gone.jinja")


def test_a_checkpoint_that_lacks_weights_is_refused(folder: Path) -> None:
    rewrite(folder / "config.json", num_hidden_layers=3, layer_types=None)
    with pytest.raises(StartupError, match=r"lacks 9 weights .* model\.layers\.2"):
        load(folder)


def test_a_broken_file_of_weights_is_refused(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"\0" * 64)
    with pytest.raises(StartupError, match=r"weights of .* cannot be read"):
        load(folder)


@pytest.mark.parametrize("arch", ["llama", "qwen2", "gemma2"])
def test_a_folder_without_a_tokenizer_is_refused(arch: str, tmp_path: Path) -> None:
    folder = save_tiny(tmp_path, arch)
    for file in folder.glob("tokenizer*"):
        file.unlink()
    with pytest.raises(StartupError, match=r"tokenizer of .* cannot be read|has no tokenizer: none of"):
        load(folder)


@pytest.mark.parametrize("config", ["{", "{}", '{"model_type": "llama", "hidden_size": "x"}'])
def test_a_broken_config_is_refused(config: str, folder: Path) -> None:
    (folder / "config.json").write_text(config)
    with pytest.raises(StartupError, match=r"config of .* cannot be read"):
        load(folder)


def test_an_unknown_type_of_model_is_refused(folder: Path) -> None:
    rewrite(folder / "config.json", model_type="never-heard-of")
    with pytest.raises(StartupError, match="never-heard-of"):
        load(folder)


@pytest.mark.parametrize("config", [T5Config(), BloomConfig(n_layer=1)], ids=["t5", "bloom"])
def test_what_cannot_be_paged_is_refused_before_its_weights_are_read(
    config: T5Config | BloomConfig, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config.save_pretrained(folder)
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", None)
    with pytest.raises(ModelNotSupported):
        load(folder)


def test_a_missing_model_is_not_found(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound, match="gone"):
        load(tmp_path / "gone")


REMOTE_CODE = """
from pathlib import Path
from transformers import LlamaConfig
Path(__file__).with_name("ran").touch()
Path({marker!r}).touch()
class OwnConfig(LlamaConfig):
    model_type = "own"
"""
REMOTE_MODEL = """
from transformers import LlamaForCausalLM
from .configuration_own import OwnConfig
class OwnForCausalLM(LlamaForCausalLM):
    config_class = OwnConfig
"""


def test_code_of_a_model_runs_only_when_asked(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    marker = tmp_path / "code-ran"
    (folder / "configuration_own.py").write_text(REMOTE_CODE.format(marker=str(marker)))
    (folder / "modeling_own.py").write_text(REMOTE_MODEL)
    rewrite(
        folder / "config.json",
        model_type="own",
        auto_map={
            "AutoConfig": "configuration_own.OwnConfig",
            "AutoModelForCausalLM": "modeling_own.OwnForCausalLM",
        },
    )
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    with pytest.raises(StartupError, match=r"set trust_remote_code \(--trust-remote-code\)"):
        load(folder)
    assert not marker.exists()
    loaded = load(folder, trust_remote_code=True)
    assert type(loaded.module).__name__ == "OwnForCausalLM"
    assert marker.exists()


def test_wrapping_replaces_the_attention() -> None:
    module = tiny_model("llama", attention="eager")
    wrap_model(module.train().requires_grad_(True), None, name="a")
    assert module.config._attn_implementation == ATTENTION_NAME
    assert not module.training


def test_a_model_whose_class_cannot_be_paged_is_not_wrapped() -> None:
    module = AutoModelForCausalLM.from_config(
        AutoConfig.for_model("bloom", n_layer=1, hidden_size=32, n_head=2, vocab_size=64)
    )
    with pytest.raises(ModelNotSupported, match="BloomForCausalLM"):
        wrap_model(module, None, name="a")
