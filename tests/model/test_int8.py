import pytest
import torch
from torch import nn

from engine.model.int8 import BLOCK, Int8Linear, Int8Packer, block_scales
from engine.model.packing import pack_linear_layers
from tests.model.odd_rows import check_odd_rows
from tests.operators import need_operators
from tests.tiny import ARCHITECTURES, tiny_model

SHAPES = [(8, 5), (96, 33), (64, 1000), (576, 960), (1536, 576), (1000, 17)]


def exact(layer: Int8Linear, x: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """The same sums in Python's way: integers block by block, the blocks weighted in float64."""
    peaks = x.abs().amax(-1, keepdim=True)
    rounded = torch.round(x * (torch.tensor(32767.0) / peaks)).to(torch.int64)
    padded = nn.functional.pad(rounded, (0, -x.shape[1] % BLOCK)).view(x.shape[0], -1, BLOCK)
    weight = nn.functional.pad(layer.weight, (0, -x.shape[1] % BLOCK))
    scales = block_scales_of(layer)
    numbers = torch.round(weight.view(len(weight), -1, BLOCK) / scales[..., None]).to(torch.int64)
    products = torch.einsum("mbk,nbk->mnb", padded, numbers)  # Exact.
    sums = (products.double() * scales.double()).sum(-1)
    return sums * (peaks.double() / 32767) + bias.double()


def block_scales_of(layer: Int8Linear) -> torch.Tensor:
    scales = layer._scales.permute(0, 2, 1).flatten(0, 1)[: layer.out_features]
    return scales.float()


@pytest.mark.parametrize(("in_features", "out_features"), SHAPES)
@pytest.mark.parametrize("kind", ["normal", "constant", "one large", "alternating"])
def test_it_is_exact_integer_arithmetic(in_features: int, out_features: int, kind: str) -> None:
    """Constant and extreme rows are where 8-bit kernels saturate."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(out_features, in_features, generator=generator)
    x = torch.randn(9, in_features, generator=generator)
    if kind == "constant":
        weight, x = torch.full_like(weight, 0.02), torch.full_like(x, -3.0)
    elif kind == "one large":
        weight[:, 0], x[:, 1] = 1e3, 1e6
    elif kind == "alternating":
        weight, x = weight.sign(), x.sign()
    bias = torch.randn(out_features, generator=generator)
    layer = Int8Linear(weight, bias, need_operators())
    expected = exact(layer, x, bias)
    # What is left is float32 in adding up the blocks.
    torch.testing.assert_close(
        layer(x).double(), expected, rtol=2e-6, atol=2e-6 * float(expected.abs().max())
    )


@pytest.mark.parametrize(("in_features", "out_features"), SHAPES)
@pytest.mark.parametrize("threads", [1, 2, 3])
def test_a_row_has_the_same_bits_in_any_batch(in_features: int, out_features: int, threads: int) -> None:
    layer = Int8Linear(torch.randn(out_features, in_features), torch.randn(out_features), need_operators())
    rows = torch.randn(80, in_features)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        all_at_once = layer(rows)
        for count in range(1, 20):
            assert torch.equal(layer(rows[:count]), all_at_once[:count]), count
            assert torch.equal(layer(rows[-count:]), all_at_once[-count:]), count
    finally:
        torch.set_num_threads(before)
    torch.set_num_threads(1)
    assert torch.equal(layer(rows), all_at_once)
    torch.set_num_threads(before)


def test_weights_are_rounded_by_half_a_step_at_most() -> None:
    weight = torch.randn(40, 200) * torch.logspace(-6, 3, 40)[:, None]
    weight[3] = 0
    layer = Int8Linear(weight, None, need_operators())
    padded = nn.functional.pad(weight, (0, -200 % BLOCK))
    steps = block_scales(padded).float().repeat_interleave(BLOCK, dim=1)[:, :200]
    assert ((layer.weight - weight).abs() <= steps / 2 * 1.0001).all()
    # bfloat16 rounds a scale up by less than one part in 128.
    largest = padded.view(40, -1, BLOCK).abs().amax(-1)
    used = largest > 0
    ratio = block_scales(padded).float()[used] * 127 / largest[used]
    assert ((ratio >= 0.999999) & (ratio <= 1 + 1 / 128)).all()


def test_rows_of_all_kinds() -> None:
    layer = Int8Linear(torch.randn(20, 70), torch.arange(20.0), need_operators())
    check_odd_rows(layer, rtol=1e-3, atol=1e27)


def test_a_layer_that_is_not_finite_stays() -> None:
    module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).requires_grad_(False)
    module.state_dict()["1.weight"][0, 0] = float("inf")
    assert pack_linear_layers(module, Int8Packer(need_operators())) == ("0",)
    assert isinstance(module.get_submodule("0"), Int8Linear)


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_every_architecture_runs_on_it(arch: str) -> None:
    plain, packed = tiny_model(arch, attention="eager"), tiny_model(arch, attention="eager")
    assert len(pack_linear_layers(packed, Int8Packer(need_operators()))) >= 5
    tokens = torch.arange(40, 60)[None]
    with torch.inference_mode():
        expected = plain(tokens, use_cache=False).logits.log_softmax(-1)
        result = packed(tokens, use_cache=False).logits.log_softmax(-1)
    divergence = (expected.exp() * (expected - result)).sum(-1).mean()
    assert divergence < 0.02
