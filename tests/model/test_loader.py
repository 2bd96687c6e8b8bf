import json
import logging
from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, BloomConfig, T5Config
from transformers.utils import logging as transformers_logging

from engine.config import ModelConfig
from engine.errors import ModelNotFound, ModelNotSupported, StartupError
from engine.model.attention.choice import choose_backend
from engine.model.attention.interface import ATTENTION_NAME
from engine.model.input_batch import SequenceSlice
from engine.model.int8 import Int8Linear
from engine.model.kv_cache import LayerShape, PagedKVCache
from engine.model.linear import PackedLinear, packed_fp16_unavailable
from engine.model.loader import LoadedModel, load_causal_lm, wrap_model
from engine.model.model_runner import ModelRunner
from tests.operators import need_operators, operators, share_operators
from tests.tiny import ARCHITECTURES, EOS, IM_END, VOCAB_SIZE, byte_tokenizer, save_tiny, tiny_model

CPU = torch.device("cpu")
needs_packing = pytest.mark.skipif(packed_fp16_unavailable() is not None, reason="no FBGEMM here")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return save_tiny(tmp_path / "model")


def load(folder: Path, **settings: object) -> LoadedModel:
    """Loads a folder; what is packed is kept beside it."""
    cache_dir = folder.with_name(f"{folder.name}-cache")
    if not cache_dir.exists():
        share_operators(cache_dir)
    fixed = {"model": str(folder), "device": "cpu", "offline": True, "cache_dir": cache_dir}
    return load_causal_lm(ModelConfig.model_validate({**fixed, **settings}))


def test_no_progress_bars_get_into_logs(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    transformers_logging.enable_progress_bar()
    load(folder, dtype="float32")
    assert "it/s" not in capfd.readouterr().err
    assert transformers_logging.is_progress_bar_enabled()


def rewrite(file: Path, **fields: object) -> None:
    file.write_text(json.dumps({**json.loads(file.read_text()), **fields}))


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_a_local_folder_gives_the_model_that_was_saved(arch: str, tmp_path: Path) -> None:
    folder = save_tiny(tmp_path / "model", arch)
    loaded = load(folder, dtype="float32")
    wrapped = wrap_model(tiny_model(arch), byte_tokenizer(), name=str(folder), operators=operators())
    saved = wrapped.module.state_dict()
    assert all(torch.equal(tensor, saved[name]) for name, tensor in loaded.module.state_dict().items())
    assert loaded.tokenizer is not None
    assert loaded.tokenizer.get_vocab() == byte_tokenizer().get_vocab()
    for model in (loaded, wrapped):
        assert model.name == str(folder)
        assert model.vocab_size == VOCAB_SIZE
        assert model.max_model_len == 512
        assert model.eos_token_ids == {EOS, IM_END}
        assert len(model.layers) == 2
        assert (model.device, model.dtype, model.weights) == (CPU, torch.float32, "float32")
        assert not model.module.training
        assert not any(parameter.requires_grad for parameter in model.module.parameters())
        assert model.module.config._attn_implementation == ATTENTION_NAME


def test_the_layers_of_the_cache(folder: Path) -> None:
    assert load(folder).layers == (LayerShape(2, 8, 8),) * 2


@needs_packing
def test_a_model_is_the_same_after_every_load(folder: Path) -> None:
    """The second comes out of the cache of packed weights."""
    tokens = list(range(10))
    logits = []
    for _ in range(2):
        model = load(folder)
        cache = PagedKVCache(model.layers, 1, 16, model.dtype, model.device)
        runner = ModelRunner(
            model.module, cache, choose_backend(model.operators, model.device), model.vocab_size
        )
        logits.append(runner.forward(runner.build([SequenceSlice(tokens, 0, [0], rows=10)])))
    assert torch.equal(*logits)


@needs_packing
@pytest.mark.parametrize("dtype", ["float16", "int8"])
def test_on_a_cpu_linear_layers_are_packed(
    dtype: str, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    need_operators()
    with caplog.at_level(logging.INFO):
        model = load(folder, dtype=dtype)
    assert (model.dtype, model.weights) == (torch.float32, dtype)
    kind = {"float16": PackedLinear, "int8": Int8Linear}[dtype]
    assert sum(isinstance(layer, kind) for layer in model.module.modules()) == 9
    assert f"9 linear layers are packed: 9 as {dtype}" in caplog.text
    assert f"{dtype} weights on cpu" in caplog.text


def test_bfloat16_on_a_cpu_is_torchs_own(folder: Path) -> None:
    model = load(folder, dtype="bfloat16")
    assert (model.dtype, model.weights) == (torch.bfloat16, "bfloat16")
    assert model.operators is None


def save_with_weight(folder: Path, value: float) -> Path:
    module = tiny_model("llama")
    module.model.layers[1].mlp.down_proj.weight.data[3, 5] = value
    module.save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder


@needs_packing
def test_weights_that_float16_cannot_hold(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    folder = save_with_weight(tmp_path / "model", 7e4)
    with pytest.raises(StartupError, match=r"float16, but the layer .*layers\.1\.mlp\.down_proj cannot"):
        load(folder, dtype="float16")
    # Without operators auto takes float16: that layer is held in float32, which has room.
    monkeypatch.setattr("engine.model.loader.load_operators", lambda _: None)
    for _ in range(2):  # The second comes out of the cache of packed weights.
        model = load(folder)
        assert model.weights == "float16"
        layer = model.module.get_submodule("model.layers.1.mlp.down_proj")
        assert isinstance(layer, nn.Linear)
        assert layer.weight[3, 5] == 7e4
        assert isinstance(model.module.get_submodule("model.layers.0.mlp.down_proj"), PackedLinear)
    assert "layer model.layers.1.mlp.down_proj stays in float32" in caplog.text
    assert caplog.text.count("stays in float32") == 1


@pytest.mark.parametrize("dtype", ["auto", "float32"])
def test_weights_that_are_not_finite_are_refused(dtype: str, tmp_path: Path) -> None:
    folder = save_with_weight(tmp_path / "model", float("inf"))
    with pytest.raises(StartupError, match=r"layers\.1\.mlp\.down_proj\.weight has weights that are not"):
        load(folder, dtype=dtype)


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


def test_of_a_damaged_folder_in_the_cache_the_message_says_that_it_may_be_deleted(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"\0" * 64)
    with pytest.raises(StartupError, match=r"cannot be read: [^.]*$"):
        load(folder)
    with pytest.raises(StartupError, match=rf"in {folder} cannot be read: .*, delete the folder: "):
        load(folder, cache_dir=folder.parent)


@pytest.mark.parametrize("file", ["config.json", "generation_config.json", "tokenizer_config.json"])
@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"7", b"\x80\0"])
def test_a_damaged_file_is_refused_in_words(file: str, content: bytes, folder: Path) -> None:
    (folder / file).write_bytes(content)
    with pytest.raises(StartupError, match=rf"in {folder} cannot be read: "):
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
    with pytest.raises(StartupError, match=r"config(\.json)? of .* cannot be read"):
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
