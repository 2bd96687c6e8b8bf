"""The rotary parameters of a head's config, in transformers 5's spelling."""

from collections.abc import Mapping
from typing import Any

from engine.errors import ModelNotSupported
from engine.speculation.heads.config import DEFAULT_ROPE
from engine.speculation.heads.fields import Fields

_NUMBERS = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": ("factor",),
}
_OPTIONAL = {
    "yarn": (
        "original_max_position_embeddings",
        "attention_factor",
        "beta_fast",
        "beta_slow",
        "mscale",
        "mscale_all_dim",
    ),
}


def read_rope(fields: Fields) -> Mapping[str, Any]:
    """Rotary parameters: rope_parameters, or rope_theta and rope_scaling as older configs have them.

    A theta that is missing is 10000, even for heads of targets with another: it is what such heads were
    trained with.

    Raises:
        ModelNotSupported: The frequencies depend on more than the position, or part of a head is rotated.
        StartupError: A parameter is missing or no number.
    """
    name = "rope_parameters" if fields.has("rope_parameters") else "rope_scaling"
    scaling = fields.section(name)
    kind = scaling.text("rope_type", scaling.text("type", "default"))
    if kind not in _NUMBERS:
        raise ModelNotSupported(
            f"rope_type {kind!r} in {scaling.where} is not supported for heads; they may have "
            f"{', '.join(_NUMBERS)}, whose frequencies do not change with the length of a text"
        )
    if nested := scaling.nested:
        raise ModelNotSupported(
            f"{scaling.where} has parameters for each kind of layer ({', '.join(nested)}), which is not "
            "supported for heads"
        )
    for part in (scaling, fields):
        if part.positive("partial_rotary_factor", 1.0) != 1.0:
            raise ModelNotSupported(f"partial_rotary_factor in {part.where} is not supported for heads")
    theta = fields.positive("rope_theta", DEFAULT_ROPE["rope_theta"])
    rope: dict[str, Any] = {"rope_type": kind, "rope_theta": scaling.positive("rope_theta", theta)}
    for number in _NUMBERS[kind]:
        if not scaling.has(number):
            raise ModelNotSupported(f"{scaling.where} has no {number}, which rope_type {kind!r} needs")
        rope[number] = _number(scaling, number)
    rope |= {number: _number(scaling, number) for number in _OPTIONAL.get(kind, ()) if scaling.has(number)}
    if kind == "yarn" and scaling.has("truncate"):
        rope["truncate"] = scaling.flag("truncate", default=True)
    return rope


def _number(fields: Fields, name: str) -> float | int:
    if name == "original_max_position_embeddings":
        return fields.size(name)
    return fields.positive(name, 1.0)
