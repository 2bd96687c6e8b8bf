"""RequestModel: what all parts of requests have in common."""

from typing import ClassVar

from pydantic import BaseModel, ConfigDict, model_validator

from server.protocol.refused import RefusedField, refuse


class RequestModel(BaseModel):
    """A part of a request: strict types, no NaN, and null means the same as leaving the key out."""

    model_config = ConfigDict(strict=True, frozen=True, allow_inf_nan=False)

    refused_fields: ClassVar[tuple[RefusedField, ...]] = ()

    @model_validator(mode="before")
    @classmethod
    def _read_keys(cls, values: object) -> object:
        if not isinstance(values, dict):
            return values
        refuse(values, cls.refused_fields)
        return {key: value for key, value in values.items() if value is not None}
