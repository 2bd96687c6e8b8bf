import pytest
import torch
from torch import nn

from engine.model.few_bits import BLOCK, FEW_BITS, FewBitsLinear, FewBitsPacker, find_few_bits
from engine.model.int8 import Int8Linear
from engine.model.packing import pack_linear_layers
from tests.model.odd_rows import check_odd_rows
from tests.operators import need_operators, rounded_to_eight_bits
from tests.tiny import few_bits, round_to_four_bits, tiny_model

SHAPES = [(32, 5), (96, 33), (64, 1000), (576, 960), (1536, 576)]


def make_layer(weight: torch.Tensor, bias: torch.Tensor | None = None) -> FewBitsLinear:
    found = find_few_bits(weight, need_operators())
    assert found is not None
    return FewBitsLinear(found, bias, need_operators())


def exact(layer: FewBitsLinear, x: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """Activations rounded to 8 bits block by block, everything else in float64."""
    result: torch.Tensor = rounded_to_eight_bits(x) @ layer.weight.double().T + bias.double()
    return result


@pytest.mark.parametrize(("in_features", "out_features"), SHAPES)
@pytest.mark.parametrize("kind", ["normal", "constant", "one large", "largest"])
@pytest.mark.parametrize("bits", FEW_BITS)
def test_it_is_exact_integer_arithmetic(in_features: int, out_features: int, kind: str, bits: int) -> None:
    """The largest numbers on both sides, all of one sign, are where 16-bit sums would saturate."""
    generator = torch.Generator().manual_seed(0)
    weight = few_bits(torch.randn(out_features, in_features, generator=generator), bits)
    x = torch.randn(9, in_features, generator=generator)
    if kind == "constant":
        x = torch.full_like(x, -3.0)
    elif kind == "one large":
        x[:, 1] = 1e6
    elif kind == "largest":
        weight = torch.full_like(weight, 2.0**bits - 1)
        weight[:, ::BLOCK], weight[:, 1::BLOCK] = 0.0, 2.0**bits - 2
        x = x.abs().sign() * torch.tensor([1.0, -1.0, 127.0] * 3)[:, None]
    bias = torch.randn(out_features, generator=generator)
    layer = make_layer(weight, bias)
    assert layer.dtype == f"int{bits}"
    expected = exact(layer, x, bias)
    # What is left is float32 in adding up the blocks.
    torch.testing.assert_close(
        layer(x).double(), expected, rtol=2e-6, atol=2e-6 * float(expected.abs().max())
    )


@pytest.mark.parametrize(("in_features", "out_features"), SHAPES)
@pytest.mark.parametrize(("threads", "bits"), [(1, 4), (2, 4), (3, 4), (2, 5), (3, 5)])
def test_a_row_has_the_same_bits_in_any_batch(
    in_features: int, out_features: int, threads: int, bits: int
) -> None:
    layer = make_layer(few_bits(torch.randn(out_features, in_features), bits), torch.randn(out_features))
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


@pytest.mark.parametrize("magnitude", [1e-3, 0.05, 1.0, 300.0])
@pytest.mark.parametrize("bits", FEW_BITS)
def test_weights_of_a_file_are_found_again(magnitude: float, bits: int) -> None:
    weight = few_bits(torch.randn(50, 96, generator=torch.Generator().manual_seed(1)) * magnitude, bits)
    layer = make_layer(weight)
    # Both sides are float16 once more: what is left is at most its last digit, of few.
    assert ((layer.weight - weight).abs() <= weight.abs().max() / 1024).all()
    assert (layer.weight.half() == weight.half()).float().mean() > 0.99


@pytest.mark.parametrize("scale", [0.01, 2.0**-20, 2.0**-24])
def test_blocks_that_do_not_use_all_steps(scale: float) -> None:
    """Of very small weights float16 has few digits: any steps but the file's own it would not hold."""
    generator = torch.Generator().manual_seed(2)
    scale = float(torch.tensor(scale).half())
    few = [torch.randint(0, steps, (2, BLOCK), generator=generator) for steps in range(1, 33)]
    doubled = [2 * numbers[:, : BLOCK // 2].repeat(1, 2) for numbers in few[:8]]
    full = torch.randint(0, 16, (60, BLOCK), generator=generator)
    weight = ((torch.cat([full, *few, *doubled]) - 4) * scale).half().float()
    layer = make_layer(weight)
    torch.testing.assert_close(layer.weight, weight, rtol=1e-3, atol=scale / 100)


def test_constant_blocks() -> None:
    full = torch.arange(BLOCK)[None] % 16
    weight = torch.cat((full.expand(4, -1), torch.tensor([0.0, 0.25, -3.0])[:, None].expand(3, BLOCK)))
    assert torch.equal(make_layer(weight).weight, weight)


@pytest.mark.parametrize(
    "spoil",
    [
        lambda weight: torch.randn_like(weight),
        lambda weight: weight.index_put((torch.tensor(77), torch.tensor(40)), torch.tensor(0.033)),
        lambda weight: weight * 1e-8,
        lambda weight: weight * 1e6,
        lambda weight: weight.index_put((torch.tensor(3), torch.tensor(4)), torch.tensor(float("inf"))),
        lambda weight: weight.index_put((torch.tensor(3), torch.tensor(4)), torch.tensor(float("nan"))),
        lambda weight: weight.zero_().index_put(
            (torch.tensor(3), torch.tensor(4)), torch.tensor(float("nan"))
        ),
        lambda weight: torch.zeros_like(weight),
        lambda weight: weight.sign() * 0.3,
        lambda weight: torch.eye(64),
        lambda weight: nn.functional.pad(weight, (0, 1)),
        lambda weight: torch.arange(32.0).square().repeat(100, 2),
    ],
    ids=[
        "random",
        "one weight",
        "too small",
        "too large",
        "infinite",
        "no number",
        "zeros and no number",
        "zeros",
        "signs",
        "ones",
        "no block",
        "squares",
    ],
)
def test_other_weights_are_not_taken_for_four_bits(spoil: object) -> None:
    weight = few_bits(torch.randn(100, 64, generator=torch.Generator().manual_seed(3)))
    assert find_few_bits(weight, need_operators()) is not None
    assert callable(spoil)
    assert find_few_bits(spoil(weight), need_operators()) is None


@pytest.mark.parametrize(("bits", "dtype"), [(4, "int4"), (5, "int5"), (6, "int8"), (8, "int8")])
def test_files_of_all_sizes(bits: int, dtype: str) -> None:
    generator = torch.Generator().manual_seed(bits)
    scale = torch.rand(40, 2, 1, generator=generator) + 0.5
    numbers = torch.randint(0, 2**bits, (40, 2, BLOCK), generator=generator)
    weight = ((numbers - 2 ** (bits - 1)) * scale.half()).half().float().flatten(1)
    assert FewBitsPacker(need_operators()).pack(weight, None).dtype == dtype


def test_rows_of_all_kinds() -> None:
    layer = make_layer(few_bits(torch.randn(20, 64)), torch.arange(20.0))
    check_odd_rows(layer, rtol=2e-2, atol=1e29)


def test_rows_of_another_width_are_refused() -> None:
    four, eight = (
        make_layer(few_bits(torch.randn(20, 64))),
        Int8Linear(torch.randn(20, 64), None, need_operators()),
    )
    for layer, width in ((four, 32), (four, 128), (eight, 128)):
        with pytest.raises(RuntimeError, match=rf"the layer has not {width} inputs"):
            layer(torch.randn(2, width))


def test_layers_that_have_four_bits_keep_them_and_others_have_eight() -> None:
    """Feed-forward layers of this model have 48 numbers between them, which are no whole blocks."""
    model = round_to_four_bits(tiny_model("llama"))
    names = pack_linear_layers(model, FewBitsPacker(need_operators()))
    kinds = {name: type(model.get_submodule(name)) for name in names}
    assert {name for name, kind in kinds.items() if kind is Int8Linear} == {
        f"model.layers.{index}.mlp.down_proj" for index in range(2)
    }
    assert sum(kind is FewBitsLinear for kind in kinds.values()) == 7


@pytest.mark.parametrize("arch", ["llama", "qwen2", "gemma2", "mistral"])
def test_architectures_run_on_it(arch: str) -> None:
    plain, packed = (round_to_four_bits(tiny_model(arch, attention="eager")) for _ in range(2))
    assert len(pack_linear_layers(packed, FewBitsPacker(need_operators()))) >= 5
    assert any(isinstance(layer, FewBitsLinear) for layer in packed.modules())
    tokens = torch.arange(40, 60)[None]
    with torch.inference_mode():
        expected = plain(tokens, use_cache=False).logits.log_softmax(-1)
        result = packed(tokens, use_cache=False).logits.log_softmax(-1)
    divergence = (expected.exp() * (expected - result)).sum(-1).mean()
    assert divergence < 0.02


def test_it_is_made_again_of_what_is_stored() -> None:
    packer = FewBitsPacker(need_operators())
    for weight in (*(few_bits(torch.randn(20, 64), bits) for bits in FEW_BITS), torch.randn(20, 64)):
        layer = packer.pack(weight, torch.randn(20))
        again = packer.restore((20, 64), layer.stored())
        assert type(again) is type(layer)
        x = torch.randn(3, 64)
        assert torch.equal(again(x), layer(x))
        assert torch.equal(again.weight, layer.weight)
