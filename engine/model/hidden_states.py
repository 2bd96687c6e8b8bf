"""Hidden states of a forward pass, for draft heads that read them; passes that are not asked pay nothing.

Numbers are those of transformers' `output_hidden_states`: state i is the residual stream into layer i, that
is, what layer i - 1 gave. Hooks catch them where a model's layers are called one by one; where all layers are
one operator, it writes them out (`layer_stack`).
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from engine.errors import ModelNotSupported, StartupError
from engine.model.attention.interface import ResidualSink


@dataclass(frozen=True, slots=True)
class HiddenSelection:
    """Which hidden states are wanted. They lie side by side in a row, in this order.

    Attributes:
        layers: Layers whose input is wanted, from 0; the number of layers stands for what the last one gives,
            before the final norm.
        last: Whether the state after the final norm is wanted too, the one that lm_head sees.
    """

    layers: tuple[int, ...] = ()
    last: bool = False

    @property
    def num_states(self) -> int:
        """States in a row."""
        return len(self.layers) + self.last


@dataclass(slots=True)
class _Caught:
    """What one pass has given so far: states [T, hidden_size]."""

    sink: ResidualSink
    last: torch.Tensor | None = field(default=None)


class HiddenStateTap:
    """Catches hidden states of a model.

    Args:
        module: A causal language model.
        selection: Which ones; at least one.

    Raises:
        StartupError: The model has no such layer.
        ModelNotSupported: Its layers cannot be told apart.
    """

    def __init__(self, module: PreTrainedModel, selection: HiddenSelection) -> None:
        if module.base_model is module:
            raise ModelNotSupported(
                f"{type(module).__name__} keeps no base model apart from its output layer, so the hidden "
                "states that a draft head reads cannot be found; choose speculation without a head"
            )
        self._selection = selection
        self._base = module.base_model
        _, self._layers = decoder_layers(module)
        count: int = module.config.get_text_config().num_hidden_layers
        if selection.layers and not self._layers:
            raise ModelNotSupported(
                f"the decoder layers of {type(module).__name__} cannot be found, and with them the hidden "
                "states that a draft head reads; choose speculation without a head"
            )
        for layer in selection.layers:
            if not 0 <= layer <= count:
                raise StartupError(
                    f"hidden state {layer} is wanted, but the model has {count} layers: states 0 to {count}"
                )

    @contextmanager
    def listen(self) -> Iterator[_Caught]:
        """What the one forward pass inside the block gives; `rows` takes it."""
        caught = _Caught(ResidualSink(self._selection.layers))
        handles = []
        if self._selection.last:
            handles.append(self._base.register_forward_hook(_last_of(caught)))
        for number in set(self._selection.layers):
            # Layers inside of one operator are never called: their hooks are silent, the operator speaks.
            if number < len(self._layers):
                hook = _input_of(caught, number)
                handles.append(self._layers[number].register_forward_pre_hook(hook, with_kwargs=True))
            else:
                handles.append(self._layers[-1].register_forward_hook(_output_of(caught, number)))
        try:
            yield caught
        finally:
            for handle in handles:
                handle.remove()

    def rows(self, caught: _Caught) -> torch.Tensor:
        """The wanted states side by side.

        Returns:
            [T, num_states * hidden_size], in the model's type.

        Raises:
            RuntimeError: A state did not come by.
        """
        states = [caught.sink.states.get(layer) for layer in self._selection.layers]
        if self._selection.last:
            states.append(caught.last)
        found = [state for state in states if state is not None]
        if len(found) < len(states):
            raise RuntimeError(f"{len(found)} of {len(states)} hidden states came by in a forward pass")
        return found[0] if len(found) == 1 else torch.cat(found, dim=-1)


def decoder_layers(module: PreTrainedModel) -> tuple[str, nn.ModuleList]:
    """The first list of as many modules as the config has layers, and its name; empty if there is none."""
    for name, child in module.named_modules():
        if (
            isinstance(child, nn.ModuleList)
            and len(child) == module.config.get_text_config().num_hidden_layers
        ):
            return name, child
    return "", nn.ModuleList()


def _input_of(caught: _Caught, number: int) -> Any:
    def hook(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        caught.sink.states[number] = (args[0] if args else kwargs["hidden_states"])[0]

    return hook


def _output_of(caught: _Caught, number: int) -> Any:
    def hook(_module: nn.Module, _args: tuple[Any, ...], output: Any) -> None:
        caught.sink.states[number] = (output if isinstance(output, torch.Tensor) else output[0])[0]

    return hook


def _last_of(caught: _Caught) -> Any:
    def hook(_module: nn.Module, _args: tuple[Any, ...], output: Any) -> None:
        caught.last = output.last_hidden_state[0]

    return hook
