"""POST /v1/responses: the request."""

from typing import Annotated, ClassVar, Literal, Self

from pydantic import (
    AfterValidator,
    FailFast,
    Field,
    PlainValidator,
    TypeAdapter,
    ValidationError,
    model_validator,
)
from pydantic_core import PydanticCustomError

from engine.sampling_params import MAX_LOGPROBS
from server.protocol.base import SamplingRequest
from server.protocol.fields import Prediction, TemplateVariables
from server.protocol.formats import JsonSchemaFormat, ResponseFormat
from server.protocol.model import RequestModel
from server.protocol.refused import RefusedField
from server.protocol.response_items import Items
from server.protocol.response_refused import (
    REFUSED_IN_REASONING,
    REFUSED_IN_RESPONSES,
    REFUSED_IN_STREAM_OPTIONS,
    REFUSED_IN_TEXT,
)
from server.protocol.tools import Function

LOGPROBS = "message.output_text.logprobs"

_CHOICES = '"none", "auto", "required", {"type": "function", "name": ...} or a choice of type allowed_tools'
_MAX_METADATA, _MAX_KEY, _MAX_VALUE = 16, 64, 512


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


def _check_metadata(metadata: dict[str, str]) -> dict[str, str]:
    if len(metadata) > _MAX_METADATA:
        raise PydanticCustomError(
            "metadata", "may have {limit} keys, got {count}", {"limit": _MAX_METADATA, "count": len(metadata)}
        )
    for key, value in metadata.items():
        if len(key) > _MAX_KEY or len(value) > _MAX_VALUE:
            raise PydanticCustomError(
                "metadata",
                "keys may have {key} characters and values {value}; '{name}' has more",
                {"key": _MAX_KEY, "value": _MAX_VALUE, "name": key[:40]},
            )
    return metadata


def _check_include(names: list[str]) -> list[str]:
    for name in names:
        if name != LOGPROBS:
            raise PydanticCustomError(
                "include",
                "'{name}' is not supported: there is {known}",
                {"name": name[:60], "known": LOGPROBS},
            )
    return names


class ResponseStreamOptions(RequestModel):
    """Options of a streamed response."""

    refused_fields: ClassVar[tuple[RefusedField, ...]] = REFUSED_IN_STREAM_OPTIONS


class ResponseRequest(SamplingRequest):
    """The body of POST /v1/responses."""

    refused_fields: ClassVar[tuple[RefusedField, ...]] = REFUSED_IN_RESPONSES

    input: Items = Field(description="What is said: a text, which is the user's, or items.")
    instructions: str | None = Field(
        None, description="A system message in front of everything. The next response does not inherit it."
    )
    previous_response_id: str | None = Field(
        None,
        description="A stored response, whose conversation goes on: its input, its output, then this input.",
    )
    store: bool | None = Field(
        None,
        description="Keep the response in memory, for previous_response_id and GET. Only requests with the "
        "same credentials find it, until it is deleted or newer ones take its room. Default: true, if the "
        "server stores any.",
    )
    max_output_tokens: int | None = Field(
        None,
        ge=1,
        description="Tokens to generate at most, thoughts included; default: the rest of the context.",
    )
    truncation: Literal["auto", "disabled"] = Field(
        "disabled",
        description="What becomes of a conversation that is too long. auto: its oldest turns are left out, "
        "but for system messages at the beginning. disabled: a 400.",
    )
    text: TextConfig = Field(TextConfig(), description="How the answer's text is to be.")
    reasoning: ReasoningConfig = Field(ReasoningConfig(), description="How the model is to think.")
    tools: Annotated[list[FunctionTool], FailFast()] = Field(
        [], description="Functions that the model may call."
    )
    tool_choice: ResponseToolChoice = Field(
        "auto",
        description="none: call nothing. auto: as the model likes. required, or one of the tools: call, "
        "enforced by a grammar. allowed_tools: as its mode says, with some of the tools.",
    )
    parallel_tool_calls: bool = Field(True, description="false allows one call per response.")
    max_tool_calls: int | None = Field(
        None, ge=1, description="Calls of tools that the server runs, of which there are none: no effect."
    )
    include: Annotated[list[str], FailFast(), AfterValidator(_check_include)] = Field(
        [], description=f"What else to give: {LOGPROBS}. Not together with tools that may be called."
    )
    top_logprobs: int = Field(
        0, ge=0, le=MAX_LOGPROBS, description=f"Likeliest tokens to report with each; needs {LOGPROBS}."
    )
    metadata: Annotated[dict[str, str], AfterValidator(_check_metadata)] = Field(
        {}, description="Up to 16 keys of the client's own, which come back with the response."
    )
    prediction: Prediction = Field(
        "",
        description="A text that much of the answer will be the same as; chat's field. It makes the answer "
        "faster and does not change it.",
        json_schema_extra={"default": None},
    )
    chat_template_kwargs: TemplateVariables = Field(
        {}, description="Variables of the model's chat template, such as enable_thinking."
    )
    stream: bool = Field(
        False,
        description="Send the response as server-sent events while it grows. The last is response.completed, "
        "response.incomplete (a limit cut the answer) or response.failed; no [DONE] follows.",
    )
    stream_options: ResponseStreamOptions = Field(
        ResponseStreamOptions(), description="Options of a streamed response."
    )

    @property
    def with_logprobs(self) -> bool:
        """Whether log probabilities are wanted."""
        return LOGPROBS in self.include

    @model_validator(mode="after")
    def _one_format(self) -> Self:
        if self.structured_outputs is not None and self.text.format.type != "text":
            raise PydanticCustomError(
                "two_formats",
                "{field} cannot be had with text.format: give the format in one of both",
                {"field": "structured_outputs"},
            )
        return self

    @model_validator(mode="after")
    def _tools_to_choose_from(self) -> Self:
        names = [tool.name for tool in self.tools]
        if len(set(names)) < len(names):
            raise PydanticCustomError(
                "tools", "{field} has several functions of one name", {"field": "tools"}
            )
        if self.tool_choice not in ("none", "auto") and not self.tools:
            raise PydanticCustomError(
                "tool_choice", "{field} needs tools: give some or leave {field} out", {"field": "tool_choice"}
            )
        for wanted in self.tool_choice.tools if isinstance(self.tool_choice, AllowedTools) else ():
            if wanted.name not in names:
                raise PydanticCustomError(
                    "tool_choice",
                    "{field} names the function '{name}', but tools does not have it",
                    {"field": "tool_choice", "name": wanted.name[:64]},
                )
        return self

    @model_validator(mode="after")
    def _logprobs_of_text_alone(self) -> Self:
        if self.top_logprobs and not self.with_logprobs:
            raise PydanticCustomError(
                "top_logprobs",
                '{field} needs include: ["{name}"]; set it or leave {field} out',
                {"field": "top_logprobs", "name": LOGPROBS},
            )
        if self.with_logprobs and self.tools and self.tool_choice != "none":
            raise PydanticCustomError(
                "include",
                "{field} cannot have {name} with tools that may be called; leave out one of both",
                {"field": "include", "name": LOGPROBS},
            )
        return self
