"""Rows that a packed layer may meet besides ordinary ones."""

import torch

from engine.model.few_bits import FewBitsLinear
from engine.model.int8 import Int8Linear
from engine.model.six_bits import SixBitsLinear


def check_odd_rows(layer: Int8Linear | FewBitsLinear | SixBitsLinear, *, rtol: float, atol: float) -> None:
    """Zeros, tiny and huge numbers, and what is not finite, each in its own row; none at all.

    Args:
        layer: With a bias of 0, 1, 2, ...
        rtol: By how much huge rows may differ,
        atol: likewise.
    """
    outputs, inputs = layer.weight.shape
    bias = torch.arange(float(outputs))
    x = torch.randn(2, 3, inputs)
    x[0, 0] = 0
    x[0, 1, 5] = float("nan")
    x[1, 0, -1] = float("inf")
    x[1, 1] = 1e-40
    x[1, 2] *= 1e30
    result = layer(x)
    assert torch.equal(result[0, 0], bias)
    assert torch.isnan(result[0, 1]).all()
    assert torch.isnan(result[1, 0]).all()
    assert torch.equal(result[1, 1], bias)
    torch.testing.assert_close(result[1, 2], x[1, 2] @ layer.weight.T, rtol=rtol, atol=atol)
    assert layer(torch.empty(1, 0, inputs)).shape == (1, 0, outputs)
