"""POST /v1/chat/completions: request, answer and chunk."""

from typing import Annotated, ClassVar, Literal, Self

from pydantic import BaseModel, FailFast, Field, model_validator
from pydantic_core import PydanticCustomError

from engine.sampling_params import MAX_LOGPROBS
from server.protocol.base import GenerationRequest, RequestModel
from server.protocol.fields import Prediction, TextContent
from server.protocol.refused import REFUSED_IN_CHAT, REFUSED_IN_MESSAGES, RefusedField
from server.protocol.usage import Answer, FinishReasonField, StopReasonField


class ChatMessage(RequestModel):
    """One message; keys beyond these are ignored."""

    refused_fields: ClassVar[tuple[RefusedField, ...]] = REFUSED_IN_MESSAGES

    role: Literal["system", "developer", "user", "assistant", "tool", "function"] = Field(
        description="Who speaks. developer is system where the model's template knows no developer."
    )
    content: TextContent = Field(description="The text, or text parts, which are joined by line breaks.")


class ChatCompletionRequest(GenerationRequest):
    """The body of POST /v1/chat/completions."""

    refused_fields: ClassVar[tuple[RefusedField, ...]] = REFUSED_IN_CHAT

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
    logprobs: bool = Field(False, description="Report the log probability of each token.")
    top_logprobs: int | None = Field(
        None, ge=0, le=MAX_LOGPROBS, description="And of this many likeliest ones; needs logprobs."
    )

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
    content: str
    refusal: None


class MessageDelta(BaseModel):
    """What a chunk adds to the message; the first one of a choice has the role."""

    role: Literal["assistant"] | None = None
    content: str | None = None


class ChatChoice(BaseModel):
    """One answer."""

    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None
    finish_reason: FinishReasonField
    stop_reason: StopReasonField


class ChatChunkChoice(BaseModel):
    """What a chunk adds to one answer."""

    index: int
    delta: MessageDelta
    logprobs: ChatLogprobs | None
    finish_reason: FinishReasonField
    stop_reason: StopReasonField


class ChatCompletion(Answer):
    """The answer."""

    object: Literal["chat.completion"]
    choices: list[ChatChoice]


class ChatCompletionChunk(Answer):
    """One event of a streamed answer."""

    object: Literal["chat.completion.chunk"]
    choices: list[ChatChunkChoice]
