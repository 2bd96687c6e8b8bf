"""Tools through the official client: what templates are told, what models say, what clients get."""

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import openai
import pytest
from pydantic import BaseModel, ConfigDict, Field

from engine.model.loaded_model import LoadedModel
from engine.model.loader import wrap_model
from tests.engines import add_noise, build_llm
from tests.fakes import FakeEngine
from tests.operators import operators
from tests.server.conftest import SETTINGS, Served
from tests.server.engines import serving
from tests.tiny import byte_tokenizer, tiny_model

Serve = Callable[..., Served]

HERMES_TEMPLATE = "{% if tools %}{{ tools }}<tool_call>{% endif %}"
LLAMA_TEMPLATE = "{% if tools %}{{ tools }}{\"name\": name, 'parameters': {}}{% endif %}"
MISTRAL_TEMPLATE = "{% if tools %}{{ tools }}[TOOL_CALLS]{% endif %}"
NAMED_TEMPLATE = "{% if tools %}{{ tools }}[TOOL_CALLS]{{ name }}[ARGS]{% endif %}"
MESSAGES: Any = [{"role": "user", "content": "How warm is it?"}]
WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Tells the weather",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "maxLength": 5},
                "days": {"type": "integer", "minimum": 1, "maximum": 7},
            },
            "required": ["city", "days"],
            "additionalProperties": False,
        },
    },
}
CLOCK: Any = {"type": "function", "function": {"name": "clock"}}
TOOLS: Any = [WEATHER, CLOCK]
TWO_CALLS = (
    'Let me see.\n<tool_call>\n{"name": "weather", "arguments": {"city": "Brno{\\"", "days": 2}}\n'
    "</tool_call>\n"
    '<tool_call>\n{"name": "clock", "arguments": {}}\n</tool_call>'
)


def talking(**fields: Any) -> FakeEngine:
    """An engine with room for descriptions of tools."""
    return FakeEngine(max_model_len=4096, **fields)


def client_of(served: Served) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0)


def streamed(client: openai.OpenAI, **fields: Any) -> Any:
    """The answer that the official client folds a stream into."""
    with client.chat.completions.stream(model="fake", messages=MESSAGES, **fields) as stream:
        return stream.get_final_completion().choices[0]


def outline(choice: Any) -> Any:
    calls = [
        (call.id, call.function.name, call.function.arguments) for call in choice.message.tool_calls or ()
    ]
    return choice.message.content, calls, choice.finish_reason


@pytest.mark.parametrize(
    ("template", "said", "calls"),
    [
        (HERMES_TEMPLATE, TWO_CALLS, 2),
        (LLAMA_TEMPLATE, '{"name": "weather", "parameters": {"city": "x", "days": 1}}; {"name": "clock"}', 2),
        (MISTRAL_TEMPLATE, '[TOOL_CALLS] [{"name": "clock", "arguments": {}}]', 1),
        (
            NAMED_TEMPLATE,
            '[TOOL_CALLS]clock[ARGS]{}[TOOL_CALLS]weather[ARGS]{"city": "[ARGS]", "days": 1}',
            2,
        ),
        ("", '{"name": "clock", "arguments": {}}', 1),
        (HERMES_TEMPLATE, "It is 20 degrees. <tool", 0),
        (HERMES_TEMPLATE, '<tool_call>\n{"name": "nobody", "arguments": {}}\n</tool_call>', 0),
    ],
)
@pytest.mark.parametrize("per_step", [1, 4, 100])
def test_calls_streamed_are_calls_whole(
    serve: Serve, template: str, said: str, calls: int, per_step: int
) -> None:
    engine = talking(answer=said.encode(), chat_template=template, tokens_per_step=per_step)
    with client_of(serve(engine)) as client:
        answer = client.chat.completions.create(
            model="fake", messages=MESSAGES, tools=TOOLS, seed=1, logprobs=True
        )
        choice = answer.choices[0]
        assert outline(streamed(client, tools=TOOLS, seed=1)) == outline(choice)
    content, found, reason = outline(choice)
    assert len(found) == calls
    assert reason == ("tool_calls" if calls else "stop")
    assert content == (said if not calls else "Let me see." if "Let me" in said else None)
    assert len({call_id for call_id, _, _ in found}) == calls
    assert {name for _, name, _ in found} <= {"weather", "clock"}
    assert all(isinstance(json.loads(arguments), dict) for _, _, arguments in found)
    assert choice.logprobs is not None
    assert choice.logprobs.content is not None
    assert "".join(entry.token for entry in choice.logprobs.content) == said


def test_arguments_come_in_pieces(serve: Serve) -> None:
    engine = talking(answer=TWO_CALLS.encode(), chat_template=HERMES_TEMPLATE, tokens_per_step=2)
    with client_of(serve(engine)) as client:
        stream = client.chat.completions.create(
            model="fake", messages=MESSAGES, tools=TOOLS, stream=True, stream_options={"include_usage": True}
        )
        deltas = [chunk.choices[0].delta for chunk in stream if chunk.choices]
    pieces = [call for delta in deltas for call in delta.tool_calls or ()]
    assert [piece.index for piece in pieces] == sorted(piece.index for piece in pieces)
    assert len([piece for piece in pieces if piece.index == 0]) > 8
    heads = [piece for piece in pieces if piece.id is not None]
    assert [head.function and head.function.name for head in heads] == ["weather", "clock"]
    assert all(len(head.id or "") == 29 and head.type == "function" for head in heads)


def test_a_call_that_the_limit_cuts(serve: Serve) -> None:
    engine = talking(answer=TWO_CALLS.encode(), chat_template=HERMES_TEMPLATE)
    with client_of(serve(engine)) as client:
        answer = client.chat.completions.create(
            model="fake", messages=MESSAGES, tools=TOOLS, max_completion_tokens=80
        )
    content, [(_, name, arguments)], reason = outline(answer.choices[0])
    assert (content, name, reason) == ("Let me see.", "weather", "length")
    assert arguments.startswith('{"city"')
    assert not arguments.endswith("}")


def test_one_call_only_where_that_is_asked_for(serve: Serve) -> None:
    engine = talking(answer=TWO_CALLS.encode(), chat_template=HERMES_TEMPLATE)
    with client_of(serve(engine)) as client:
        answer = client.chat.completions.create(
            model="fake", messages=MESSAGES, tools=TOOLS, parallel_tool_calls=False
        )
    assert [name for _, name, _ in outline(answer.choices[0])[1]] == ["weather"]


def test_no_tools_no_calls(serve: Serve) -> None:
    engine = talking(answer=TWO_CALLS.encode(), chat_template=HERMES_TEMPLATE)
    with client_of(serve(engine)) as client:
        for extra in ({}, {"tools": TOOLS, "tool_choice": "none"}):
            answer = client.chat.completions.create(model="fake", messages=MESSAGES, **extra)
            assert outline(answer.choices[0]) == (TWO_CALLS, [], "stop")
    assert engine.tools == [[], []]


HISTORY: Any = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Time and weather?"},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {"id": "call_1", "type": "function", "function": {"name": "clock", "arguments": "{}"}},
            {
                "id": "call_2",
                "type": "function",
                "function": {"name": "weather", "arguments": '{"city": "Brno", "days": 1}'},
            },
        ],
    },
    {"role": "tool", "tool_call_id": "call_1", "content": "noon"},
    {"role": "tool", "tool_call_id": "call_2", "content": [{"type": "text", "text": "warm"}]},
]


def test_a_template_that_knows_tools_gets_them(serve: Serve) -> None:
    engine = talking(chat_template=HERMES_TEMPLATE)
    with client_of(serve(engine)) as client:
        client.chat.completions.create(model="fake", messages=HISTORY, tools=TOOLS)
    assert engine.tools == [[WEATHER, CLOCK]]
    *_, asked, noon, warm = engine.conversations[0]
    first, second = (call["function"] for call in asked["tool_calls"])  # type: ignore[attr-defined]
    assert (first["arguments"], second["arguments"]) == ({}, {"city": "Brno", "days": 1})
    assert noon == {"role": "tool", "content": "noon", "tool_call_id": "call_1", "name": "clock"}
    assert warm["name"] == "weather"


def test_a_template_that_knows_none_is_told_in_words(serve: Serve) -> None:
    engine = talking()
    with client_of(serve(engine)) as client:
        client.chat.completions.create(model="fake", messages=HISTORY, tools=TOOLS)
    assert engine.tools == [[]]
    system, user, asked, results = engine.conversations[0]
    text = str(system["content"])
    assert text.startswith("Be brief.\n\nYou can call functions.")
    assert json.dumps(WEATHER["function"]) in text
    assert '{"name": "NAME", "arguments": {"PARAMETER": "VALUE"}}' in text
    assert user == HISTORY[1]
    assert asked == {
        "role": "assistant",
        "content": '{"name": "clock", "arguments": {}}\n'
        '{"name": "weather", "arguments": {"city": "Brno", "days": 1}}',
    }
    assert results == {"role": "user", "content": "Result of clock: noon\nResult of weather: warm"}


def test_a_template_for_tools_is_used_with_tools(serve: Serve) -> None:
    engine = talking(answer=TWO_CALLS.encode(), chat_template="{{ messages }}", tool_template=HERMES_TEMPLATE)
    with client_of(serve(engine)) as client:
        answer = client.chat.completions.create(model="fake", messages=MESSAGES, tools=TOOLS)
        client.chat.completions.create(model="fake", messages=HISTORY)
    assert len(outline(answer.choices[0])[1]) == 2
    assert engine.tools == [[WEATHER, CLOCK], []]
    # The other template knows no calls, so that earlier ones are told it in words.
    assert [message["role"] for message in engine.conversations[1]] == ["system", "user", "assistant", "user"]


def test_names_in_front_are_how_a_model_is_told_too(serve: Serve) -> None:
    engine = talking()
    with client_of(serve(engine, replace(SETTINGS, tool_parser="mistral_args"))) as client:
        client.chat.completions.create(model="fake", messages=HISTORY, tools=TOOLS)
    system, _, asked, _ = engine.conversations[0]
    assert '[TOOL_CALLS]NAME[ARGS]{"PARAMETER": "VALUE"}' in str(system["content"])
    assert "follow each other at once" in str(system["content"])
    assert asked["content"] == '[TOOL_CALLS]clock[ARGS]{}[TOOL_CALLS]weather[ARGS]{"city": "Brno", "days": 1}'


def test_a_setting_names_the_format(serve: Serve) -> None:
    engine = talking(answer=TWO_CALLS.encode())
    with client_of(serve(engine, replace(SETTINGS, tool_parser="hermes"))) as client:
        answer = client.chat.completions.create(model="fake", messages=MESSAGES, tools=TOOLS)
    assert len(outline(answer.choices[0])[1]) == 2
    assert "<tool_call>\n" in str(engine.conversations[0][0]["content"])


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": "always"}, "tool_choice"),
        (
            {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "nobody"}}},
            "tool_choice",
        ),
        ({"tools": [*TOOLS, CLOCK]}, "tools"),
        ({"tools": [{"type": "code_interpreter"}]}, "tools[0].type"),
        ({"tools": [{"type": "function", "function": {"name": "no spaces"}}]}, "tools[0].function.name"),
        (
            {"tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "array"}}}]},
            "tools[0].function.parameters",
        ),
        ({"extra_body": {"functions": [{"name": "f"}]}}, "functions"),
        ({"extra_body": {"function_call": "auto"}}, "function_call"),
        ({"tools": TOOLS, "extra_body": {"structured_outputs": {"regex": "a"}}}, "structured_outputs"),
        (
            {"messages": [{"role": "user", "content": "x", "tool_calls": HISTORY[2]["tool_calls"]}]},
            "messages[0].tool_calls",
        ),
        (
            {
                "messages": [
                    {
                        "role": "assistant",
                        "tool_calls": [
                            {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{"}}
                        ],
                    }
                ]
            },
            "messages[0].tool_calls[0].function.arguments",
        ),
        ({"messages": [{"role": "assistant"}]}, "messages[0].content"),
    ],
)
def test_requests_that_make_no_sense(served: Served, fields: Any, param: str) -> None:
    with client_of(served) as client, pytest.raises(openai.BadRequestError) as error:
        client.chat.completions.create(**{"model": "fake", "messages": MESSAGES, **fields})
    assert error.value.param == param


# What a grammar enforces, with a model that would never call anything by itself.

SHOW_MESSAGES = "{% for message in messages %}{{ message['role'] }}:{{ message['content'] }}\n{% endfor %}"
# Per kind of model its template, and the marks that are tokens of their own: plain ones and special ones.
MODELS: dict[str, tuple[str, list[str], list[str]]] = {
    "hermes": (HERMES_TEMPLATE, [], []),
    "hermes, marks are tokens": (HERMES_TEMPLATE, ["<tool_call>", "</tool_call>"], []),
    "hermes, marks are special": (HERMES_TEMPLATE, [], ["<tool_call>", "</tool_call>"]),
    "mistral": (MISTRAL_TEMPLATE, [], ["[TOOL_CALLS]"]),
    "mistral_args": (NAMED_TEMPLATE, [], ["[TOOL_CALLS]", "[ARGS]"]),
    "llama3_json": (LLAMA_TEMPLATE, [], []),
    "json": ("", [], []),
}


@pytest.fixture(scope="module", params=MODELS)
def client(request: pytest.FixtureRequest) -> Iterator[openai.OpenAI]:
    template, marks, special = MODELS[request.param]
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = template + SHOW_MESSAGES
    tokenizer.add_tokens(marks)
    tokenizer.add_tokens(special, special_tokens=True)

    def load(noise: float = 0.0) -> LoadedModel:
        module = tiny_model(vocab_size=len(tokenizer), max_position_embeddings=4096)
        add_noise(module, noise)
        return wrap_model(module, tokenizer, name="tiny", max_model_len=4096, operators=operators())

    llm = build_llm("draft_model 2,1,1", target=load(), draft=load(0.1), num_kv_blocks=4096)
    with (
        serving(llm, "fake") as server,
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client,
    ):
        yield client


def check_arguments(name: str, arguments: str) -> None:
    value = json.loads(arguments)
    if name == "clock":
        assert value == {}
    else:
        assert list(value) == ["city", "days"]
        assert len(value["city"]) <= 5
        assert 1 <= value["days"] <= 7


def test_a_call_can_be_required(client: openai.OpenAI) -> None:
    for seed in range(2):
        asked: Any = {"tools": TOOLS, "tool_choice": "required", "seed": seed, "parallel_tool_calls": False}
        answer = client.chat.completions.create(model="fake", messages=MESSAGES, **asked)
        content, [(_, name, arguments)], reason = outline(answer.choices[0])
        assert (content, reason) == (None, "tool_calls")
        check_arguments(name, arguments)
        assert outline(streamed(client, **asked)) == outline(answer.choices[0])
        plain = client.chat.completions.create(
            model="fake", messages=MESSAGES, **asked, extra_body={"speculation": {"enabled": False}}
        )
        assert outline(plain.choices[0]) == outline(answer.choices[0])


def test_a_function_can_be_named(client: openai.OpenAI) -> None:
    for name in ("weather", "clock"):
        answer = client.chat.completions.create(
            model="fake",
            messages=MESSAGES,
            tools=TOOLS,
            tool_choice={"type": "function", "function": {"name": name}},
        )
        _, [(_, called, arguments)], reason = outline(answer.choices[0])
        assert (called, reason) == (name, "tool_calls")
        check_arguments(name, arguments)


class Weather(BaseModel):
    """Tells the weather."""

    model_config = ConfigDict(extra="forbid")
    city: str = Field(max_length=4)
    days: int = Field(ge=1, le=7)


def test_the_parse_helper_reads_arguments(client: openai.OpenAI) -> None:
    answer = client.chat.completions.parse(
        model="fake",
        messages=MESSAGES,
        tools=[openai.pydantic_function_tool(Weather)],
        tool_choice={"type": "function", "function": {"name": "Weather"}},
        seed=1,
    )
    calls = answer.choices[0].message.tool_calls
    assert calls is not None
    assert isinstance(calls[0].function.parsed_arguments, Weather)


def test_a_schema_that_cannot_be_enforced_is_refused(client: openai.OpenAI) -> None:
    tool: Any = {"type": "function", "function": {"name": "f", "parameters": {"not": {}}}}
    with pytest.raises(openai.BadRequestError, match="'not'") as error:
        client.chat.completions.create(model="fake", messages=MESSAGES, tools=[tool], tool_choice="required")
    assert error.value.param == "tools"


def test_a_call_or_json_of_a_format(client: openai.OpenAI) -> None:
    schema = {
        "type": "object",
        "properties": {"ok": {"type": "boolean"}},
        "required": ["ok"],
        "additionalProperties": False,
    }
    for seed in range(2):
        answer = client.chat.completions.create(
            model="fake",
            messages=MESSAGES,
            tools=[CLOCK],
            parallel_tool_calls=False,
            seed=seed,
            response_format={"type": "json_schema", "json_schema": {"name": "s", "schema": schema}},
        )
        content, calls, reason = outline(answer.choices[0])
        if calls:
            assert (content, reason) == (None, "tool_calls")
            check_arguments(*calls[0][1:])
        else:
            assert json.loads(content) in ({"ok": True}, {"ok": False})


def test_strict_functions_leave_the_text_free(client: openai.OpenAI) -> None:
    strict = {**WEATHER, "function": {**WEATHER["function"], "strict": True}}
    letters = {str(token): 100 for token in b"abcdefghijklmnopqrstuvwxyz"}
    asked: Any = {"tools": [strict], "seed": 1, "max_completion_tokens": 12, "logit_bias": letters}
    answer = client.chat.completions.create(model="fake", messages=MESSAGES, **asked)
    free = client.chat.completions.create(model="fake", messages=MESSAGES, **{**asked, "tools": [WEATHER]})
    assert outline(answer.choices[0])[1] == []
    assert answer.choices[0].message.content
    assert answer.choices[0].message.content == free.choices[0].message.content
