"""Section: what every group of settings is."""

from pydantic import BaseModel, ConfigDict

IMPLIES_METHOD = "implies_method"
"""In a field's json_schema_extra: who sets it and names no method means one that has it."""


A_YEAR = 365 * 24 * 3600
"""In seconds: the longest time that a setting may name, since the system's clocks take no number at all."""


class Section(BaseModel):
    """A group of settings: immutable, and closed to unknown keys."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)
