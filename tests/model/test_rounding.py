"""Layers of five and six bits in four: for models whose results are checked."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.config import DraftModelSpeculation, DType, ModelConfig
from engine.model.few_bits import FewBitsLinear, find_few_bits
from engine.model.loader import LoadedModel, load_causal_lm
from engine.model.rounding import RoundingPacker, round_to_four_bits
from engine.speculation.factory import load_drafts
from tests.operators import need_operators, share_operators
from tests.tiny import few_bits, save_tiny, six_bits


def normal(rows: int = 70, columns: int = 512) -> torch.Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(
    ("weight", "dtype"),
    [(few_bits(normal(), 5), "int5"), (six_bits(normal()), "int6")],
    ids=["five bits", "six bits"],
)
def test_more_bits_become_four_and_little_is_lost(weight: torch.Tensor, dtype: str) -> None:
    packer, bias = RoundingPacker(need_operators()), torch.arange(70.0)
    assert packer._exact.pack(weight, bias).dtype == dtype
    layer = packer.pack(weight, bias)
    assert isinstance(layer, FewBitsLinear)
    assert layer.dtype == "int4"
    # No worse than steps over each block's whole range but for what float16 rounds, and better on the whole.
    error, plain = (
        (ours - weight).view(70, -1, 32).square().sum(-1) for ours in (layer.weight, few_bits(weight))
    )
    assert bool((error <= plain * 1.02 + 1e-6).all())
    assert float(error.sum()) < 0.97 * float(plain.sum())
    stored = packer.restore((70, 512), layer.stored())
    x = normal(3)
    assert torch.equal(stored(x), layer(x))
    torch.testing.assert_close(layer(x), x @ layer.weight.T + bias, rtol=0.02, atol=0.5)


def test_four_bits_stay_as_they_are_and_eight_too() -> None:
    packer = RoundingPacker(need_operators())
    four = few_bits(normal())
    assert torch.equal(packer.pack(four, None).weight, packer._exact.pack(four, None).weight)
    assert packer.pack(normal(), None).dtype == "int8"


def test_weights_that_hardly_differ() -> None:
    """Equal ones, and steps that float16 does not have."""
    weight = torch.full((2, 64), 0.25)
    weight[1, :32] = torch.linspace(0, 1e-8, 32)
    rounded = round_to_four_bits(weight).plain()
    torch.testing.assert_close(rounded, weight, rtol=1e-3, atol=1e-7)


def test_a_loaded_model_is_rounded_and_kept_apart_from_the_exact_one(tmp_path: Path) -> None:
    need_operators()
    share_operators(tmp_path / "cache")
    folder = save_tiny(tmp_path / "model", hidden_size=256, intermediate_size=256, num_hidden_layers=1)
    _round_file(folder)
    config = ModelConfig(model=str(folder), device="cpu", offline=True, cache_dir=tmp_path / "cache")
    for _ in range(2):  # The second time from what the first one has kept.
        assert load_causal_lm(config).weights == "int5"
        assert load_causal_lm(config, rounds=True).weights == "int4"
    kept = sorted(path.name.partition("model-")[2][:12] for path in (tmp_path / "cache" / "packed").iterdir())
    assert len(kept) == 2
    assert kept[1].startswith("auto-rounded")


@pytest.mark.parametrize(
    ("dtype", "rounding", "weights"),
    [("auto", True, "int4"), ("int4", True, "int4"), ("auto", False, "int5"), ("int8", True, "int8")],
)
def test_drafts_are_rounded_and_targets_are_not(
    tmp_path: Path, dtype: DType, rounding: bool, weights: str
) -> None:
    need_operators()
    share_operators(tmp_path / "cache")
    folder = save_tiny(tmp_path / "model", hidden_size=64, intermediate_size=64, num_hidden_layers=1)
    _round_file(folder)
    config = ModelConfig(
        model=str(folder), device="cpu", offline=True, cache_dir=tmp_path / "cache", dtype=dtype
    )
    target = load_causal_lm(config)
    assert target.weights == ("int8" if dtype == "int8" else "int5")
    speculation = DraftModelSpeculation(draft_model=str(folder), draft_rounding=rounding)
    [draft] = load_drafts(speculation, target, config)
    assert isinstance(draft, LoadedModel)
    assert draft.weights == weights


def _round_file(folder: Path) -> None:
    """Gives all matrices of a saved model the weights of a file of five bits."""
    [path] = folder.glob("*.safetensors")
    tensors = load_file(path)
    for name, tensor in tensors.items():
        if tensor.dim() == 2:
            tensors[name] = few_bits(tensor, 5)
            assert find_few_bits(tensors[name], need_operators()) is not None, name
    save_file(tensors, path, {"format": "pt"})
