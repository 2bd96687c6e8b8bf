"""Conversations with calls in them, as chat templates take them."""

import json
from collections.abc import Mapping, Sequence

from server.protocol.chat import ChatMessage
from server.protocol.tools import EarlierToolCall, Function
from server.tools.formats import ToolFormat

Message = dict[str, object]

_INSTRUCTION = """\
You can call functions. These are described here, one a line:
{functions}
To call one, answer with its name and arguments in exactly this form and nothing else:
{example}
Several calls follow each other{separated}. If no function is needed, answer as usual."""

_SEPARATED = {"\n": " on a line each", "": " at once"}


def described(function: Function) -> Mapping[str, object]:
    """A function in the API's own form, which templates that know tools expect."""
    return {"type": "function", "function": function.model_dump(exclude_none=True, exclude={"strict"})}


def for_tools(messages: Sequence[ChatMessage]) -> list[Message]:
    """For a template that knows tools: arguments become objects, and a tool's message learns its name."""
    names = _names(messages)
    chat = []
    for message in messages:
        plain: Message = message.model_dump(exclude_none=True, exclude={"tool_calls"})
        plain.setdefault("content", "")
        if message.tool_calls:
            plain["tool_calls"] = [
                {
                    "id": call.id,
                    "type": "function",
                    "function": {
                        "name": call.function.name,
                        "arguments": json.loads(call.function.arguments),
                    },
                }
                for call in message.tool_calls
            ]
        if message.role == "tool" and message.tool_call_id in names:
            plain.setdefault("name", names[message.tool_call_id])
        chat.append(plain)
    return chat


def without_tools(
    messages: Sequence[ChatMessage], functions: Sequence[Function], tool_format: ToolFormat
) -> list[Message]:
    """For a template that knows no tools: all is said in plain text.

    The functions are described in the system message, calls stand in the assistant's content, and results
    come from the user.
    """
    names = _names(messages)
    chat: list[Message] = []
    was_result = False
    for message in messages:
        text = message.content or ""
        is_result = message.role == "tool"
        if is_result:
            text = f"Result of {names.get(message.tool_call_id, 'the function')}: {text}"
        elif message.tool_calls:
            text = "\n".join(filter(None, [text, _written(message.tool_calls, tool_format)]))
        if is_result and was_result:
            # Templates want user and assistant in turn.
            chat[-1]["content"] = f"{chat[-1]['content']}\n{text}"
        else:
            chat.append({"role": "user" if is_result else message.role, "content": text})
        was_result = is_result
    return _instructed(chat, functions, tool_format) if functions else chat


def _instructed(chat: list[Message], functions: Sequence[Function], tool_format: ToolFormat) -> list[Message]:
    example = _call_text(tool_format, "NAME", {"PARAMETER": "VALUE"})
    separator = tool_format.separator
    instruction = _INSTRUCTION.format(
        functions="\n".join(
            json.dumps(function.model_dump(exclude_none=True, exclude={"strict"}), ensure_ascii=False)
            for function in functions
        ),
        example=_wrapped(tool_format, example),
        separated=_SEPARATED.get(separator, f", with {separator!r} in between"),
    )
    if chat and chat[0]["role"] in ("system", "developer"):
        first: Message = {"role": chat[0]["role"], "content": f"{chat[0]['content']}\n\n{instruction}"}
        return [first, *chat[1:]]
    return [{"role": "system", "content": instruction}, *chat]


def _written(calls: Sequence[EarlierToolCall], tool_format: ToolFormat) -> str:
    texts = [
        _call_text(tool_format, call.function.name, json.loads(call.function.arguments)) for call in calls
    ]
    if tool_format.is_list:
        return _wrapped(tool_format, tool_format.separator.join(texts))
    return tool_format.separator.join(_wrapped(tool_format, text) for text in texts)


def _call_text(tool_format: ToolFormat, name: str, arguments: object) -> str:
    if tool_format.arguments_mark:
        return f"{name}{tool_format.arguments_mark}{json.dumps(arguments, ensure_ascii=False)}"
    return json.dumps({"name": name, tool_format.arguments_key: arguments}, ensure_ascii=False)


def _wrapped(tool_format: ToolFormat, text: str) -> str:
    body = f"[{text}]" if tool_format.is_list else text
    opening = tool_format.opening + tool_format.after_opening if tool_format.opening else ""
    closing = tool_format.before_closing + tool_format.closing if tool_format.closing else ""
    return f"{opening}{body}{closing}"


def _names(messages: Sequence[ChatMessage]) -> dict[str | None, str]:
    """The functions of earlier calls, by the calls' ids."""
    return {call.id: call.function.name for message in messages for call in message.tool_calls}
