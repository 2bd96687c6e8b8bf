"""POST /v1/responses: the request."""

from typing import Annotated, ClassVar, Literal, Self

from pydantic import AfterValidator, FailFast, Field, model_validator
from pydantic_core import PydanticCustomError

from engine.sampling_params import MAX_LOGPROBS
from server.protocol.base import SamplingRequest
from server.protocol.fields import Prediction, TemplateVariables
from server.protocol.refused import RefusedField
from server.protocol.response_items import Items
from server.protocol.response_parts import (
    AllowedTools,
    FunctionTool,
    ReasoningConfig,
    ResponseStreamOptions,
    ResponseToolChoice,
    TextConfig,
)
from server.protocol.response_refused import REFUSED_IN_RESPONSES

LOGPROBS = "message.output_text.logprobs"

_MAX_METADATA, _MAX_KEY, _MAX_VALUE = 16, 64, 512


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
    text: TextConfig = Field(TextConfig(), description="The answer's text: its format.")
    reasoning: ReasoningConfig = Field(ReasoningConfig(), description="The thoughts: how much of them.")
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
        ResponseStreamOptions(), description="None has an effect; include_obfuscation may be false."
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
