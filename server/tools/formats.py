"""How models write the calls of functions: each family in its own way."""

import re
from dataclasses import dataclass
from typing import Literal

ToolParserName = Literal["hermes", "llama3_json", "mistral", "mistral_args", "json"]


@dataclass(frozen=True, slots=True)
class ToolFormat:
    r"""One way to write calls.

    A call is a JSON object with the function's name and its arguments, between two marks:

        hermes        <tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>, one after another
        llama3_json   {"name": "f", "parameters": {"x": 1}}; {"name": ...
        mistral       [TOOL_CALLS] [{"name": "f", "arguments": {"x": 1}}, {"name": ...}]
        mistral_args  [TOOL_CALLS]f[ARGS]{"x": 1}[TOOL_CALLS]...
        json          {"name": "f", "arguments": {"x": 1}}, a line each

    mistral_args, of Mistral's later models, has the name in front and the arguments alone as an object; the
    older form is read there too. Without a mark an answer is calls if it begins like one.

    Attributes:
        name: What settings call it.
        opening: The mark in front of a call; empty if there is none.
        after_opening: White space that the model writes behind it.
        closing: The mark behind a call; empty if there is none.
        before_closing: White space in front of that.
        arguments_key: What the arguments are called.
        arguments_mark: The mark between a name and its arguments, where they stand side by side.
        id_mark: The mark in front of an id that may stand between both.
        separator: What stands between two calls.
        is_list: All calls stand in one JSON list, behind one mark.
        id_length: Letters and digits of a call's id, behind what is in front of them.
        id_prefix: What is in front of them.
    """

    name: ToolParserName
    opening: str = ""
    after_opening: str = ""
    closing: str = ""
    before_closing: str = ""
    arguments_key: str = "arguments"
    arguments_mark: str = ""
    id_mark: str = ""
    separator: str = "\n"
    is_list: bool = False
    id_length: int = 24
    id_prefix: str = "call_"


HERMES = ToolFormat("hermes", "<tool_call>", "\n", "</tool_call>", "\n")
LLAMA3_JSON = ToolFormat("llama3_json", arguments_key="parameters", separator="; ")
# Mistral's templates refuse ids of any other length.
MISTRAL = ToolFormat("mistral", "[TOOL_CALLS]", " ", separator=", ", is_list=True, id_length=9, id_prefix="")
MISTRAL_ARGS = ToolFormat(
    "mistral_args",
    "[TOOL_CALLS]",
    arguments_mark="[ARGS]",
    id_mark="[CALL_ID]",
    separator="",
    id_length=9,
    id_prefix="",
)
JSON = ToolFormat("json")

FORMATS = {each.name: each for each in (HERMES, LLAMA3_JSON, MISTRAL, MISTRAL_ARGS, JSON)}


def knows_tools(chat_template: str) -> bool:
    """Whether a template shows the model the functions that there are."""
    return re.search(r"\btools\b", chat_template) is not None


def format_of(chat_template: str) -> ToolFormat:
    """The format that a template's model was trained for, as the template itself writes earlier calls."""
    if not knows_tools(chat_template):
        return JSON
    for each in (HERMES, MISTRAL_ARGS, MISTRAL):
        if each.opening in chat_template and each.arguments_mark in chat_template:
            return each
    return LLAMA3_JSON if re.search(r"""["']parameters["']: ?""", chat_template) else JSON
