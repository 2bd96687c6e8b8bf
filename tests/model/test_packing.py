import pytest
import torch
from torch import nn

from engine.model.linear import Float16Packer, packed_fp16_unavailable
from engine.model.packing import LinearPart, MergedLinear, pack_linear_layers

pytestmark = pytest.mark.skipif(packed_fp16_unavailable() is not None, reason="no FBGEMM on this machine")


class Counted:
    def __init__(self, linear: nn.Linear) -> None:
        self.linear = linear
        self.weight = linear.weight
        self.calls = 0

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        result: torch.Tensor = self.linear(x)
        return result


def attention(bias: tuple[bool, bool, bool] = (False, False, False), key_inputs: int = 16) -> nn.Module:
    module = nn.Module()
    module.q_proj = nn.Linear(16, 24, bias=bias[0])
    module.k_proj = nn.Linear(key_inputs, 8, bias=bias[1])
    module.v_proj = nn.Linear(16, 8, bias=bias[2])
    module.o_proj = nn.Linear(24, 16)
    return nn.Sequential(module).requires_grad_(False)


def test_layers_that_read_the_same_input_become_one_matrix() -> None:
    plain, packed = attention((True, False, True)), attention()
    packed = attention((True, False, True))
    packed.load_state_dict(plain.state_dict())
    assert pack_linear_layers(packed, Float16Packer()) == 4
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
    assert pack_linear_layers(module, Float16Packer()) == 4
    assert not any(isinstance(layer, LinearPart) for layer in module.modules())


def test_one_refused_layer_leaves_the_others_packed() -> None:
    module = attention()
    module.state_dict()["0.k_proj.weight"][0, 0] = 1e6
    assert pack_linear_layers(module, Float16Packer()) == 3
    assert isinstance(module.get_submodule("0.k_proj"), nn.Linear)


def test_one_call_serves_all_parts_in_any_order_and_nothing_is_kept() -> None:
    counted = Counted(nn.Linear(4, 6).requires_grad_(False))
    merged = MergedLinear(counted, [1, 2, 3])
    first, second = torch.randn(2, 4), torch.randn(2, 4)
    for order in ((0, 1, 2), (2, 0, 1)):
        calls = counted.calls
        for index in order:
            assert torch.equal(merged.parts[index](first), counted.linear(first).split([1, 2, 3], -1)[index])
        assert counted.calls == calls + 1
        assert merged._results.source is None
    assert counted.linear(first).shape == (2, 6)
    # Another input, the same part again, an equal copy: all are computed anew.
    calls = counted.calls
    assert torch.equal(merged.parts[0](first), counted.linear(first)[:, :1])
    assert torch.equal(merged.parts[1](second), counted.linear(second)[:, 1:3])
    assert torch.equal(merged.parts[1](second), counted.linear(second)[:, 1:3])
    assert torch.equal(merged.parts[0](second.clone()), counted.linear(second)[:, :1])
    assert counted.calls == calls + 4
