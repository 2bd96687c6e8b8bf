"""Fields of /v1/responses that are objects: the text, thoughts, tools and the choice among them."""

from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, PlainValidator, TypeAdapter, ValidationError, model_validator
from pydantic_core import PydanticCustomError

from server.protocol.formats import JsonSchemaFormat, ResponseFormat
from server.protocol.model import RequestModel
from server.protocol.refused import RefusedField
from server.protocol.response_refused import (
    REFUSED_IN_REASONING,
    REFUSED_IN_STREAM_OPTIONS,
    REFUSED_IN_TEXT,
)
from server.protocol.tools import Function

_CHOICES = '"none", "auto", "required", {"type": "function", "name": ...} or a choice of type allowed_tools'


class TextFormat(RequestModel):
    """What the answer's text must be; the fields but type are for json_schema."""

    type: Literal["text", "json_object", "json_schema"] = Field(
        description="text: anything. json_object: a JSON object. json_schema: JSON that fits the schema."
    )
    name: str | None = Field(None, min_length=1, description="What the schema is called.")
    description: str | None = Field(None, description="What the schema is for; the model does not see it.")
    schema_: dict[str, object] | None = Field(
        None, alias="schema", description="The schema. Properties are written in its order."
    )
    strict: bool | None = Field(None, description="Has no effect: the schema is always enforced.")

    @model_validator(mode="after")
    def _schema_if_named(self) -> Self:
        for field, value in (("name", self.name), ("schema", self.schema_)):
            if (self.type == "json_schema") != (value is not None):
                raise PydanticCustomError(
                    "text_format",
                    "a format of type '{type}' {verb} {field}",
                    {"field": field, "type": self.type, "verb": "needs a" if value is None else "takes no"},
                )
        return self

    @property
    def as_chat(self) -> ResponseFormat:
        """The same in chat's form."""
        if self.schema_ is None:
            return ResponseFormat(type=self.type)
        schema = JsonSchemaFormat(name=self.name or "", schema=self.schema_)
        return ResponseFormat(type=self.type, json_schema=schema)


class TextConfig(RequestModel):
    """How the answer's text is to be."""

    refused_fields: ClassVar[tuple[RefusedField, ...]] = REFUSED_IN_TEXT

    format: TextFormat = Field(TextFormat(type="text"), description="What it must be. Default: anything.")


class ReasoningConfig(RequestModel):
    """How the model is to think."""

    refused_fields: ClassVar[tuple[RefusedField, ...]] = REFUSED_IN_REASONING

    effort: str | None = Field(
        None,
        description="How much, for models whose chat template knows reasoning_effort; none also for those "
        "that can be told not to think (enable_thinking), or do not. A 400 for others.",
    )


class FunctionTool(Function):
    """A function that the model may call."""

    type: Literal["function"] = Field(description="The one kind of tool that there is here.")

    @model_validator(mode="before")
    @classmethod
    def _known_type(cls, values: object) -> object:
        kind = values.get("type") if isinstance(values, dict) else None
        if isinstance(kind, str) and kind != "function":
            raise PydanticCustomError(
                "tool_type",
                "a tool of {field} '{kind}' is not supported: this server runs no tools, but the model may "
                "call functions of yours; use type 'function'",
                {"field": "type", "kind": kind[:40]},
            )
        return values

    @property
    def function(self) -> Function:
        """The function alone."""
        return Function(
            name=self.name, description=self.description, parameters=self.parameters, strict=self.strict
        )


class ChosenFunction(RequestModel):
    """One of the tools."""

    type: Literal["function"]
    name: str


class AllowedTools(RequestModel):
    """Some of the tools."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: list[ChosenFunction] = Field(min_length=1)


_ANY_CHOICE: TypeAdapter[str | ChosenFunction | AllowedTools] = TypeAdapter(
    Literal["none", "auto", "required"] | ChosenFunction | AllowedTools
)


def _read_choice(value: object) -> str | ChosenFunction | AllowedTools:
    try:
        return _ANY_CHOICE.validate_python(value)
    except ValidationError:
        raise PydanticCustomError("tool_choice", "must be {choices}", {"choices": _CHOICES}) from None


ResponseToolChoice = Annotated[
    str | ChosenFunction | AllowedTools,
    PlainValidator(
        _read_choice,
        json_schema_input_type=Literal["none", "auto", "required"] | ChosenFunction | AllowedTools,
    ),
]


class ResponseStreamOptions(RequestModel):
    """Options of a streamed response."""

    refused_fields: ClassVar[tuple[RefusedField, ...]] = REFUSED_IN_STREAM_OPTIONS
