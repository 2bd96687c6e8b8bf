import weakref
from itertools import pairwise

import pytest
import torch
from torch import nn

from engine.errors import StartupError
from engine.model.fusion import fuse_layers
from engine.model.linear import Float16Packer, PackedLinear, packed_fp16_unavailable
from engine.model.merging import LinearPart, MergedLinear, merge_linear
from engine.model.packing import NarrowEmbedding, narrow_embeddings, pack_linear_layers
from tests.operators import need_operators
from tests.tiny import tiny_model

pytestmark = pytest.mark.skipif(packed_fp16_unavailable() is not None, reason="no FBGEMM on this machine")


def attention(bias: tuple[bool, bool, bool] = (False, False, False), key_inputs: int = 16) -> nn.Module:
    module = nn.Module()
    module.q_proj = nn.Linear(16, 24, bias=bias[0])
    module.k_proj = nn.Linear(key_inputs, 8, bias=bias[1])
    module.v_proj = nn.Linear(16, 8, bias=bias[2])
    module.o_proj = nn.Linear(24, 16)
    return nn.Sequential(module).requires_grad_(False)


def test_layers_that_read_the_same_input_become_one_matrix() -> None:
    plain = attention((True, False, True))
    packed = attention((True, False, True))
    packed.load_state_dict(plain.state_dict())
    assert set(pack_linear_layers(packed, Float16Packer())) == {"0.qkv_proj.linear", "0.o_proj"}
    x = torch.randn(3, 16)
    for name in ("0.q_proj", "0.k_proj", "0.v_proj", "0.o_proj"):
        given = torch.randn(3, 24) if name == "0.o_proj" else x
        torch.testing.assert_close(
            packed.get_submodule(name)(given), plain.get_submodule(name)(given), atol=1e-2, rtol=0
        )
    for name in ("q_proj", "k_proj", "v_proj"):
        part = packed.get_submodule(f"0.{name}")
        assert isinstance(part, LinearPart)
        assert torch.equal(part.weight, plain.state_dict()[f"0.{name}.weight"].half().float())


def test_layers_that_do_not_fit_together_stay_separate() -> None:
    module = attention(key_inputs=12)
    assert len(pack_linear_layers(module, Float16Packer())) == 4
    assert not any(isinstance(layer, LinearPart) for layer in module.modules())


def test_a_refused_layer_stays_or_is_an_error() -> None:
    module = attention()
    module.state_dict()["0.k_proj.weight"][0, 0] = -1e6
    with pytest.raises(
        StartupError, match=r"0\.qkv_proj\.linear cannot .* 1e\+06, and float16 ends at 65504"
    ):
        pack_linear_layers(module, Float16Packer(), strict=True)
    assert pack_linear_layers(module, Float16Packer()) == ("0.o_proj",)
    assert isinstance(module.get_submodule("0.qkv_proj.linear"), nn.Linear)
    x = torch.randn(3, 16)
    assert module.get_submodule("0.k_proj")(x).abs().max() > 1e4


def test_one_call_serves_all_parts_in_any_order_and_nothing_is_kept() -> None:
    linear = nn.Linear(4, 6).requires_grad_(False)
    calls = []
    linear.register_forward_hook(lambda *_: calls.append(1))
    merged = MergedLinear(linear, [1, 2, 3])
    first, second = torch.randn(2, 4), torch.randn(2, 4)
    expected = {id(x): linear(x).split([1, 2, 3], -1) for x in (first, second)}
    for order in ((0, 1, 2), (2, 0, 1)):
        calls.clear()
        for index in order:
            assert torch.equal(merged.parts[index](first), expected[id(first)][index])
        assert len(calls) == 1
        assert merged._results.source is None
    # Another input, the same part again, an equal copy: all are computed anew.
    calls.clear()
    assert torch.equal(merged.parts[0](first), expected[id(first)][0])
    assert torch.equal(merged.parts[1](second), expected[id(second)][1])
    assert torch.equal(merged.parts[1](second), expected[id(second)][1])
    assert torch.equal(merged.parts[0](second.clone()), expected[id(second)][0])
    assert len(calls) == 4


def test_a_merged_layer_says_what_the_separate_ones_say() -> None:
    layers = [nn.Linear(8, 3), nn.Linear(8, 5, bias=False)]
    merged = merge_linear(layers)
    assert merged is not None
    x = torch.randn(2, 8)
    torch.testing.assert_close(merged(x), torch.cat([layer(x) for layer in layers], -1))
    assert merge_linear([nn.Linear(8, 3), nn.Linear(7, 3)]) is None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_an_embedding_of_16_bits_gives_the_same_rows(dtype: torch.dtype) -> None:
    weight = torch.randn(9000, 8).to(dtype).float()
    module = nn.Sequential(nn.Embedding(9000, 8, _weight=weight.clone()))
    assert narrow_embeddings(module) == ("0",)
    narrow = module.get_submodule("0")
    assert isinstance(narrow, NarrowEmbedding)
    assert narrow.weight.dtype == dtype
    ids = torch.randint(9000, (2, 50))
    assert narrow(ids).dtype == torch.float32
    assert torch.equal(narrow(ids), weight[ids])
    assert torch.equal(narrow(torch.arange(9000)), weight)


@pytest.mark.parametrize("value", [1 / 3, float("nan")])
def test_an_embedding_that_would_change_stays(value: float) -> None:
    weight = torch.ones(9000, 8)
    weight[8999, 7] = value
    module = nn.Sequential(nn.Embedding(9000, 8, _weight=weight))
    assert narrow_embeddings(module) == ()
    assert type(module.get_submodule("0")) is nn.Embedding


class Scaled(nn.Embedding):
    pass


def test_an_embedding_that_does_more_than_look_up_stays() -> None:
    module = nn.Sequential(Scaled(4, 4), nn.Embedding(4, 4, max_norm=1.0))
    assert narrow_embeddings(module.requires_grad_(False)) == ()


@pytest.mark.parametrize("with_operators", [False, True])
def test_plain_weights_are_freed_while_others_are_packed(with_operators: bool) -> None:
    module = tiny_model("llama", num_hidden_layers=6)
    if with_operators:
        fuse_layers(module, need_operators())
    living: list[weakref.ref[torch.Tensor]] = []
    seen: list[int] = []

    class Watching(Float16Packer):
        def pack(self, weight: torch.Tensor, bias: torch.Tensor | None) -> PackedLinear:
            if not living:  # By now what reads the same input has been merged.
                living.extend(weakref.ref(weight) for weight in module.parameters())
            seen.append(sum(reference() is not None for reference in living))
            return super().pack(weight, bias)

    pack_linear_layers(module, Watching())
    # One less at each layer; the loop still holds the last one while it takes up the next.
    assert seen[0] - seen[-1] >= len(seen) - 2
    assert all(before - after <= 2 for before, after in pairwise(seen))


def test_a_part_that_is_fused_leaves_nothing_of_the_one_it_replaces() -> None:
    module = tiny_model("llama", num_hidden_layers=6)
    gone = [weakref.ref(layer.mlp.gate_proj.weight) for layer in module.model.layers]
    left = []

    class Operators:
        """Notes at each norm how many of the layers' weights are still there."""

        def __getattr__(self, name: str) -> object:
            left.append(sum(reference() is not None for reference in gone))
            return getattr(need_operators(), name)

    fuse_layers(module, Operators())  # type: ignore[arg-type]
    assert left[0] == 6
    assert left[-1] == 0
    assert len(set(left)) > 4
