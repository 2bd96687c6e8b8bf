"""All decoder layers as one operator: used where every bit is the same, and only there."""

import gc
import weakref

import pytest
import torch
from torch import nn
from transformers import PreTrainedModel

from engine.model.attention.cpu import CpuAttention
from engine.model.attention.interface import ATTENTION_NAME, probe_layers, register
from engine.model.fused_layers import FusedAttention
from engine.model.fusion import fuse_layers
from engine.model.input_batch import SequenceSlice
from engine.model.int8 import Int8Packer
from engine.model.kv_cache import LayerShape, PagedKVCache
from engine.model.layer_stack import LayerStack, stack_layers
from engine.model.linear import Float16Packer
from engine.model.model_runner import ModelRunner
from engine.model.packing import LinearPacker, pack_linear_layers
from engine.token_tree import TokenTree
from tests.operators import need_operators
from tests.tiny import tiny_model

STACKED = ["llama", "qwen2", "mistral"]


def packed_model(
    arch: str, packer: LinearPacker | None = None
) -> tuple[PreTrainedModel, tuple[LayerShape, ...]]:
    register()
    module = tiny_model(arch).eval().requires_grad_(False)
    module.set_attn_implementation(ATTENTION_NAME)
    shapes = probe_layers(module)
    fuse_layers(module, need_operators())
    pack_linear_layers(module, packer or Int8Packer(need_operators()), strict=True)
    return module, shapes


def answers(
    module: PreTrainedModel, shapes: tuple[LayerShape, ...], dtype: torch.dtype = torch.float32
) -> list[torch.Tensor]:
    """Logits of a chunk, and of a step in which another chunk stands beside a tree."""
    cache = PagedKVCache(shapes, 16, 4, dtype, module.device)
    runner = ModelRunner(module, cache, CpuAttention(need_operators()), 1000)
    first = SequenceSlice([5, 6, 7, 8, 9], 0, [3, 9, 4], rows=5)
    rows = [runner.forward(runner.build([first]))]
    tree = TokenTree((1, 2, 3), (0, 0, 1))
    second = SequenceSlice([11], 5, [3, 9, 4], tree, rows=4)
    other = SequenceSlice([20, 21, 22], 0, [1], rows=3)
    rows.append(runner.forward(runner.build([second, other])))
    used = [*range(12, 16), *range(36, 40), *range(4, 7)]
    return [*rows, *(tensor[used] for tensor in (*cache.keys, *cache.values))]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("arch", STACKED)
def test_every_bit_is_that_of_the_layers_one_by_one(arch: str, dtype: torch.dtype) -> None:
    module, shapes = packed_model(arch)
    expected = answers(module, shapes, dtype)
    assert stack_layers(module, shapes, need_operators())
    assert sum(isinstance(child, LayerStack) for child in module.modules()) == 1
    for ours, theirs in zip(answers(module, shapes, dtype), expected, strict=True):
        assert torch.equal(ours, theirs)


def test_a_cache_goes_when_nobody_uses_it_any_more() -> None:
    module, shapes = packed_model("llama")
    assert stack_layers(module, shapes, need_operators())
    cache = PagedKVCache(shapes, 16, 4, torch.float32, module.device)
    runner = ModelRunner(module, cache, CpuAttention(need_operators()), 1000)
    runner.forward(runner.build([SequenceSlice([5, 6], 0, [3], rows=1)]))
    left = weakref.ref(cache)
    del cache, runner
    gc.collect()
    assert left() is None


@pytest.mark.parametrize("arch", ["gemma2", "qwen3", "mixtral", "gpt2"])
def test_layers_of_another_form_are_called_one_by_one(arch: str, caplog: pytest.LogCaptureFixture) -> None:
    module, shapes = packed_model(arch)
    with caplog.at_level("INFO"):
        assert not stack_layers(module, shapes, need_operators())
    assert "called one by one" in caplog.text
    assert not any(isinstance(child, LayerStack) for child in module.modules())


def test_weights_of_another_type_are_left_alone() -> None:
    module, shapes = packed_model("llama", Float16Packer(need_operators()))
    assert not stack_layers(module, shapes, need_operators())


def swap_norms(layer: nn.Module) -> None:
    """The second norm before the first: the parts are found in this order."""
    first = layer.get_submodule("input_layernorm")
    del layer.input_layernorm
    layer.add_module("input_layernorm", first)


def scale_output(layer: nn.Module) -> None:
    """A layer that does more than its parts, as some architectures do."""
    layer.register_forward_hook(lambda _module, _arguments, output: output * 1.5)


@pytest.mark.parametrize("change", [swap_norms, scale_output])
def test_a_layer_that_means_more_than_its_parts_is_found_out(
    change: object, caplog: pytest.LogCaptureFixture
) -> None:
    module, shapes = packed_model("llama")
    layer = module.get_submodule("model.layers.1")
    norms = [layer.get_submodule("input_layernorm"), layer.get_submodule("post_attention_layernorm")]
    for factor, norm in zip((0.5, 2.0), norms, strict=True):
        norm.get_parameter("weight").mul_(factor)
    assert callable(change)
    change(layer)
    expected = answers(module, shapes)
    with caplog.at_level("INFO"):
        assert not stack_layers(module, shapes, need_operators())
    assert "another result" in caplog.text
    for ours, theirs in zip(answers(module, shapes), expected, strict=True):
        assert torch.equal(ours, theirs)


def test_a_layer_that_did_not_attend_is_noticed() -> None:
    module, shapes = packed_model("llama")
    attention = module.get_submodule("model.layers.0.self_attn")
    assert isinstance(attention, FusedAttention)
    assert stack_layers(module, shapes, need_operators())
    stack = next(child for child in module.modules() if isinstance(child, LayerStack))
    stack._numbers = stack._numbers[:1]
    with pytest.raises((RuntimeError, IndexError)):
        answers(module, shapes)
