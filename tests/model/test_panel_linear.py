"""Parts of packed layers: some panels' outputs are the whole layer's, bit for bit."""

import pytest
import torch

from engine.model.few_bits import FewBitsPacker
from engine.model.int8 import Int8Packer
from engine.model.panel_linear import PANEL, PanelLinear
from tests.operators import need_operators
from tests.tiny import few_bits, six_bits

ROWS = 5 * PANEL + 3
KINDS = {"int8": lambda weight: weight, "int4": few_bits, "int5": lambda w: few_bits(w, 5), "int6": six_bits}


def packed(kind: str) -> PanelLinear:
    weight = KINDS[kind](torch.randn(ROWS, 512, generator=torch.Generator().manual_seed(0)))
    packer = Int8Packer(need_operators()) if kind == "int8" else FewBitsPacker(need_operators())
    layer = packer.pack(weight, torch.arange(float(ROWS)))
    assert layer.dtype == kind
    assert isinstance(layer, PanelLinear)
    return layer


@pytest.mark.parametrize("rows", [1, 3, 9])
@pytest.mark.parametrize("kind", KINDS)
def test_parts_give_what_the_layer_gives(kind: str, rows: int) -> None:
    layer = packed(kind)
    x = torch.randn(rows, 512, generator=torch.Generator().manual_seed(rows))
    whole = layer(x)
    first = layer.picked(slice(0, 3))
    assert torch.equal(first(x), whole[:, : 3 * PANEL])
    assert all(
        part.data_ptr() == own.data_ptr() for part, own in zip(first.packed[:2], layer.packed, strict=False)
    )
    some = layer.picked(torch.tensor([4, 0, 5]))(x)
    places = [*range(4 * PANEL, 5 * PANEL), *range(PANEL), *range(5 * PANEL, ROWS)]
    assert some.shape == (rows, 3 * PANEL)
    assert torch.equal(some[:, : len(places)], whole[:, places])
    assert layer.out_features == ROWS
    assert torch.equal(layer(x), whole)
