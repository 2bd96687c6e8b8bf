"""The type of keys and values: what the setting means for a model, and what an engine makes of it."""

from dataclasses import replace

import pytest
import torch

from engine.config import CacheConfig, DType, EngineConfig, KVCacheDType, NoSpeculation
from engine.errors import StartupError
from engine.factory import Engine, assemble
from engine.model.cache_type import choose_cache_type, has_exact_rows, rounding_type
from engine.model.loaded_model import LoadedModel
from engine.model.loader import wrap_model
from tests.engines import load_tiny
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


def test_a_gpu_takes_the_models_own_type_alone() -> None:
    model = replace(
        packed(dtype="float32"), device=torch.device("cuda:0"), dtype=torch.bfloat16, operators=None
    )
    assert choose_cache_type("auto", model) == torch.bfloat16
    assert choose_cache_type("bfloat16", model) == torch.bfloat16
    message = "kv_cache_dtype is float16, but llama runs on cuda:0 in bfloat16, .* or dtype float16$"
    with pytest.raises(StartupError, match=message):
        choose_cache_type("float16", model)


def test_what_rounding_makes_of_a_difference() -> None:
    """A narrow cache counts where rows depend on their batch; elsewhere there is no difference to round."""
    exact, torchs = packed(), packed(dtype="float32")
    assert has_exact_rows(exact)
    assert not has_exact_rows(torchs)
    assert rounding_type(exact, torch.float16) == torch.float32
    assert rounding_type(torchs, torch.float32) == torch.float32
    assert rounding_type(torchs, torch.float16) == torch.float16
    assert rounding_type(replace(torchs, dtype=torch.bfloat16), torch.float16) == torch.bfloat16


def engine(model: LoadedModel, wanted: KVCacheDType) -> Engine:
    cache = CacheConfig(block_size=4, kv_cache_gb=2**-20, kv_cache_dtype=wanted)
    return assemble(EngineConfig(cache=cache, speculation=NoSpeculation()), model)


def test_half_the_bytes_make_twice_the_blocks(caplog: pytest.LogCaptureFixture) -> None:
    """1 KiB: two layers of two heads of 8, keys and values, of four tokens in a block."""
    model = load_tiny(max_model_len=4)
    with caplog.at_level("INFO"):
        narrow, wide = engine(model, "float16"), engine(model, "float32")
    assert narrow.runner.cache.dtype == torch.float16
    assert wide.runner.cache.dtype == torch.float32
    assert [len(each.runner.cache.keys[0]) for each in (narrow, wide)] == [8, 4]
    assert "blocks of 4 tokens, float16, 0.00 GiB for the target" in caplog.text
