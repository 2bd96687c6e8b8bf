"""Reading calls out of text: each format, whatever the text is cut into, and what only looks like calls."""

import random
from collections.abc import Sequence

import pytest

from server.tools.formats import FORMATS, format_of, knows_tools
from server.tools.parser import ToolCallParser

NAMES = frozenset({"f", "g"})
Read = tuple[str, list[tuple[str, str]]]


def read(tool_format: str, pieces: Sequence[str], max_calls: int | None = None) -> Read:
    """Content and calls of an answer that comes in pieces."""
    parser = ToolCallParser(FORMATS[tool_format], NAMES, max_calls)  # type: ignore[index]
    content = ""
    names: list[str] = []
    arguments: list[str] = []
    for parsed in [*map(parser.feed, pieces), parser.finish()]:
        content += parsed.content
        for call in parsed.calls:
            if call.name is not None:
                assert call.index == len(names)
                names.append(call.name)
                arguments.append("")
            arguments[call.index] += call.arguments
    assert parser.num_calls == len(names)
    return content, list(zip(names, arguments, strict=True))


F = ("f", '{"x": 1}')
TEXTS: list[tuple[str, str, Read]] = [
    ("hermes", '<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>', ("", [F])),
    ("hermes", 'So:\n\n<tool_call>{"name":"f","arguments":{"x": 1}}</tool_call>\n', ("So:", [F])),
    (
        "hermes",
        '<tool_call>\n{"arguments": {"x": 1}, "name": "f"}\n</tool_call>\n'
        '<tool_call>\n{"id": 7, "name": "g", "arguments": {"s": "}\\"<", "l": [[1], {}]}}\n</tool_call>',
        ("", [F, ("g", '{"s": "}\\"<", "l": [[1], {}]}')]),
    ),
    ("hermes", '<tool_call>\n{"name": "f"}\n</tool_call> Done.', ("Done.", [("f", "{}")])),
    ("hermes", '<tool_call>{"name": "f", "arguments": "{\\"x\\": 1}"}</tool_call>', ("", [F])),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"x": 1}}</tool', ("", [F])),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"x": 1', ("", [("f", '{"x": 1')])),
    ("mistral", '[TOOL_CALLS] [{"name": "f", "arguments": {"x": 1}}]', ("", [F])),
    (
        "mistral",
        'Hm. [TOOL_CALLS][{"name": "f", "arguments": {"x": 1}, "id": "abcdefghi"}, {"name": "g"}] ok',
        ("Hm.ok", [F, ("g", "{}")]),
    ),
    ("mistral_args", '[TOOL_CALLS]f[ARGS]{"x": 1}', ("", [F])),
    (
        "mistral_args",
        'So:\n[TOOL_CALLS]f[ARGS]{"x": 1}[TOOL_CALLS]g[ARGS] {"s": "}\\"[ARGS]", "l": [[{}], {}]} Done.',
        ("So:Done.", [F, ("g", '{"s": "}\\"[ARGS]", "l": [[{}], {}]}')]),
    ),
    ("mistral_args", '[TOOL_CALLS]f[CALL_ID]aB3456789[ARGS]{"x": 1}', ("", [F])),
    ("mistral_args", '[TOOL_CALLS]f[ARGS]{"x": 1', ("", [("f", '{"x": 1')])),
    (
        "mistral_args",
        '[TOOL_CALLS] [{"name": "f", "arguments": {"x": 1}}, {"name": "g"}]',
        ("", [F, ("g", "{}")]),
    ),
    ("mistral_args", '[TOOL_CALLS]{"name": "f", "arguments": {"x": 1}}', ("", [F])),
    ("llama3_json", '{"name": "f", "parameters": {"x": 1}}', ("", [F])),
    (
        "llama3_json",
        '\n{"name": "f", "parameters": {"x": 1}}; {"name": "g", "parameters": {}}',
        ("", [F, ("g", "{}")]),
    ),
    ("json", '{"name": "f", "arguments": {"x": 1}}\n{"name": "g", "arguments": {}}', ("", [F, ("g", "{}")])),
    ("json", '[{"name": "f", "arguments": {"x": 1}}, {"name": "g"}]', ("", [F, ("g", "{}")])),
    ("json", '{"name": "f", "arguments": {"x": 1}} and so on', ("and so on", [F])),
]
NO_CALLS = [
    ("hermes", "a < b, <tool and  "),
    ("hermes", '<tool_call>\n{"name": "h", "arguments": {}}\n</tool_call> tail'),
    ("hermes", "<tool_call>oops</tool_call>"),
    ("hermes", '<tool_call>\n{"na'),
    ("hermes", '{"name": "f", "arguments": {}}'),
    ("mistral", "what [TOOL_CALLS"),
    ("mistral", "[TOOL_CALLS] [1, 2]"),
    ("mistral_args", "[TOOL_CALLS]h[ARGS]{}"),
    ("mistral_args", "[TOOL_CALLS]f and more"),
    ("mistral_args", "[TOOL_CALLS]f[ARGS]no"),
    ("mistral_args", "[TOOL_CALLS]f[ARG"),
    ("mistral_args", "[TOOL_CALLS]f[CALL_ID]" + "x" * 200 + "[ARGS]{}"),
    ("mistral_args", "f[ARGS]{}"),
    ("llama3_json", '{"name": "Bob", "parameters": {}}'),
    ("llama3_json", 'I say {"name": "f", "parameters": {}}'),
    ("json", '{"answer": {"name": "f"}}'),
    ("json", '{"name": {"name": "f"}, "arguments": {}}'),
    ("json", "{}"),
    ("json", "[1, {}]"),
    ("json", "{broken"),
    ("json", ""),
    ("json", " \n "),
]


@pytest.mark.parametrize(("tool_format", "text", "expected"), TEXTS)
def test_calls(tool_format: str, text: str, expected: Read) -> None:
    assert read(tool_format, [text]) == expected


@pytest.mark.parametrize(("tool_format", "text"), NO_CALLS)
def test_what_is_no_call_is_content_to_the_letter(tool_format: str, text: str) -> None:
    assert read(tool_format, [text]) == (text, [])


@pytest.mark.parametrize(("tool_format", "text"), [*((kind, text) for kind, text, _ in TEXTS), *NO_CALLS])
def test_pieces_do_not_matter(tool_format: str, text: str) -> None:
    whole = read(tool_format, [text])
    assert read(tool_format, list(text)) == whole
    chance = random.Random(len(text))
    for _ in range(100):
        cuts = sorted(chance.choices(range(len(text) + 1), k=chance.randint(1, 6)))
        pieces = [text[begin:end] for begin, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
        assert read(tool_format, pieces) == whole


@pytest.mark.parametrize(("tool_format", "text", "expected"), TEXTS)
def test_a_limit_of_calls(tool_format: str, text: str, expected: Read) -> None:
    assert read(tool_format, [text], max_calls=1)[1] == expected[1][:1]


def test_arguments_do_not_wait_for_their_end() -> None:
    parser = ToolCallParser(FORMATS["hermes"], NAMES)
    parser.feed('<tool_call>\n{"name": "f", "arguments": ')
    assert [call.arguments for call in parser.feed('{"a": "be').calls] == ['{"a": "be']
    assert [call.arguments for call in parser.feed("gin").calls] == ["gin"]


@pytest.mark.parametrize(
    ("template", "knows", "name"),
    [
        ("{% for message in messages %}{{ message.content }}{% endfor %}", False, "json"),
        ("A tool_call is no tools_list.", False, "json"),
        ("{%- if tools %}{{ '<tool_call>' }}{% endif %}", True, "hermes"),
        ("{%- if tools %}{{ '[TOOL_CALLS] [' }}{% endif %}", True, "mistral"),
        ("{%- if tools %}{{ '[TOOL_CALLS]' + name + '[ARGS]' }}{% endif %}", True, "mistral_args"),
        ("{%- if tools %}{{- '\"parameters\": ' }}{% endif %}", True, "llama3_json"),
        ("{%- if tools %}{{ tools | tojson }}{% endif %}", True, "json"),
    ],
)
def test_a_template_tells_its_format(template: str, knows: bool, name: str) -> None:
    assert (knows_tools(template), format_of(template).name) == (knows, name)
