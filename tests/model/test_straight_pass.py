"""A stacked model's pass without transformers' own: used where every bit is the same, and only there."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from transformers import PreTrainedModel

from engine.model.attention.cpu import CpuAttention
from engine.model.hidden_states import HiddenSelection
from engine.model.input_batch import SequenceSlice
from engine.model.kv_cache import LayerShape, PagedKVCache
from engine.model.layer_stack import stack_layers
from engine.model.model_runner import ModelRunner
from engine.model.straight_pass import StraightBase, StraightModel, straighten
from tests.model.test_layer_stack import STACKED, answers, packed_model
from tests.operators import need_operators

Shapes = tuple[LayerShape, ...]


def stacked_model(arch: str) -> tuple[PreTrainedModel, Shapes]:
    module, shapes = packed_model(arch)
    assert stack_layers(module, shapes, need_operators())
    return module, shapes


def is_straight(module: PreTrainedModel) -> bool:
    return isinstance(module.forward, StraightModel) or isinstance(module.base_model.forward, StraightBase)


@pytest.mark.parametrize("arch", STACKED)
def test_every_bit_is_that_of_the_models_own_pass(arch: str) -> None:
    module, shapes = stacked_model(arch)
    expected = answers(module, shapes)
    assert straighten(module, shapes, need_operators())
    assert is_straight(module)
    for ours, theirs in zip(answers(module, shapes), expected, strict=True):
        assert torch.equal(ours, theirs)


def test_hidden_states_are_still_caught() -> None:
    module, shapes = stacked_model("llama")

    def caught() -> list[torch.Tensor]:
        cache = PagedKVCache(shapes, 16, 4, torch.float32, module.device)
        runner = ModelRunner(module, cache, CpuAttention(need_operators()), 1000)
        batch = runner.build([SequenceSlice([5, 6, 7], 0, [3])])
        tapped = runner.forward_tapped(batch, runner.tap(HiddenSelection(layers=(0, 1, 2), last=True)))
        return [tapped.features, tapped.logits]

    expected = caught()
    assert straighten(module, shapes, need_operators())
    for ours, theirs in zip(caught(), expected, strict=True):
        assert torch.equal(ours, theirs)


def override(module: nn.Module, forward: Callable[..., object]) -> None:
    """Gives a module another forward, as another class would."""
    module.__class__ = type("Other", (type(module),), {"forward": forward})


def scale_embeddings(module: PreTrainedModel) -> None:
    """As Gemma does, in the base model's own forward."""
    base = module.base_model
    own, embedding = base.forward, module.get_input_embeddings()

    def forward(
        _: nn.Module, *, input_ids: torch.Tensor, position_ids: torch.Tensor, **others: Any
    ) -> object:
        embedded = embedding(input_ids) * 1.5
        return own(inputs_embeds=embedded, position_ids=position_ids, outrider=others["outrider"])

    override(base, forward)


def scale_logits(module: PreTrainedModel) -> None:
    """As Granite and Cohere do."""
    own = module.forward

    def forward(_: nn.Module, *, logits_to_keep: torch.Tensor, **others: Any) -> object:
        output = own(logits_to_keep=logits_to_keep, **others)
        output.logits = output.logits / 2
        return output

    override(module, forward)


def turn_far_positions(module: PreTrainedModel) -> None:
    """A pass that hands its rotary positions others, from the middle of the context on."""
    base = module.base_model
    own, middle = base.forward, module.config.max_position_embeddings // 2

    def forward(_: nn.Module, *, position_ids: torch.Tensor, **others: Any) -> object:
        return own(position_ids=torch.where(position_ids > middle, position_ids - 1, position_ids), **others)

    override(base, forward)


@pytest.mark.parametrize("change", [scale_embeddings, scale_logits, turn_far_positions])
def test_a_pass_that_does_more_is_found_out(
    change: Callable[[PreTrainedModel], None], caplog: pytest.LogCaptureFixture
) -> None:
    module, shapes = stacked_model("llama")
    change(module)
    expected = answers(module, shapes)
    with caplog.at_level("INFO"):
        assert not straighten(module, shapes, need_operators())
    assert "the result is another" in caplog.text
    for ours, theirs in zip(answers(module, shapes), expected, strict=True):
        assert torch.equal(ours, theirs)


def test_a_model_of_other_parts_keeps_its_own_pass(caplog: pytest.LogCaptureFixture) -> None:
    module, shapes = stacked_model("llama")
    module.base_model.add_module("extra", nn.Linear(2, 2))
    with caplog.at_level("INFO"):
        assert not straighten(module, shapes, need_operators())
    assert "more around its layers" in caplog.text
    assert not is_straight(module)


def test_rotary_positions_that_are_called_in_another_way_keep_the_models_own_pass(
    caplog: pytest.LogCaptureFixture,
) -> None:
    module, shapes = stacked_model("llama")
    rotary = module.base_model.rotary_emb
    own = rotary.forward
    # As in models whose layers differ in their positions, whose pass calls it once for each kind.
    override(rotary, lambda _, x, positions: own(x, positions))
    override(module.base_model, with_rotary(module.base_model.forward))
    with caplog.at_level("INFO"):
        assert not straighten(module, shapes, need_operators())
    assert "called in another way" in caplog.text
    assert not is_straight(module)


def with_rotary(own: Callable[..., Any]) -> Callable[..., object]:
    """A base model's forward that calls a rotary module of positional arguments."""

    def forward(base: Any, **arguments: Any) -> object:
        rotary = base.rotary_emb
        base.rotary_emb = Named(rotary)
        try:
            return own(**arguments)
        finally:
            base.rotary_emb = rotary

    return forward


class Named(nn.Module):
    """Calls a module of positional arguments by name."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self._inner = inner

    def forward(self, x: torch.Tensor, position_ids: torch.Tensor) -> object:
        return self._inner(x, position_ids)
