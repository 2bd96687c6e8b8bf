"""The type of keys and values: what the setting means for a model, and what an engine makes of it."""

import importlib.util
from dataclasses import replace

import pytest
import torch

from engine.config import CacheConfig, DType, EngineConfig, KVCacheDType, ModelConfig, NoSpeculation
from engine.errors import StartupError
from engine.factory import Engine, assemble, build_engine
from engine.model import cache_type
from engine.model.cache_type import choose_cache_type, has_exact_rows, rounding_type
from engine.model.loaded_model import LoadedModel
from engine.model.loader import wrap_model
from tests.operators import need_operators
from tests.tiny import tiny_model

NAMED: dict[KVCacheDType, torch.dtype] = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
}


def packed(arch: str = "llama", dtype: DType = "int8") -> LoadedModel:
    return wrap_model(tiny_model(arch), None, name=arch, dtype=dtype, operators=need_operators())


@pytest.mark.parametrize("arch", ["llama", "qwen3", "gemma2", "gpt2"])
@pytest.mark.parametrize("dtype", ["int8", "float16"])
def test_auto_is_float16_where_the_operators_do_everything(arch: str, dtype: DType) -> None:
    assert choose_cache_type("auto", packed(arch, dtype)) == torch.float16


def test_auto_is_the_models_own_type_where_sums_depend_on_the_batch() -> None:
    """In float32 weights, without operators, and where torch multiplies the matrices of experts."""
    assert choose_cache_type("auto", packed(dtype="float32")) == torch.float32
    assert choose_cache_type("auto", replace(packed(), operators=None)) == torch.float32
    assert choose_cache_type("auto", packed("mixtral")) == torch.float32
    bfloat16 = wrap_model(tiny_model("llama").to(torch.bfloat16), None, name="tiny")
    assert choose_cache_type("auto", bfloat16) == torch.bfloat16


@pytest.mark.parametrize(("wanted", "dtype"), NAMED.items())
def test_a_cpu_takes_each_type_by_name(wanted: KVCacheDType, dtype: torch.dtype) -> None:
    assert choose_cache_type(wanted, packed()) == dtype
    assert choose_cache_type(wanted, packed(dtype="float32")) == dtype


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> LoadedModel:
    """A model that says it is on a GPU, which says it is of the first that have numbers of eight bits."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 9))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    model = wrap_model(tiny_model("llama"), None, name="tiny")
    return replace(model, device=torch.device("cuda:1"), dtype=torch.bfloat16)


def test_a_gpu_takes_the_models_own_type_unless_told(gpu: LoadedModel) -> None:
    assert choose_cache_type("auto", gpu) == torch.bfloat16
    for wanted, dtype in NAMED.items():
        assert choose_cache_type(wanted, gpu) == dtype
    assert choose_cache_type("fp8", gpu) == torch.float8_e4m3fn


def test_eight_bits_are_refused_where_nothing_reads_them(
    gpu: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(StartupError, match=r"fp8, which is for GPUs, but .* is cpu: use .* float16, or auto"):
        choose_cache_type("fp8", packed())
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(StartupError, match="fp8, which needs the package triton: pip install triton, or use"):
        choose_cache_type("fp8", gpu)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 6))
    message = "fp8, which needs .* 8.9 or more, but cuda:1 has 8.6: use kv_cache_dtype auto$"
    with pytest.raises(StartupError, match=message):
        choose_cache_type("fp8", gpu)
    assert choose_cache_type("float16", gpu) == torch.float16


def test_they_are_refused_before_anything_is_read() -> None:
    config = EngineConfig(
        model=ModelConfig(model="/nowhere", device="cpu"), cache=CacheConfig(kv_cache_dtype="fp8")
    )
    with pytest.raises(StartupError, match="kv_cache_dtype is fp8"):
        build_engine(config)


def test_what_rounding_makes_of_a_difference() -> None:
    """A narrow cache counts where rows depend on their batch; elsewhere there is no difference to round."""
    exact, torchs = packed(), packed(dtype="float32")
    assert has_exact_rows(exact)
    assert not has_exact_rows(torchs)
    assert rounding_type(exact, torch.float16) == torch.float32
    assert rounding_type(torchs, torch.float32) == torch.float32
    assert rounding_type(torchs, torch.float16) == torch.float16
    assert rounding_type(replace(torchs, dtype=torch.bfloat16), torch.float16) == torch.bfloat16
    narrow = torch.float8_e4m3fn
    assert rounding_type(replace(torchs, dtype=torch.bfloat16), narrow) == narrow


def engine(model: LoadedModel, wanted: KVCacheDType) -> Engine:
    cache = CacheConfig(block_size=4, kv_cache_gb=2**-20, kv_cache_dtype=wanted)
    return assemble(EngineConfig(cache=cache, speculation=NoSpeculation()), model)


def test_half_the_bytes_make_twice_the_blocks(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """1 KiB: two layers of two heads of 8, keys and values, of four tokens in a block."""
    monkeypatch.setattr(cache_type, "check_cache_type", lambda wanted, device: None)
    model = wrap_model(tiny_model("llama"), None, name="tiny", max_model_len=4)
    with caplog.at_level("INFO"):
        engines = [engine(model, wanted) for wanted in ("fp8", "float16", "float32")]
    caches = [each.runner.cache for each in engines]
    assert [cache.dtype for cache in caches] == [torch.float8_e4m3fn, torch.float16, torch.float32]
    assert [len(cache.keys[0]) for cache in caches] == [16, 8, 4]
    assert "blocks of 4 tokens, float16, 0.00 GiB for the target" in caplog.text
    assert "blocks of 4 tokens, float8_e4m3fn, 0.00 GiB for the target" in caplog.text
