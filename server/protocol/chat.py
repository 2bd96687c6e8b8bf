"""POST /v1/chat/completions: request, answer and chunk."""

from typing import Annotated, ClassVar, Literal, Self

from pydantic import BaseModel, FailFast, Field, model_validator
from pydantic_core import PydanticCustomError

from engine.sampling_params import MAX_LOGPROBS
from server.protocol.base import FieldNames, GenerationRequest
from server.protocol.fields import Prediction, TemplateVariables, TextContent
from server.protocol.model import RequestModel
from server.protocol.refused import REFUSED_IN_CHAT, REFUSED_IN_MESSAGES, RefusedField
from server.protocol.tools import EarlierToolCall, Tool, ToolCall, ToolCallDelta, ToolChoice
from server.protocol.usage import (
    Answer,
    ChatFinishReasonField,
    PromptLogprobsField,
    PromptTokenIdsField,
    StopReasonField,
    TokenIdsField,
)


class ChatMessage(RequestModel):
    """One message; keys beyond these are ignored."""

    refused_fields: ClassVar[tuple[RefusedField, ...]] = REFUSED_IN_MESSAGES

    role: Literal["system", "developer", "user", "assistant", "tool", "function"] = Field(
        description="Who speaks. developer is system where the model's template knows no developer."
    )
    content: TextContent | None = Field(
        None,
        description="The text, or text parts, which are joined by line breaks; null only beside tool_calls.",
    )
    tool_calls: list[EarlierToolCall] = Field([], description="Calls that the assistant asked for.")
    tool_call_id: str | None = Field(None, description="The call that a tool's message answers.")

    @model_validator(mode="after")
    def _says_something(self) -> Self:
        if self.tool_calls and self.role != "assistant":
            raise PydanticCustomError(
                "tool_calls",
                "{field} belong to messages of the assistant, not of role '{role}'",
                {"field": "tool_calls", "role": self.role},
            )
        if self.content is None and not self.tool_calls:
            raise PydanticCustomError("missing", "is missing", {"field": "content"})
        return self


class ChatCompletionRequest(GenerationRequest):
    """The body of POST /v1/chat/completions."""

    refused_fields: ClassVar[tuple[RefusedField, ...]] = REFUSED_IN_CHAT
    names: ClassVar[FieldNames] = FieldNames(prompt="messages", max_tokens="max_completion_tokens")

    # Without FailFast a body of bad messages would cost a minute of error objects.
    messages: Annotated[list[ChatMessage], FailFast()] = Field(
        min_length=1, description="The conversation so far."
    )
    max_completion_tokens: int | None = Field(
        None, ge=1, description="Tokens to generate at most; default: the rest of the context."
    )
    max_tokens: int | None = Field(
        None, ge=1, description="The older name of max_completion_tokens, which wins where both are given."
    )
    prediction: Prediction = Field(
        "",
        description="A text that much of the answer will be the same as, such as a file to be edited: as "
        "text or text parts. It makes the answer faster and does not change it.",
        json_schema_extra={"default": None},
    )
    separate_reasoning: bool = Field(
        True,
        description="Give the thoughts of models that think aloud, between <think> and </think>, as "
        "reasoning_content; false leaves them in the content.",
    )
    continue_final_message: bool = Field(
        False,
        description="The last message, the assistant's, is the beginning of the answer: go on where it ends.",
    )
    add_generation_prompt: bool = Field(
        True, description="Must be true, or false with continue_final_message, which implies it."
    )
    chat_template_kwargs: TemplateVariables = Field(
        {}, description="Variables of the model's chat template, such as enable_thinking."
    )
    tools: Annotated[list[Tool], FailFast()] = Field([], description="Functions that the model may call.")
    tool_choice: ToolChoice | None = Field(
        None,
        description="none: call nothing. auto: as the model likes, the default where there are tools. "
        "required, or one of the tools: call, enforced by a grammar.",
    )
    parallel_tool_calls: bool = Field(True, description="false allows one call per answer.")
    logprobs: bool = Field(False, description="Report the log probability of each token.")
    top_logprobs: int | None = Field(
        None, ge=0, le=MAX_LOGPROBS, description="And of this many likeliest ones; needs logprobs."
    )

    @model_validator(mode="after")
    def _something_to_continue(self) -> Self:
        if self.continue_final_message and self.messages[-1].role != "assistant":
            raise PydanticCustomError(
                "continue_final_message",
                "{field} needs the last message to be the assistant's, not of role '{role}'",
                {"field": "continue_final_message", "role": self.messages[-1].role},
            )
        if not (self.add_generation_prompt or self.continue_final_message):
            raise PydanticCustomError(
                "add_generation_prompt",
                "{field} false is not supported: an answer begins where the template says so; leave it out",
                {"field": "add_generation_prompt"},
            )
        return self

    @model_validator(mode="after")
    def _tools_to_choose_from(self) -> Self:
        if self.tool_choice not in (None, "none") and not self.tools:
            raise PydanticCustomError(
                "tool_choice", "{field} needs tools: give some or leave {field} out", {"field": "tool_choice"}
            )
        names = [tool.function.name for tool in self.tools]
        if len(set(names)) < len(names):
            raise PydanticCustomError(
                "tools", "{field} has several functions of one name", {"field": "tools"}
            )
        return self

    @model_validator(mode="after")
    def _logprobs_for_top(self) -> Self:
        if self.top_logprobs is not None and not self.logprobs:
            raise PydanticCustomError(
                "top_logprobs",
                "{field} needs logprobs: true; set it or leave {field} out",
                {"field": "top_logprobs"},
            )
        return self


class ChatTopLogprob(BaseModel):
    """A token that could have stood here."""

    token: str = Field(description="Its text.")
    logprob: float = Field(description="Its log probability, the model's own.")
    bytes: list[int] = Field(description="Its UTF-8 bytes, which may be a part of a character.")


class ChatTokenLogprob(ChatTopLogprob):
    """A token of the answer."""

    top_logprobs: list[ChatTopLogprob] = Field(description="The likeliest tokens, the likeliest first.")


class ChatLogprobs(BaseModel):
    """An entry per token."""

    content: list[ChatTokenLogprob]


class AssistantMessage(BaseModel):
    """The answer's message."""

    role: Literal["assistant"]
    content: str | None
    refusal: None
    reasoning_content: str | None = Field(
        None, description="The thoughts of a model that thinks aloud; the key is absent without any."
    )
    tool_calls: list[ToolCall] = Field(
        [], description="What the model wants called; the key is absent without calls."
    )


class MessageDelta(BaseModel):
    """What a chunk adds to the message; the first one of a choice has the role."""

    role: Literal["assistant"] | None = None
    content: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[ToolCallDelta] | None = None


class ChatChoice(BaseModel):
    """One answer."""

    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None
    finish_reason: ChatFinishReasonField
    stop_reason: StopReasonField
    token_ids: TokenIdsField = None


class ChatChunkChoice(BaseModel):
    """What a chunk adds to one answer."""

    index: int
    delta: MessageDelta
    logprobs: ChatLogprobs | None
    finish_reason: ChatFinishReasonField
    stop_reason: StopReasonField
    token_ids: TokenIdsField = None


class ChatCompletion(Answer):
    """The answer."""

    object: Literal["chat.completion"]
    choices: list[ChatChoice]
    prompt_token_ids: PromptTokenIdsField = None
    prompt_logprobs: PromptLogprobsField = None


class ChatCompletionChunk(Answer):
    """One event of a streamed answer."""

    object: Literal["chat.completion.chunk"]
    choices: list[ChatChunkChoice]
    prompt_token_ids: PromptTokenIdsField = None
    prompt_logprobs: PromptLogprobsField = None
