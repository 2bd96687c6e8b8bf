"""Formats that an answer must have: OpenAI's response_format, and structured_outputs for all others."""

from difflib import get_close_matches
from typing import Annotated, Literal, Self, TypeVar

from pydantic import AfterValidator, ConfigDict, Field, PlainValidator, WithJsonSchema, model_validator
from pydantic_core import PydanticCustomError

from server.protocol.model import RequestModel

MAX_CHARACTERS = 1 << 17
"""Of a schema, a grammar, or all choices together: compiling more would take many seconds."""

_PUNCTUATION = 3
_KINDS = ("json", "regex", "choice", "grammar")


AnyFormat = TypeVar("AnyFormat")


def _read_schema(value: object) -> dict[str, object] | str:
    if isinstance(value, dict | str):
        return value
    raise PydanticCustomError("schema_type", "must be a JSON schema: an object, or its text")


def _of_bearable_length(value: AnyFormat) -> AnyFormat:
    """Refuses what is longer as JSON, more or less, than is compiled."""
    left = MAX_CHARACTERS
    rest: list[object] = [value]
    while rest and left >= 0:
        item = rest.pop()
        left -= _PUNCTUATION + (len(item) if isinstance(item, str) else 0)
        if isinstance(item, dict):
            rest += [*item, *item.values()]
        elif isinstance(item, list):
            rest += item
    if left < 0:
        raise PydanticCustomError(
            "too_long", "must be at most {limit} characters long, as JSON", {"limit": MAX_CHARACTERS}
        )
    return value


NotTooLong = AfterValidator(_of_bearable_length)
Schema = Annotated[dict[str, object], NotTooLong]
SchemaOrText = Annotated[
    dict[str, object] | str,
    PlainValidator(lambda value: _of_bearable_length(_read_schema(value))),
    WithJsonSchema({"anyOf": [{"type": "object"}, {"type": "string"}]}),
]


class JsonSchemaFormat(RequestModel):
    """A JSON schema and its name."""

    name: str = Field(min_length=1, description="What the schema is called; the model does not see it.")
    description: str | None = Field(None, description="What the schema is for; the model does not see it.")
    schema_: Schema = Field(
        {}, alias="schema", description="The schema. Properties are written in its order."
    )
    strict: bool = Field(True, description="Has no effect: the schema is always enforced.")


class ResponseFormat(RequestModel):
    """What the answer's text must be."""

    type: Literal["text", "json_object", "json_schema"] = Field(
        description="text: anything. json_object: a JSON object. json_schema: JSON that fits json_schema."
    )
    json_schema: JsonSchemaFormat | None = Field(None, description="For type json_schema.")

    @model_validator(mode="after")
    def _schema_if_named(self) -> Self:
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise PydanticCustomError(
                "json_schema",
                "response_format of type '{type}' {verb} a json_schema",
                {
                    "field": "json_schema",
                    "type": self.type,
                    "verb": "needs" if self.json_schema is None else "takes no",
                },
            )
        return self


class StructuredOutputs(RequestModel):
    """A format in one of four notations; unknown keys are refused."""

    model_config = ConfigDict(extra="forbid")

    json_: SchemaOrText | None = Field(
        None, alias="json", description="A JSON schema, as an object or as text."
    )
    regex: Annotated[str, NotTooLong] | None = Field(
        None, description="A regular expression (Rust's) that the whole answer matches."
    )
    choice: Annotated[list[str], NotTooLong] | None = Field(
        None, min_length=1, description="Texts, one of which is the answer."
    )
    grammar: Annotated[str, NotTooLong] | None = Field(
        None, description="A context-free grammar, in Lark's notation (llguidance's) or llama.cpp's GBNF."
    )

    @model_validator(mode="before")
    @classmethod
    def _name_keys(cls, values: object) -> object:
        given = list(values) if isinstance(values, dict) else []
        for key in given:
            if key not in _KINDS:
                nearest = get_close_matches(key, _KINDS, n=1)
                hint = f"did you mean {nearest[0]}?" if nearest else f"it has {', '.join(_KINDS)}"
                raise PydanticCustomError(
                    "unknown_key",
                    "structured_outputs has no {field}; {hint}",
                    {"field": key[:40], "hint": hint},
                )
        if isinstance(values, dict) and sum(value is not None for value in values.values()) != 1:
            raise PydanticCustomError("one_kind", f"must have exactly one of {', '.join(_KINDS)}")
        return values
