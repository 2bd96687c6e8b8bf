import logging

import pytest
import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from engine.model.linear import (
    FLOAT16_MAX,
    MAX_ROWS,
    Float16Packer,
    PackedLinear,
    RowPadding,
    packed_fp16_unavailable,
)
from engine.model.loader import wrap_model
from engine.model.packing import pack_linear_layers
from tests.operators import need_operators, operators
from tests.tiny import ARCHITECTURES, tiny_model

pytestmark = pytest.mark.skipif(packed_fp16_unavailable() is not None, reason="no FBGEMM on this machine")

# Odd sizes, sizes of small models, more columns than rows and the other way round.
SHAPES = [(8, 5), (96, 33), (64, 1000), (576, 1536), (1536, 576), (1000, 17)]


@pytest.fixture(scope="module")
def padding() -> RowPadding:
    return RowPadding.measure()


@pytest.mark.parametrize(("in_features", "out_features"), SHAPES)
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("built", [False, True])
def test_a_row_has_the_same_bits_in_any_batch(
    in_features: int, out_features: int, threads: int, built: bool, padding: RowPadding
) -> None:
    generator = torch.Generator().manual_seed(1)
    weight = torch.randn(out_features, in_features, generator=generator)
    bias = torch.randn(out_features, generator=generator)
    layer = PackedLinear(weight, bias, padding, need_operators() if built else None)
    rows = torch.randn(2 * MAX_ROWS + 3, in_features, generator=generator)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        all_at_once = layer(rows)
        for count in (*range(1, 41), MAX_ROWS - 1, MAX_ROWS, MAX_ROWS + 1, 2 * MAX_ROWS):
            assert torch.equal(layer(rows[:count]), all_at_once[:count]), count
            assert torch.equal(layer(rows[-count:]), all_at_once[-count:]), count
    finally:
        torch.set_num_threads(before)


def test_without_padding_the_bits_would_differ(padding: RowPadding) -> None:
    # If this stops failing on some machine, padding is merely idle there.
    layer = PackedLinear(torch.randn(64, 256), None, RowPadding(tuple(range(MAX_ROWS + 1))))
    rows = torch.randn(8, 256)
    alike = all(torch.equal(layer(rows[:count]), layer(rows)[:count]) for count in range(1, 9))
    assert alike == (padding.sizes[1:9] == tuple(range(1, 9)))


def test_padding_is_small(padding: RowPadding) -> None:
    assert padding.sizes[0] >= 0
    assert all(rows <= size <= rows + 3 for rows, size in enumerate(padding.sizes))


def test_weights_are_rounded_to_float16_and_nothing_else(padding: RowPadding) -> None:
    weight, bias, x = torch.randn(48, 200), torch.randn(48), torch.randn(3, 5, 200)
    exact = x.double() @ weight.half().double().T + bias.double()
    result = PackedLinear(weight, bias, padding)(x)
    assert result.shape == (3, 5, 48)
    assert result.dtype == torch.float32
    # Sums of 200 products in float32.
    assert torch.allclose(result.double(), exact, atol=1e-4, rtol=0)


@pytest.mark.parametrize("num_rows", [0, 1, 7, MAX_ROWS, MAX_ROWS + 1, 3 * MAX_ROWS])
def test_the_operator_does_what_torch_does(num_rows: int, padding: RowPadding) -> None:
    weight, bias, x = torch.randn(48, 200), torch.randn(48), torch.randn(1, num_rows, 200)
    layers = [PackedLinear(weight, bias, padding, built) for built in (None, need_operators())]
    assert torch.equal(layers[0](x), layers[1](x))
    # Rows that are not dense, as a slice of a merged matrix gives them.
    wide = torch.randn(2, 5, 300)[..., 50:250]
    assert torch.equal(layers[0](wide), layers[1](wide))


def test_no_rows(padding: RowPadding) -> None:
    assert PackedLinear(torch.randn(4, 8), None, padding)(torch.empty(1, 0, 8)).shape == (1, 0, 4)


def test_the_weight_can_be_had_again(padding: RowPadding) -> None:
    weight = torch.randn(6, 9)
    assert torch.equal(PackedLinear(weight, None, padding).weight, weight.half().float())


def test_linear_and_conv1d_are_replaced_and_their_weights_freed() -> None:
    module = nn.Sequential(nn.Linear(8, 6), nn.Sequential(Conv1D(4, 6)), nn.LayerNorm(4)).requires_grad_(
        False
    )
    _round_weights(module)
    x = torch.randn(7, 8)
    expected = module(x)
    assert pack_linear_layers(module, Float16Packer()) == ("0", "1.0")
    assert torch.allclose(module(x), expected, atol=1e-5)
    assert [name for name, _ in module.named_parameters()] == ["2.weight", "2.bias"]


@pytest.mark.parametrize("value", [FLOAT16_MAX * 1.01, -7e4, float("inf"), float("nan")])
def test_a_layer_that_float16_cannot_hold_stays_and_is_named(
    value: float, caplog: pytest.LogCaptureFixture
) -> None:
    bad = nn.Linear(4, 4)
    module = nn.Sequential(nn.Linear(8, 4), nn.Sequential(bad)).requires_grad_(False)
    bad.weight[2, 1] = value
    with caplog.at_level(logging.WARNING):
        assert pack_linear_layers(module, Float16Packer()) == ("0",)
    assert module.get_submodule("1.0") is bad
    assert "layer 1.0 stays in float32" in caplog.text


def test_the_largest_float16_is_packed() -> None:
    layer = nn.Linear(8, 4).requires_grad_(False)
    layer.weight[0, 0] = FLOAT16_MAX
    module = nn.Sequential(layer)
    assert pack_linear_layers(module, Float16Packer()) == ("0",)
    packed = module.get_submodule("0")
    assert isinstance(packed, PackedLinear)
    assert packed.weight[0, 0] == FLOAT16_MAX


def test_a_tied_head_is_packed_and_the_embedding_stays() -> None:
    module = tiny_model("llama", tie_word_embeddings=True)
    before = module.get_input_embeddings().weight.clone()
    assert module.lm_head.weight.data_ptr() == module.get_input_embeddings().weight.data_ptr()
    wrap_model(module, None, name="tied", dtype="float16")
    assert isinstance(module.lm_head, PackedLinear)
    assert torch.equal(module.get_input_embeddings().weight, before)


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_every_architecture_runs_on_packed_weights(arch: str) -> None:
    plain, packed = tiny_model(arch, attention="eager"), tiny_model(arch, attention="eager")
    _round_weights(plain)
    assert len(pack_linear_layers(packed, Float16Packer(operators()))) >= 5
    tokens = torch.arange(40, 60)[None]
    with torch.inference_mode():
        expected = plain(tokens, use_cache=False).logits
        result = packed(tokens, use_cache=False).logits
    # The same weights, summed in another order.
    assert torch.allclose(result, expected, atol=1e-3, rtol=0)


def _round_weights(module: nn.Module) -> None:
    """Rounds linear weights to float16; a head that is tied to the embedding gets a copy of its own."""
    for layer in module.modules():
        if isinstance(layer, nn.Linear | Conv1D):
            layer.weight = nn.Parameter(layer.weight.half().float(), requires_grad=False)
