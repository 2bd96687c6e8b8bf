"""From a request of /v1/responses to the chat that it is, and from its output to items again."""

import re
from collections.abc import Sequence
from typing import ClassVar

from pydantic import TypeAdapter

from engine.errors import InvalidRequest
from server.protocol.base import FieldNames, SamplingRequest
from server.protocol.chat import ChatCompletionRequest, ChatMessage
from server.protocol.response import ResponseRequest
from server.protocol.response_items import InputItem
from server.protocol.response_object import FunctionCallItem, OutputItem, OutputMessage
from server.protocol.response_parts import AllowedTools, ChosenFunction, ReasoningConfig
from server.protocol.tools import EarlierFunctionCall, EarlierToolCall, NamedFunction, NamedTool, Tool
from server.services.reasoning import has_thoughts

MESSAGES = TypeAdapter(list[ChatMessage])


class ResponseAsChat(ChatCompletionRequest):
    """A request of /v1/responses in chat's form; errors speak of the fields that the client sent."""

    names: ClassVar[FieldNames] = FieldNames("input", "max_output_tokens", "text.format")


def as_chat(
    request: ResponseRequest, messages: Sequence[ChatMessage], chat_template: str
) -> ChatCompletionRequest:
    """The chat that a request is.

    Args:
        request: What was asked.
        messages: The conversation, earlier responses included.
        chat_template: The model's, which says what it knows of thinking.

    Raises:
        InvalidRequest: The model cannot think as it is told to.
    """
    # Every value is one that the request's own fields have checked; those of chat would want JSON again.
    shared = {name: getattr(request, name) for name in SamplingRequest.model_fields}
    choice = request.tool_choice
    allowed = {tool.name for tool in choice.tools} if isinstance(choice, AllowedTools) else None
    return ResponseAsChat.model_construct(
        **shared,
        messages=list(messages),
        max_completion_tokens=request.max_output_tokens,
        response_format=request.text.format.as_chat,
        tools=[
            Tool(type="function", function=tool.function)
            for tool in request.tools
            if allowed is None or tool.name in allowed
        ],
        tool_choice=_choice(choice),
        parallel_tool_calls=request.parallel_tool_calls,
        logprobs=request.with_logprobs,
        top_logprobs=request.top_logprobs if request.with_logprobs else None,
        prediction=request.prediction,
        chat_template_kwargs={**_thinking(request.reasoning, chat_template), **request.chat_template_kwargs},
    )


def _choice(choice: str | ChosenFunction | AllowedTools) -> str | NamedTool:
    match choice:
        case ChosenFunction():
            return NamedTool(type="function", function=NamedFunction(name=choice.name))
        case AllowedTools():
            return choice.mode
    return choice


def _thinking(wanted: ReasoningConfig, chat_template: str) -> dict[str, object]:
    """The variables that tell a template how much the model is to think."""
    effort = wanted.effort
    if effort is None:
        return {}
    if re.search(r"\breasoning_effort\b", chat_template):
        return {"reasoning_effort": effort}
    if effort == "none" and re.search(r"\benable_thinking\b", chat_template):
        return {"enable_thinking": False}
    if effort == "none" and not has_thoughts(chat_template):
        return {}
    raise InvalidRequest(
        f"reasoning.effort {effort[:40]!r} is not supported: this model's chat template cannot be told how "
        "much to think; say it in the input, or leave it out",
        "reasoning.effort",
    )


def messages_of(items: Sequence[InputItem]) -> list[ChatMessage]:
    """Items as messages; what the assistant says and calls in one go is one message."""
    messages: list[ChatMessage] = []
    for item in items:
        match item.type:
            case "message" if item.role == "assistant":
                _add(messages, item.content, [])
            case "message":
                messages.append(ChatMessage(role=item.role or "user", content=item.content))
            case "function_call":
                function = EarlierFunctionCall(name=item.name or "", arguments=item.arguments or "")
                call = EarlierToolCall(id=item.call_id or "", type="function", function=function)
                _add(messages, None, [call])
            case "function_call_output":
                messages.append(ChatMessage(role="tool", content=item.output, tool_call_id=item.call_id))
    return messages


def _add(messages: list[ChatMessage], text: str | None, calls: list[EarlierToolCall]) -> None:
    """Adds to the assistant's message, if calls make one of both; else a new one."""
    last = messages[-1] if messages and messages[-1].role == "assistant" else None
    if last is None or not (calls or last.tool_calls):
        messages.append(ChatMessage(role="assistant", content=text, tool_calls=calls))
        return
    texts = [each for each in (last.content, text) if each is not None]
    messages[-1] = ChatMessage(
        role="assistant",
        content="\n".join(texts) if texts else None,
        tool_calls=[*last.tool_calls, *calls],
    )


def items_said(output: Sequence[OutputItem]) -> list[InputItem]:
    """A response's output as a conversation has it: without thoughts, and without a call that a limit cut."""
    items: list[InputItem] = []
    for item in output:
        match item:
            case OutputMessage():
                text = "".join(part.text for part in item.content)
                items.append(InputItem(role="assistant", content=text))
            case FunctionCallItem(status="completed"):
                items.append(
                    InputItem(
                        type="function_call",
                        call_id=item.call_id,
                        name=item.name,
                        arguments=item.arguments,
                    )
                )
    return items
