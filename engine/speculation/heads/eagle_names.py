"""The spellings under which EAGLE heads name their tensors, brought to one: that of the modules."""

import re

_PREFIXES = (
    ("midlayer.", "layers.0."),  # The authors' EAGLE-3.
    ("transformer.", "layers.0."),  # speculators' EAGLE-1.
    ("fusion_fc.", "fc."),
    ("embed_layernorm.", "embedding_layernorm."),  # HASS.
    ("enorm.", "embedding_layernorm."),  # vLLM's conversion of it.
    ("hidden_layernorm.", "hidden_states_layernorm."),
    ("hnorm.", "hidden_states_layernorm."),
    ("lm_head_layernorm.", "pre_lm_head_layernorm."),
    ("aux_norm_low.", "fc_norm.0."),  # Older SGLang.
    ("aux_norm_mid.", "fc_norm.1."),
    ("aux_norm_high.", "fc_norm.2."),
)
_UNUSED = re.compile(r"(.*\.)?rotary_emb\.inv_freq|verifier_norm\.weight|verifier_lm_head\.weight")
"""What some checkpoints hold beside the head: derived values, and copies of the target's."""

_MEDUSA = re.compile(r"(medusa_heads?\.)?(\d+\.\d+\.(linear\.)?weight|blocks\.\d+\.layers\.\d+\.weight)")


def eagle_name(name: str) -> str | None:
    """A tensor's name in the modules; None if it is no part of the head.

    Args:
        name: Its name in a checkpoint.
    """
    name = name.removeprefix("model.")
    if _UNUSED.fullmatch(name):
        return None
    for prefix, ours in _PREFIXES:
        if name.startswith(prefix):
            return ours + name.removeprefix(prefix)
    return name


def layer_of(name: str) -> int | None:
    """The layer that a tensor, named as in the modules, belongs to."""
    match = re.match(r"layers\.(\d+)\.", name)
    return None if match is None else int(match[1])


def is_medusa(name: str) -> bool:
    """Whether only Medusa heads have a tensor of this name."""
    return _MEDUSA.fullmatch(name) is not None
