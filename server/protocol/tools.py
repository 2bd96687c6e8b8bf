"""Functions that a model may call, and its calls."""

import json
from typing import Annotated, Literal, Self

from pydantic import AfterValidator, BaseModel, Field, PlainValidator, WithJsonSchema, model_validator
from pydantic_core import PydanticCustomError

from server.protocol.formats import Schema
from server.protocol.model import RequestModel

_MODES = ("none", "auto", "required")
_FORMS = '"none", "auto", "required" or {"type": "function", "function": {"name": ...}}'


class Function(RequestModel):
    """A function as the model is told of it."""

    name: str = Field(pattern="^[a-zA-Z0-9_.-]{1,64}$", description="Letters, digits, _, . and -.")
    description: str | None = Field(None, description="What it does, for the model.")
    parameters: Schema | None = Field(
        None, description="A JSON schema of its arguments, an object. Default: it takes none."
    )
    strict: bool = Field(
        False,
        description="Enforce the schema whenever the model calls the function. Where tool_choice asks for "
        "a call it is enforced in any case.",
    )

    @model_validator(mode="after")
    def _takes_an_object(self) -> Self:
        if self.parameters is not None and self.parameters.get("type", "object") != "object":
            raise PydanticCustomError(
                "parameters", "{field} must be a schema of type object", {"field": "parameters"}
            )
        return self


class Tool(RequestModel):
    """Something that the model may use."""

    type: Literal["function"] = Field(description="The one kind of tool that there is here.")
    function: Function


class NamedFunction(RequestModel):
    """The name of a function."""

    name: str


class NamedTool(RequestModel):
    """One of the tools."""

    type: Literal["function"]
    function: NamedFunction


def _read_choice(value: object) -> str | NamedTool:
    if value in _MODES:
        return str(value)
    if isinstance(value, dict) and value.get("type") == "function":
        named = value.get("function")
        if isinstance(named, dict) and isinstance(named.get("name"), str):
            return NamedTool(type="function", function=NamedFunction(name=named["name"]))
    raise PydanticCustomError("tool_choice", "must be {forms}", {"forms": _FORMS})


ToolChoice = Annotated[
    str | NamedTool,
    PlainValidator(_read_choice),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "string", "enum": list(_MODES)},
                {
                    "type": "object",
                    "properties": {
                        "type": {"const": "function"},
                        "function": {
                            "type": "object",
                            "properties": {"name": {"type": "string"}},
                            "required": ["name"],
                        },
                    },
                    "required": ["type", "function"],
                },
            ]
        }
    ),
]


def _is_an_object(arguments: str) -> str:
    try:
        found = json.loads(arguments)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise PydanticCustomError("arguments", "must be a JSON object as text")
    return arguments


ArgumentsText = Annotated[str, AfterValidator(_is_an_object)]


class EarlierFunctionCall(RequestModel):
    """What was called."""

    name: str = Field(description="The function.")
    arguments: ArgumentsText = Field(description="Its arguments, a JSON object as text.")


class EarlierToolCall(RequestModel):
    """A call in an earlier message of the assistant."""

    id: str = Field(description="What the tool's message refers to.")
    type: Literal["function"] = Field("function", description="The one kind of tool that there is here.")
    function: EarlierFunctionCall


class FunctionCall(BaseModel):
    """What is called."""

    name: str
    arguments: str = Field(description="A JSON object as text, the way the model wrote it.")


class ToolCall(BaseModel):
    """A call that the model asks for."""

    id: str = Field(description="For the tool's message to refer to; the same for the same seed.")
    type: Literal["function"]
    function: FunctionCall


class FunctionCallDelta(BaseModel):
    """What a chunk adds to a call; the first one has the name."""

    name: str | None = None
    arguments: str | None = None


class ToolCallDelta(BaseModel):
    """What a chunk adds to one of the calls; the first one has id and type."""

    index: int
    id: str | None = None
    type: Literal["function"] | None = None
    function: FunctionCallDelta
