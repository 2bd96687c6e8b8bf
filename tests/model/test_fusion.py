import pytest
import torch
from torch import nn
from torch.nn import functional

from engine.model.fused_layers import FusedAttention, FusedMlp, FusedNorm
from engine.model.fusion import fuse_layers, fused_mlp, fused_norm
from tests.operators import need_operators
from tests.tiny import tiny_model

# Norms, feed-forward layers and attention of two layers. What is missing has another formula or other names.
EXPECTED = {
    "llama": (5, 2, 2),
    "qwen2": (5, 2, 2),
    "mistral": (5, 2, 2),
    "gemma2": (9, 2, 2),
    "mixtral": (5, 0, 2),
    "qwen3": (9, 2, 0),
    "gpt2": (0, 0, 0),
}


@pytest.mark.parametrize("arch", EXPECTED)
def test_what_is_fused(arch: str) -> None:
    module = tiny_model(arch)
    kinds = [part.settings.kind for part in fuse_layers(module, need_operators())]
    assert tuple(kinds.count(kind) for kind in ("norm", "feed-forward", "attention")) == EXPECTED[arch]
    for kind, count in zip((FusedNorm, FusedMlp, FusedAttention), EXPECTED[arch], strict=True):
        assert sum(isinstance(layer, kind) for layer in module.modules()) == count


@pytest.mark.parametrize("size", [8, 20, 576])
def test_norms(size: int) -> None:
    weight, x = torch.randn(size), torch.randn(2, 7, size) * 5
    fused = FusedNorm(weight, 1e-5, need_operators())
    torch.testing.assert_close(fused(x), functional.rms_norm(x, (size,), weight, 1e-5))
    wide = torch.randn(2, 7, 2 * size)[..., :size]
    torch.testing.assert_close(fused(wide), functional.rms_norm(wide, (size,), weight, 1e-5))
    assert torch.equal(fused(x)[1, 3], fused(x[1, 3]))
    x[0, 0, 0] = float("nan")
    assert torch.isnan(fused(x)[0, 0]).all()
    assert torch.isfinite(fused(x)[0, 1:]).all()


@pytest.mark.parametrize("size", [5, 48, 1536])
def test_gates(size: int) -> None:
    x = torch.cat(
        [torch.randn(3, 2 * size) * 4, torch.full((1, 2 * size), 200.0), torch.full((1, 2 * size), -200.0)]
    )
    gate, up = x[:, :size], x[:, size:]
    operators = need_operators()
    torch.testing.assert_close(operators.gate_silu(x), functional.silu(gate) * up)
    gelu = functional.gelu(gate, approximate="tanh") * up
    torch.testing.assert_close(operators.gate_gelu_tanh(x), gelu, atol=1e-5, rtol=1e-5)
    for row in range(5):
        assert torch.equal(operators.gate_silu(x[row : row + 1])[0], operators.gate_silu(x)[row])
    x[1, 0] = float("nan")
    assert torch.isnan(operators.gate_silu(x)[1, 0])
    assert torch.isnan(operators.gate_gelu_tanh(x)[1, 0])


class Norm(nn.Module):
    """An RMSNorm with a twist, or none."""

    def __init__(self, twist: str) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(16), requires_grad=False)
        self.eps = 1e-6
        self._twist = twist

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self._twist == "mean":
            x = x - x.mean(-1, keepdim=True)
        eps = 1e-5 if self._twist == "eps" else self.eps
        weight = self.weight + 1 if self._twist == "plus one" else self.weight
        return functional.rms_norm(x, (16,), weight, eps)


@pytest.mark.parametrize(
    ("twist", "equal"), [("", True), ("plus one", True), ("mean", False), ("eps", False)]
)
def test_a_norm_of_another_formula_stays(twist: str, equal: bool) -> None:
    assert (fused_norm(Norm(twist), need_operators()) is not None) == equal


@pytest.mark.parametrize(
    ("activation", "equal"), [("silu", True), ("gelu_pytorch_tanh", True), ("relu", False)]
)
def test_a_feed_forward_layer_of_another_activation_stays(activation: str, equal: bool) -> None:
    mlp = tiny_model("llama", hidden_act=activation).model.layers[0].mlp
    assert (fused_mlp(mlp, need_operators()) is not None) == equal


def test_biases_are_merged() -> None:
    module = tiny_model("llama", attention_bias=True, mlp_bias=True)
    for name, parameter in module.named_parameters():
        if name.endswith("bias"):
            parameter.data.normal_()
    kinds = [part.settings.kind for part in fuse_layers(module, need_operators())]
    assert kinds.count("attention") == 2
