"""Bad requests: each gets OpenAI's error object with the field named, and the next request is served."""

import json
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from engine.acceptance import AcceptancePolicy, DraftTraits
from tests.fakes import VOCAB_SIZE, FakeEngine
from tests.server.conftest import Served

HELLO = [{"role": "user", "content": "hi"}]
PATHS = {"completions": "/v1/completions", "chat": "/v1/chat/completions"}
GOOD: dict[str, dict[str, Any]] = {"completions": {"prompt": "x"}, "chat": {"messages": HELLO}}


def error_of(response: httpx.Response, status: int = 400) -> dict[str, Any]:
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    body = response.json()
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert body["error"]["type"] == "invalid_request_error"
    error: dict[str, Any] = body["error"]
    return error


def refused(served: Served, endpoint: str, body: dict[str, Any] | str, status: int = 400) -> dict[str, Any]:
    """Sends a bad request and a good one; the error of the first."""
    text = body if isinstance(body, str) else json.dumps({**GOOD[endpoint], **body})
    headers = {"content-type": "application/json"}
    error = error_of(served.http.post(PATHS[endpoint], content=text, headers=headers), status)
    assert served.http.post(PATHS[endpoint], json=GOOD[endpoint]).status_code == 200
    return error


BAD_VALUES: dict[str, list[Any]] = {
    "seed": [2**64, 2**63, -(2**63) - 1, 10**30, "5", 1.5, 1.0, True],
    "temperature": [-0.1, 2.1, "hot", True, float("nan"), float("inf")],
    "top_p": [0, -1, 1.1, "1", float("nan")],
    "top_k": [-2, 1.5, "5", True, -(10**30)],
    "min_p": [-0.1, 1.1, float("nan")],
    "n": [0, -1, 129, 10**30, 1.0, "1", True],
    "presence_penalty": [-2.1, 2.1, float("nan")],
    "frequency_penalty": [-2.1, 2.1, float("-inf")],
    "repetition_penalty": [0, -1, float("inf"), float("nan")],
    "max_tokens": [-1, 1.5, "5", True],
    "min_tokens": [-1, 1.5, "5", True],
    "stop": ["", [""], ["", "END"], list("abcde"), 5, [5], [None], {}],
    "stop_token_ids": [5, ["5"], [1.5], [True], [-1], [VOCAB_SIZE], [10**30]],
    "ignore_eos": [1, "true"],
    "skip_special_tokens": [0, "false"],
    "include_stop_str_in_output": [1, []],
    "stream": [1, "yes"],
    "stream_options": [True],
    "user": [5],
    "model": [5],
    "logit_bias": [
        *[[], 5, {"x": 1}, {"-1": 1}, {"01": 1}, {" 1": 1}, {"1.0": 1}],
        *[{"5": bias} for bias in (101, -100.5, "1", True, None, float("nan"))],
        *[{str(VOCAB_SIZE): 1}, {"9" * 5000: 1}],
    ],
    "speculation": [True, "off", []],
}


@pytest.mark.parametrize("endpoint", ["completions", "chat"])
@pytest.mark.parametrize("field", BAD_VALUES)
def test_a_field_out_of_order_is_named(served: Served, endpoint: str, field: str) -> None:
    for value in BAD_VALUES[field]:
        error = refused(served, endpoint, {field: value})
        assert error["param"] == field, value
        assert field in error["message"], value


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"enabled": 1}, "speculation.enabled"),
        ({"num_draft_tokens": 0}, "speculation.num_draft_tokens"),
        ({"num_draft_tokens": 64}, "speculation.num_draft_tokens"),
        ({"num_draft_tokens": "3"}, "speculation.num_draft_tokens"),
        ({"acceptance": "typical"}, "speculation.acceptance"),
        ({"draft": 3}, "speculation.draft"),
        ({"no": None}, "speculation.no"),
    ],
)
def test_speculation_is_closed(served: Served, options: dict[str, Any], param: str) -> None:
    assert refused(served, "chat", {"speculation": options})["param"] == param


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"include_usage": 1}, "stream_options.include_usage"),
        ({"continuous_usage_stats": True}, "stream_options.continuous_usage_stats"),
    ],
)
def test_stream_options_are_checked(served: Served, options: dict[str, Any], param: str) -> None:
    assert refused(served, "chat", {"stream": True, "stream_options": options})["param"] == param


@pytest.mark.parametrize(
    "prompt",
    [
        *["", [""], [], [[]], [[5], []], ["a", ""]],
        *[5, {}, True, [True], [1.5], ["a", 5], [[1], "a"], [["a"]], [None]],
        *[[-1], [VOCAB_SIZE], [[5], [-1]], [10**30], "\ud800", ["x"] * 3000],
    ],
)
def test_a_prompt_that_is_none_is_named(served: Served, prompt: object) -> None:
    error = refused(served, "completions", {"prompt": prompt})
    if prompt != "\ud800":  # which is no JSON
        assert error["param"] == "prompt"
        assert "prompt" in error["message"]


def test_a_missing_prompt_is_named(served: Served) -> None:
    assert refused(served, "completions", '{"model": "fake"}')["param"] == "prompt"
    assert refused(served, "completions", '{"prompt": null}')["param"] == "prompt"


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ([], "messages"),
        (None, "messages"),
        ("hi", "messages"),
        (["hi"], "messages[0]"),
        ([{"content": "hi"}], "messages[0].role"),
        ([{"role": "robot", "content": "hi"}], "messages[0].role"),
        ([*HELLO, {"role": "user"}], "messages[1].content"),
        ([{"role": "user", "content": None}], "messages[0].content"),
        ([{"role": "user", "content": 5}], "messages[0].content"),
        ([{"role": "user", "content": []}], "messages[0].content"),
        ([{"role": "user", "content": ["hi"]}], "messages[0].content"),
        ([{"role": "user", "content": [{"type": "text"}]}], "messages[0].content"),
        (
            [{"role": "assistant", "content": "", "tool_calls": [{"id": "1"}]}],
            "messages[0].tool_calls[0].function",
        ),
        ([{"role": "assistant", "content": "", "function_call": {}}], "messages[0].function_call"),
    ],
)
def test_a_bad_message_is_named(served: Served, messages: object, param: str) -> None:
    assert refused(served, "chat", {"messages": messages})["param"] == param


@pytest.mark.parametrize("kind", ["image_url", "input_audio", "file", "refusal"])
def test_parts_that_are_no_text_are_refused_by_their_type(served: Served, kind: str) -> None:
    content = [{"type": "text", "text": "look"}, {"type": kind, kind: {}}]
    error = refused(served, "chat", {"messages": [{"role": "user", "content": content}]})
    assert error["param"] == "messages[0].content"
    assert kind in error["message"]


@pytest.mark.parametrize("logprobs", [{}, {"logprobs": False}, {"logprobs": None}])
@pytest.mark.parametrize("count", [0, 2])
def test_top_logprobs_without_logprobs(served: Served, logprobs: dict[str, Any], count: int) -> None:
    error = refused(served, "chat", {**logprobs, "top_logprobs": count})
    assert error["param"] == "top_logprobs"


@pytest.mark.parametrize(
    ("endpoint", "field", "value"),
    [
        *[("chat", "top_logprobs", value) for value in (-1, 21, 1.5, True, "2")],
        *[("chat", "max_completion_tokens", value) for value in (0, -1, "5", True)],
        ("chat", "max_tokens", 0),
        *[("completions", "logprobs", value) for value in (-1, 21, 1.5, True, False, "2")],
        *[("completions", "echo", value) for value in (1, "yes")],
        *[("completions", "best_of", value) for value in (0, 2, "1")],
    ],
)
def test_fields_of_one_endpoint(served: Served, endpoint: str, field: str, value: object) -> None:
    good = {"logprobs": True} if field == "top_logprobs" else {}
    assert refused(served, endpoint, {**good, field: value})["param"] == field


def test_chat_logprobs_are_true_or_false(served: Served) -> None:
    assert refused(served, "chat", {"logprobs": 2})["param"] == "logprobs"


def test_min_tokens_over_max_tokens(served: Served) -> None:
    assert refused(served, "completions", {"max_tokens": 2, "min_tokens": 3})["param"] == "min_tokens"


@pytest.mark.parametrize("endpoint", ["completions", "chat"])
def test_an_unknown_model_is_a_404(served: Served, endpoint: str) -> None:
    error = refused(served, endpoint, {"model": "gpt-9"}, status=404)
    assert (error["param"], error["code"]) == ("model", "model_not_found")
    assert "gpt-9" in error["message"]
    assert "fake" in error["message"]


@pytest.mark.parametrize(
    ("endpoint", "body", "param"),
    [
        ("completions", {"prompt": "x" * 512}, "prompt"),
        ("completions", {"prompt": [5] * 600}, "prompt"),
        ("completions", {"prompt": "x" * 500, "max_tokens": 13}, "max_tokens"),
        ("completions", {"prompt": "x" * 513, "max_tokens": 0, "echo": True}, "prompt"),
        ("completions", {"prompt": "x" * 600, "max_tokens": 13}, "prompt"),
        ("completions", {"min_tokens": 512}, "min_tokens"),
        ("completions", {"prompt": ["x", "x" * 600]}, "prompt"),
        ("completions", {"max_tokens": 10**30}, "max_tokens"),
        ("chat", {"messages": [{"role": "user", "content": "x" * 600}]}, "messages"),
        ("chat", {"max_tokens": 512}, "max_tokens"),
        ("chat", {"max_completion_tokens": 512}, "max_completion_tokens"),
        ("chat", {"max_completion_tokens": 512, "max_tokens": 5}, "max_completion_tokens"),
        ("chat", {"messages": [{"role": "user", "content": "x" * 600}], "max_tokens": 5}, "messages"),
        ("chat", {"min_tokens": 512}, "min_tokens"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_what_exceeds_the_context_is_told_the_figures(
    served: Served, endpoint: str, body: dict[str, Any], param: str, stream: bool
) -> None:
    error = refused(served, endpoint, {**body, "stream": stream})
    assert (error["param"], error["code"]) == (param, "context_length_exceeded")
    assert "512" in error["message"]
    assert param in error["message"]


def test_what_exceeds_the_context_is_told_what_would_fit(served: Served) -> None:
    assert refused(served, "completions", {"prompt": "Hi", "max_tokens": 8192})["message"] == (
        "this model's maximum context length is 512 tokens, of which the prompt takes 2 and leaves 510, but "
        "max_tokens is 8192; lower max_tokens or shorten the prompt"
    )
    assert refused(served, "completions", {"prompt": "x" * 600})["message"] == (
        "the prompt is too long: this model's maximum context length is 512 tokens, the answer included, but "
        "there are 600 in the prompt; shorten the prompt"
    )


def test_what_just_fits_is_served(served: Served) -> None:
    for body in ({"prompt": "x" * 500, "max_tokens": 12}, {"prompt": "x" * 511}):
        assert served.http.post("/v1/completions", json=body).status_code == 200
    body = {"prompt": "x" * 512, "max_tokens": 0, "echo": True}
    assert served.http.post("/v1/completions", json=body).status_code == 200


def test_too_many_answers_at_once(served: Served) -> None:
    assert refused(served, "completions", {"prompt": ["x"] * 100, "n": 128})["param"] == "prompt"


def test_a_rule_that_the_drafts_do_not_allow_is_refused(serve: Callable[..., Served]) -> None:
    policy = AcceptancePolicy("ngram", DraftTraits())
    served = serve(FakeEngine(acceptance=policy))
    for endpoint in ("completions", "chat"):
        for rule in ("rejection", "block", "typical"):
            error = refused(served, endpoint, {"speculation": {"acceptance": rule}})
            assert error["param"] == "speculation.acceptance"
            assert rule in error["message"]
