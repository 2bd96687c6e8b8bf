"""RequestModel: what all parts of requests have in common."""

from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict, GetJsonSchemaHandler, model_validator
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema

from server.protocol.refused import RefusedField, refuse

_NULL = {"type": "null"}
# What a schema says of a field beside the values that it may have.
_NOTES = ("default", "description", "title")


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

    @classmethod
    def __get_pydantic_json_schema__(
        cls, core_schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> JsonSchemaValue:
        """Pydantic's schema, with null wherever a key may be left out."""
        schema = handler(core_schema)
        found = handler.resolve_ref_schema(schema)
        required = found.get("required", ())
        fields: dict[str, JsonSchemaValue] = found.get("properties", {})
        fields |= {name: _or_null(field) for name, field in fields.items() if name not in required}
        return schema


def _or_null(field: JsonSchemaValue) -> JsonSchemaValue:
    notes = {key: value for key, value in field.items() if key in _NOTES}
    values: dict[str, Any] = {key: value for key, value in field.items() if key not in _NOTES}
    options = values.get("anyOf", [values])
    return field if _NULL in options else {"anyOf": [*options, _NULL], **notes}
