"""Which hidden states of the target an EAGLE head reads, by the convention of its config."""

from typing import Literal

from engine.errors import ModelNotSupported
from engine.speculation.heads.config import Features, default_features
from engine.speculation.heads.fields import Fields
from engine.speculation.heads.target import TargetShape

LayerConvention = Literal["hidden_states", "layer_outputs"]
"""What a layer id in a config means: transformers' hidden state of that number, which is the *input* of the
layer (speculators, vLLM), or the layer's *output*, which is the hidden state after it (SGLang, SpecForge)."""

_IDS = "eagle_aux_hidden_state_layer_ids"


def read_features(fields: Fields, target: TargetShape, convention: LayerConvention | None) -> Features:
    """The features of an EAGLE-3 head.

    Lists at the top of a config are of vLLM's and speculators' making, lists within eagle_config and
    target_layer_ids are SGLang's and SpecForge's; the same head has ids that differ by one. Without a list
    the authors' formula holds.

    Args:
        fields: The config.
        target: The target.
        convention: What ids mean, whatever the place of the list; None goes by the place.

    Raises:
        ModelNotSupported: The target has no such layers, or two lists contradict each other.
    """
    nested = fields.section("eagle_config")
    if not nested.flag("use_aux_hidden_state", default=fields.flag("use_aux_hidden_state", default=True)):
        return "last"
    lists: list[tuple[Fields, str, LayerConvention]] = [
        (fields, _IDS, "hidden_states"),
        (nested, _IDS, "layer_outputs"),
        (fields, "target_layer_ids", "layer_outputs"),
    ]
    found = {
        f"{name} in {part.where}": _states(ids, convention or place)
        for part, name, place in lists
        if (ids := part.numbers(name)) is not None
    }
    if convention is not None and found:
        # The lists of one config follow different conventions: an override speaks of the first.
        found = dict(list(found.items())[:1])
    if len(set(found.values())) > 1:
        raise ModelNotSupported(
            f"the config names its layers twice and differently: {found} (as hidden states). Say which "
            "convention holds for the first"
        )
    if not found:
        _check_count(fields, 3)
        return default_features(target.num_layers)
    where, features = next(iter(found.items()))
    _check_count(fields, len(features))
    if max(features) >= target.num_layers:
        raise ModelNotSupported(
            f"{where} asks for the hidden states {list(features)}, but of a target with {target.num_layers} "
            f"layers a head can read 0 to {target.num_layers - 1}: it was trained for another model, or its "
            "layer ids follow the other convention"
        )
    return features


def _states(ids: tuple[int, ...], convention: LayerConvention) -> tuple[int, ...]:
    return ids if convention == "hidden_states" else tuple(index + 1 for index in ids)


def _check_count(fields: Fields, count: int) -> None:
    wanted = fields.optional_size("num_aux_hidden_states")
    if wanted is not None and wanted != count:
        raise ModelNotSupported(
            f"num_aux_hidden_states in {fields.where} is {wanted}, but {count} layers are named or, without "
            "a list, are the authors' three"
        )
