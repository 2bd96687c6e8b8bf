"""/v1/responses: what it cannot honour is refused by name, and the next request is served."""

import json
from typing import Any

import pytest

from server.protocol.response_refused import REFUSED_IN_RESPONSES
from tests.server.conftest import Served
from tests.server.test_responses import CLOCK, PATH, ask, post
from tests.server.test_validation import error_of

LOGPROBS = "message.output_text.logprobs"


@pytest.mark.parametrize("field", REFUSED_IN_RESPONSES, ids=lambda field: field.name)
def test_what_would_change_the_answer_is_refused_unless_it_asks_for_nothing(
    served: Served, field: Any
) -> None:
    error = error_of(post(served, **{field.name: {"something": "wanted"}}))
    assert error["param"] == field.name
    assert error["message"].startswith(f"{field.name} is not supported")
    assert "use max_tokens" not in error["message"]
    for harmless in (None, *field.harmless):
        ask(served, **{field.name: harmless})


def content(part: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"role": "user", "content": [{"type": "input_text", "text": "x"}, part]}]


CALL = {"type": "function_call", "call_id": "a", "name": "f", "arguments": "{}"}


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"input": None}, "input", "is required"),
        ({"input": 5}, "input", "a string or a list of items"),
        ({"input": []}, "input", "must not be empty"),
        ({"input": ["x"]}, "input[0]", "must be an object"),
        ({"input": [{"role": "user"}]}, "input[0].content", "is required"),
        ({"input": [{"content": "x"}]}, "input[0].role", "is required"),
        ({"input": [{"role": "tool", "content": "x"}]}, "input[0].role", "'system'"),
        ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input[0].type", "item_reference"),
        ({"input": [{"type": "web_search_call", "id": "ws_1"}]}, "input[0].type", "web_search_call"),
        ({"input": content({"type": "input_image", "image_url": "x"})}, "input[0].content", "'input_image'"),
        ({"input": content({"type": "input_file", "file_id": "x"})}, "input[0].content", "'input_file'"),
        ({"input": content({"type": "input_audio", "data": "x"})}, "input[0].content", "'input_audio'"),
        ({"input": content({"type": "input_text"})}, "input[0].content", "as a string"),
        ({"input": [{**CALL, "arguments": "{"}]}, "input[0].arguments", "a JSON object as text"),
        ({"input": [{**CALL, "call_id": None}]}, "input[0].call_id", "is required"),
        ({"input": [{"type": "function_call_output", "call_id": "a"}]}, "input[0].output", "is required"),
        ({"input": [{"type": "reasoning", "id": "rs_1", "summary": []}]}, "input", "nothing but thoughts"),
        ({"instructions": ["x"]}, "instructions", "must be a string"),
        *[
            ({"tools": [{"type": kind}]}, "tools[0].type", kind)
            for kind in ("web_search", "file_search", "code_interpreter", "mcp", "image_generation", "custom")
        ],
        ({"tools": [{"type": "function"}]}, "tools[0].name", "is required"),
        ({"tools": [CLOCK, CLOCK]}, "tools", "several functions of one name"),
        ({"tool_choice": "required"}, "tool_choice", "needs tools"),
        ({"tools": [CLOCK], "tool_choice": "any"}, "tool_choice", "allowed_tools"),
        ({"tools": [CLOCK], "tool_choice": {"type": "web_search_preview"}}, "tool_choice", "allowed_tools"),
        ({"tools": [CLOCK], "tool_choice": {"type": "function", "name": "f"}}, "tool_choice", "'f'"),
        (
            {
                "tools": [CLOCK],
                "tool_choice": {
                    "type": "allowed_tools",
                    "mode": "auto",
                    "tools": [{"type": "function", "name": "f"}],
                },
            },
            "tool_choice",
            "'f'",
        ),
        ({"text": {"format": {"type": "xml"}}}, "text.format.type", "'json_schema'"),
        ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format.schema", "needs a schema"),
        ({"text": {"format": {"type": "json_schema", "schema": {}}}}, "text.format.name", "needs a name"),
        ({"text": {"format": {"type": "text", "name": "x"}}}, "text.format.name", "takes no name"),
        ({"text": {"verbosity": "low"}}, "text.verbosity", "not supported"),
        (
            {"text": {"format": {"type": "json_object"}}, "structured_outputs": {"regex": "a"}},
            "structured_outputs",
            "text.format",
        ),
        ({"tools": [CLOCK], "structured_outputs": {"regex": "a"}}, "structured_outputs", "text.format"),
        ({"reasoning": {"summary": "detailed"}}, "reasoning.summary", "as they are"),
        ({"reasoning": {"mode": "pro"}}, "reasoning.mode", "not supported"),
        ({"reasoning": {"context": "all_turns"}}, "reasoning.context", "not supported"),
        ({"include": ["reasoning.encrypted_content"]}, "include", "reasoning.encrypted_content"),
        ({"include": [LOGPROBS], "tools": [CLOCK]}, "include", "tools that may be called"),
        ({"top_logprobs": 2}, "top_logprobs", "needs include"),
        ({"top_logprobs": 21, "include": [LOGPROBS]}, "top_logprobs", "20"),
        ({"max_output_tokens": 0}, "max_output_tokens", "1"),
        ({"max_output_tokens": 600}, "max_output_tokens", "lower max_output_tokens"),
        ({"input": "x" * 600}, "input", "shorten the input"),
        ({"truncation": "middle"}, "truncation", "'auto' or 'disabled'"),
        ({"metadata": {"a": 1}}, "metadata.a", "must be a string"),
        ({"metadata": {str(number): "" for number in range(17)}}, "metadata", "16"),
        ({"metadata": {"a": "x" * 513}}, "metadata", "512"),
        ({"stream_options": {"include_obfuscation": True}}, "stream_options.include_obfuscation", "not supp"),
        ({"chat_template_kwargs": {"tools": []}}, "chat_template_kwargs", "tools"),
        ({"model": "gpt-9"}, "model", "gpt-9"),
        ({"store": "yes"}, "store", "true or false"),
    ],
)
def test_what_is_wrong_is_named(served: Served, fields: dict[str, Any], param: str, words: str) -> None:
    status = 404 if param == "model" else 400
    error = error_of(post(served, **fields), status)
    assert error["param"] == param
    assert words in error["message"]
    ask(served)


def test_unknown_fields_are_ignored_and_listed(served: Served) -> None:
    for stream in (False, True):
        response = post(served, x_trace=1, service_tier="auto", stream=stream, metadata={}, user="me")
        assert response.status_code == 200
        assert response.headers["x-outrider-ignored-fields"] == "x_trace, service_tier"


def test_what_asks_for_nothing_is_taken(served: Served) -> None:
    ask(
        served,
        tools=[],
        tool_choice="auto",
        text={"format": None},
        reasoning={"effort": None, "summary": "auto"},
        top_logprobs=0,
        max_tool_calls=3,
        stream_options={"include_obfuscation": False},
        background=False,
        include=[],
    )


def test_a_draining_server_takes_nothing_new(served: Served) -> None:
    state = served.server.app.state.outrider
    state.admission.draining = True
    try:
        assert post(served).status_code == 503
    finally:
        state.admission.draining = False


def test_the_body_is_json(served: Served) -> None:
    response = served.http.post(
        PATH, content=json.dumps({"input": "x"}), headers={"content-type": "text/plain"}
    )
    assert response.status_code == 415
