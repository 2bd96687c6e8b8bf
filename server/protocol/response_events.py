"""The events of a streamed response."""

from typing import Literal

from pydantic import BaseModel, Field

from server.protocol.chat import ChatTokenLogprob
from server.protocol.response_object import OutputItem, OutputText, ReasoningText, ResponseObject


class ResponseEvent(BaseModel):
    """One event."""

    type: str = Field(description="The event's name, also in the event line.")
    sequence_number: int = Field(description="Its number in the stream, from 0.")


LifecycleName = Literal[
    "response.created",
    "response.in_progress",
    "response.completed",
    "response.incomplete",
    "response.failed",
]


class LifecycleEvent(ResponseEvent):
    """The response as it is at its beginning or at its end."""

    type: LifecycleName
    response: ResponseObject


class ItemEvent(ResponseEvent):
    """An item begins or is complete."""

    type: Literal["response.output_item.added", "response.output_item.done"]
    output_index: int = Field(description="The item's place in the response's output.")
    item: OutputItem


class PartEvent(ResponseEvent):
    """A content part begins or is complete."""

    type: Literal["response.content_part.added", "response.content_part.done"]
    item_id: str
    output_index: int
    content_index: int
    part: OutputText | ReasoningText


class TextDelta(ResponseEvent):
    """More of a message's text."""

    type: Literal["response.output_text.delta"]
    item_id: str
    output_index: int
    content_index: int
    delta: str
    logprobs: list[ChatTokenLogprob]


class TextDone(ResponseEvent):
    """A message's whole text."""

    type: Literal["response.output_text.done"]
    item_id: str
    output_index: int
    content_index: int
    text: str
    logprobs: list[ChatTokenLogprob]


class ReasoningDelta(ResponseEvent):
    """More of the thoughts."""

    type: Literal["response.reasoning_text.delta"]
    item_id: str
    output_index: int
    content_index: int
    delta: str


class ReasoningDone(ResponseEvent):
    """The whole thoughts."""

    type: Literal["response.reasoning_text.done"]
    item_id: str
    output_index: int
    content_index: int
    text: str


class ArgumentsDelta(ResponseEvent):
    """More of a call's arguments."""

    type: Literal["response.function_call_arguments.delta"]
    item_id: str
    output_index: int
    delta: str


class ArgumentsDone(ResponseEvent):
    """A call's whole arguments."""

    type: Literal["response.function_call_arguments.done"]
    item_id: str
    output_index: int
    name: str
    arguments: str


RESPONSE_EVENTS: tuple[type[ResponseEvent], ...] = (
    LifecycleEvent,
    ItemEvent,
    PartEvent,
    TextDelta,
    TextDone,
    ReasoningDelta,
    ReasoningDone,
    ArgumentsDelta,
    ArgumentsDone,
)
"""All of them."""

AnyResponseEvent = (
    LifecycleEvent
    | ItemEvent
    | PartEvent
    | TextDelta
    | TextDone
    | ReasoningDelta
    | ReasoningDone
    | ArgumentsDelta
    | ArgumentsDone
)
