"""Items of a conversation as /v1/responses takes them."""

from typing import Annotated, Literal, Self

from pydantic import BeforeValidator, FailFast, Field, PlainValidator, WithJsonSchema, model_validator
from pydantic_core import PydanticCustomError

from server.protocol.fields import content_schema, read_content
from server.protocol.model import RequestModel
from server.protocol.tools import ArgumentsText

# Types of content parts, and where each has its text.
_PARTS = {"input_text": "text", "output_text": "text", "refusal": "refusal"}
_NEEDS: dict[str, tuple[str, ...]] = {
    "message": ("role", "content"),
    "function_call": ("call_id", "name", "arguments"),
    "function_call_output": ("call_id", "output"),
    "reasoning": (),
}

ItemText = Annotated[
    str,
    PlainValidator(lambda value: read_content(value, _PARTS)),
    WithJsonSchema(content_schema({"type": "string", "enum": ["input_text", "output_text"]})),
]


class InputItem(RequestModel):
    """One item; its type says which of the fields it has. Keys beyond these, such as id, are ignored."""

    type: Literal["message", "function_call", "function_call_output", "reasoning"] = Field(
        "message",
        description="Thoughts (reasoning) of earlier answers are taken and not shown to the model, as chat "
        "templates have it.",
    )
    role: Literal["system", "developer", "user", "assistant"] | None = Field(
        None,
        description="Who speaks in a message. developer is system where the template knows no developer.",
    )
    content: ItemText | None = Field(
        None, description="A message's text, or text parts, which are joined by line breaks."
    )
    call_id: str | None = Field(None, description="What a call and its output have in common.")
    name: str | None = Field(None, description="The function that a call calls.")
    arguments: ArgumentsText | None = Field(None, description="A call's arguments, a JSON object as text.")
    output: ItemText | None = Field(None, description="What a call's function gave.")

    @model_validator(mode="before")
    @classmethod
    def _known_type(cls, values: object) -> object:
        if not isinstance(values, dict):
            return values
        kind = values.get("type")
        if isinstance(kind, str) and kind not in _NEEDS:
            raise PydanticCustomError(
                "item_type",
                "an item of {field} '{kind}' is not supported: this server takes {known}",
                {"field": "type", "kind": kind[:40], "known": ", ".join(_NEEDS)},
            )
        # Thoughts have parts of other types, of which nothing is used.
        return {"type": kind} if kind == "reasoning" else values

    @model_validator(mode="after")
    def _has_what_it_needs(self) -> Self:
        for name in _NEEDS[self.type]:
            if getattr(self, name) is None:
                raise PydanticCustomError("missing", "is missing", {"field": name})
        return self


def _as_items(value: object) -> object:
    if isinstance(value, str):
        return [{"role": "user", "content": value}]
    if not isinstance(value, list):
        raise PydanticCustomError("input_type", "must be a string or a list of items")
    return value


Items = Annotated[
    list[InputItem],
    FailFast(),
    Field(min_length=1),
    BeforeValidator(_as_items, json_schema_input_type=str | list[InputItem]),
]
"""A conversation; a text alone is a message of the user."""
