from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from engine.model.few_bits import FewBitsPacker
from engine.model.int8 import Int8Linear
from engine.model.loader import wrap_model
from engine.model.packing import pack_linear_layers
from engine.model.six_bits import HALF, MANY, SixBitsLinear, SixBitWeights, find_six_bits
from tests.model.odd_rows import check_odd_rows
from tests.operators import need_operators, rounded_to_eight_bits
from tests.tiny import few_bits, round_to_four_bits, round_to_six_bits, six_bits, tiny_model

SHAPES = [(256, 5), (512, 33), (256, 1000), (1536, 576)]


def make_layer(weight: torch.Tensor, bias: torch.Tensor | None = None) -> SixBitsLinear:
    found = find_six_bits(weight, need_operators())
    assert found is not None
    return SixBitsLinear(found, bias, need_operators())


def random_weights(outputs: int, inputs: int, seed: int = 0) -> SixBitWeights:
    """Of all numbers and steps there are, with scales of all sizes and both signs."""
    generator = torch.Generator().manual_seed(seed)

    def draw(low: int, high: int, *shape: int) -> torch.Tensor:
        return torch.randint(low, high, shape, generator=generator)

    magnitude = 2.0 ** draw(-14, 3, outputs, inputs // MANY)
    scales = magnitude * (1 + draw(0, 1024, outputs, inputs // MANY) / 1024) / 4096
    return SixBitWeights(
        draw(0, 64, outputs, inputs // HALF, HALF).to(torch.uint8),
        draw(-128, 128, outputs, inputs // HALF).to(torch.int8),
        (scales * (2 * draw(0, 2, outputs, inputs // MANY) - 1)).half(),
    )


@pytest.mark.parametrize(("in_features", "out_features"), SHAPES)
@pytest.mark.parametrize("kind", ["normal", "constant", "one large", "lowest", "highest"])
def test_it_is_exact_integer_arithmetic(in_features: int, out_features: int, kind: str) -> None:
    """The largest numbers on both sides, all of one sign, are where sums of 16 bits would be wrong."""
    weights = random_weights(out_features, in_features)
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(9, in_features, generator=generator)
    if kind == "constant":
        x = torch.full_like(x, -3.0)
    elif kind == "one large":
        x[:, 1] = 1e6
    elif kind in ("lowest", "highest"):
        weights.numbers.fill_(0 if kind == "lowest" else 63)
        weights.steps.fill_(-128)
        x = torch.ones_like(x) * torch.tensor([1.0, -1.0, 127.0] * 3)[:, None]
    bias = torch.randn(out_features, generator=generator)
    layer = SixBitsLinear(weights, bias, need_operators())
    assert torch.equal(layer.weight, weights.plain())
    expected = rounded_to_eight_bits(x) @ weights.plain().double().T + bias.double()
    # What is left is float32 in adding up the blocks.
    torch.testing.assert_close(
        layer(x).double(), expected, rtol=2e-6, atol=2e-6 * float(expected.abs().max())
    )


def test_sums_of_a_block_are_exact() -> None:
    """Of integers that float32 holds all results are, to the last digit."""
    weights = random_weights(40, MANY)
    weights.scales.fill_(0.5)
    numbers = torch.randint(-127, 128, (7, MANY), generator=torch.Generator().manual_seed(2))
    numbers[:, ::32] = 127
    numbers[2:4], weights.numbers[:3], weights.steps[:3] = -127, 0, -128
    # One block of inputs after the other, since all together do not fit.
    for begin in range(0, MANY, 32):
        x = torch.zeros(7, MANY)
        x[:, begin : begin + 32] = numbers[:, begin : begin + 32].float()
        expected = x.double() @ weights.plain().double().T
        assert torch.equal(SixBitsLinear(weights, None, need_operators())(x).double(), expected)


@pytest.mark.parametrize(("in_features", "out_features"), SHAPES)
@pytest.mark.parametrize("threads", [1, 2, 3])
def test_a_row_has_the_same_bits_in_any_batch(in_features: int, out_features: int, threads: int) -> None:
    layer = make_layer(six_bits(torch.randn(out_features, in_features)), torch.randn(out_features))
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


@pytest.mark.parametrize("magnitude", [1e-3, 0.02, 1.0, 300.0])
def test_weights_of_a_file_are_found_again(magnitude: float) -> None:
    """To within the last digit of float16, in which they are read."""
    weight = six_bits(torch.randn(50, 512, generator=torch.Generator().manual_seed(1)) * magnitude)
    assert torch.equal(make_layer(weight).weight.half(), weight.half())
    assert torch.equal(make_layer(weight.half()).weight.half(), weight.half())


def test_numbers_steps_and_scales_are_the_files_own() -> None:
    """Up to common divisors and signs: weights are what they were before float16 rounded them."""
    weights = random_weights(300, 512)
    # As llama.cpp has it: one step of each scale is -128.
    weights.steps[:, ::16] = -128
    found = find_six_bits(weights.plain().half(), need_operators())
    assert found is not None
    assert torch.equal(found.plain(), weights.plain())


@pytest.mark.parametrize(
    "used",
    [
        (100,),
        (127,),
        (3,),
        (100, 50),
        (96, 72, 24),
        (113, -57),
        (1, 2, 3, 5),
        (-90, 45, 30),
        tuple(range(1, 114)),
    ],
    ids=str,
)
@pytest.mark.parametrize("magnitude", [1.0, 2.0**-14])
def test_weights_of_files_with_any_largest_step_are_exact(used: tuple[int, ...], magnitude: float) -> None:
    """As float16 holds them: other steps and scales than the file's may round to the same weights.

    A scale has 11 bits, or few of them where it is very small.
    """
    weights = random_weights(300, 512)
    chosen = torch.randint(len(used), weights.steps.shape, generator=torch.Generator().manual_seed(6))
    weights.steps[:] = torch.tensor(used)[chosen]
    scales = 1 + torch.arange(600).view(300, 2) * 1.7 / 1024
    weights.scales[:] = scales * magnitude / 2
    for plain in (weights.plain(), weights.plain().half()):
        found = find_six_bits(plain, need_operators())
        assert found is not None
        assert torch.equal(found.plain().half(), plain.half())


def test_blocks_that_do_not_use_all_there_is() -> None:
    generator = torch.Generator().manual_seed(4)
    weights = random_weights(200, 512)
    weights.steps[:, ::16] = -128
    few = torch.tensor([0, 0, 1, 2, 3, 4, 6, 8, 16, 27, 31])[
        torch.randint(11, (60, 32, 1), generator=generator)
    ]
    numbers = (torch.randint(0, 32, (60, 32, HALF), generator=generator) * few / 31).round()
    weights.numbers[:60] = (32 - numbers).to(torch.uint8)
    weights.steps[20:40] = (weights.steps[20:40] / 8).round().to(torch.int8)
    weights.steps[40:50, 3::5] = 0
    weights.scales[50:55] = 0
    # Twice, or eight times, what it had to be.
    weights.numbers[60:80] = 2 * (weights.numbers[60:80] // 2)
    weights.numbers[80:100] = 8 * (weights.numbers[80:100] // 8)
    weights.numbers[100:120, ::16] = 2 * (weights.numbers[100:120, ::16] // 2)
    plain = weights.plain().half()
    found = find_six_bits(plain, need_operators())
    assert found is not None
    assert torch.equal(found.plain().half(), plain)


@pytest.mark.parametrize(
    "spoil",
    [
        lambda weight: torch.randn_like(weight),
        lambda weight: few_bits(torch.randn_like(weight), 5),
        lambda weight: few_bits(torch.randn_like(weight), 4),
        lambda weight: moved(weight, 77, 41, 1.004),
        lambda weight: moved(weight, 77, 41, 0.996),
        lambda weight: weight * torch.linspace(1, 1.01, 512),
        lambda weight: weight * torch.linspace(1, 2, 32).repeat_interleave(16),
        lambda weight: weight + 1e-3,
        lambda weight: weight * 1e-8,
        lambda weight: weight * 1e9,
        lambda weight: placed(weight, 3, 4, float("inf")),
        lambda weight: placed(weight, 3, 4, float("nan")),
        lambda weight: placed(torch.zeros_like(weight), 3, 4, float("nan")),
        lambda weight: torch.zeros_like(weight),
        lambda weight: weight.sign() * 0.3,
        lambda weight: torch.eye(256),
        lambda weight: weight[:, :256].repeat(1, 3)[:, :736],
        lambda weight: torch.arange(256.0).repeat(100, 2),
        lambda weight: in_eight_bits(weight),
    ],
    ids=[
        "random",
        "five bits",
        "four bits",
        "one weight more",
        "one weight less",
        "a slope",
        "steps of sixteen bits",
        "a least value",
        "too small",
        "too large",
        "infinite",
        "no number",
        "zeros and no number",
        "zeros",
        "signs",
        "ones",
        "no block",
        "numbers of eight bits",
        "eight bits",
    ],
)
def test_other_weights_are_not_taken_for_six_bits(spoil: Callable[[torch.Tensor], torch.Tensor]) -> None:
    weight = six_bits(torch.randn(100, 512, generator=torch.Generator().manual_seed(3)))
    assert find_six_bits(weight, need_operators()) is not None
    assert find_six_bits(spoil(weight), need_operators()) is None


def placed(weight: torch.Tensor, row: int, column: int, value: float) -> torch.Tensor:
    return weight.index_put((torch.tensor(row), torch.tensor(column)), torch.tensor(value))


def moved(weight: torch.Tensor, row: int, column: int, factor: float) -> torch.Tensor:
    assert weight[row, column] != 0
    return placed(weight, row, column, float(weight[row, column]) * factor)


def in_eight_bits(weight: torch.Tensor) -> torch.Tensor:
    """As Q8_0 has them."""
    blocks = weight.view(len(weight), -1, 32)
    scale = (blocks.abs().amax(2, keepdim=True) / 127).half().float()
    return ((blocks / scale).round() * scale).half().float().flatten(1)


def test_rows_of_all_kinds() -> None:
    layer = make_layer(six_bits(torch.randn(20, 256)), torch.arange(20.0))
    check_odd_rows(layer, rtol=2e-2, atol=1e30)
    with pytest.raises(RuntimeError, match="the layer has not 128 inputs"):
        layer(torch.randn(2, 128))


def test_layers_of_all_bits_side_by_side() -> None:
    """As in a file of the type Q4_K_M; rows of 48 are no blocks of any kind."""
    model = round_to_four_bits(tiny_model("llama", hidden_size=256, intermediate_size=512))
    six = ("model.layers.1.mlp.down_proj", "lm_head")
    for name in six:
        layer = model.get_submodule(name)
        assert isinstance(layer, torch.nn.Linear)
        layer.weight = torch.nn.Parameter(six_bits(layer.weight.data), requires_grad=False)
    attention = model.get_submodule("model.layers.0.self_attn.v_proj")
    assert isinstance(attention, torch.nn.Linear)
    attention.weight.data = six_bits(attention.weight.data)
    names = pack_linear_layers(model, FewBitsPacker(need_operators()))
    kinds = {name: type(model.get_submodule(name)) for name in names}
    assert {name for name, kind in kinds.items() if kind is SixBitsLinear} == set(six)
    assert {name for name, kind in kinds.items() if kind is Int8Linear} == {
        "model.layers.0.self_attn.qkv_proj.linear"
    }


def whole_blocks(arch: str, **config: Any) -> PreTrainedModel:
    """A tiny model all of whose layers have six bits."""
    config |= {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64, "initializer_range": 0.1}
    return round_to_six_bits(tiny_model(arch, **config))


@pytest.mark.parametrize("arch", ["llama", "qwen2", "gemma2", "mistral"])
def test_architectures_run_on_it(arch: str) -> None:
    """Against a model of the same weights in float32, its activations rounded alike."""
    plain, packed = (whole_blocks(arch, attention="eager") for _ in range(2))
    for layer in plain.modules():
        if isinstance(layer, torch.nn.Linear):
            layer.register_forward_pre_hook(lambda _, args: rounded_to_eight_bits(args[0][0]).float()[None])
    pack_linear_layers(packed, FewBitsPacker(need_operators()))
    assert sum(isinstance(layer, SixBitsLinear) for layer in packed.modules()) == 9
    tokens = torch.arange(40, 60)[None]
    with torch.inference_mode():
        expected = plain(tokens, use_cache=False).logits.log_softmax(-1)
        result = packed(tokens, use_cache=False).logits.log_softmax(-1)
    divergence = (expected.exp() * (expected - result)).sum(-1).mean()
    assert divergence < 1e-3


def test_a_model_of_six_bits_alone_says_so() -> None:
    module = whole_blocks("llama")
    assert wrap_model(module, None, name="a", dtype="int4", operators=need_operators()).weights == "int6"


def test_it_is_made_again_of_what_is_stored() -> None:
    packer = FewBitsPacker(need_operators())
    layer = packer.pack(six_bits(torch.randn(20, 512)), torch.randn(20))
    assert isinstance(layer, SixBitsLinear)
    again = packer.restore((20, 512), layer.stored())
    assert type(again) is SixBitsLinear
    x = torch.randn(3, 512)
    assert torch.equal(again(x), layer(x))
    assert torch.equal(again.weight, layer.weight)
