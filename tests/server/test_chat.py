"""POST /v1/chat/completions: the whole answers."""

from collections.abc import Callable
from typing import Any

import pytest

from engine.errors import InvalidRequest
from engine.sampling_params import Acceptance, SamplingParams, SpeculationParams
from tests.fakes import FakeEngine
from tests.server.conftest import Served

Serve = Callable[..., Served]
HELLO = [{"role": "user", "content": "Say hello"}]


def post(served: Served, **body: Any) -> Any:
    return served.http.post("/v1/chat/completions", json={"model": "fake", "messages": HELLO, **body})


def chat(served: Served, **body: Any) -> dict[str, Any]:
    response = post(served, **body)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


def test_has_the_shape_of_openai(served: Served) -> None:
    answer = chat(served)
    assert answer["id"].startswith("chatcmpl-")
    assert answer["object"] == "chat.completion"
    assert answer["choices"] == [
        {
            "index": 0,
            "message": {"role": "assistant", "content": "Hello, world!", "refusal": None},
            "logprobs": None,
            "finish_reason": "stop",
            "stop_reason": None,
        }
    ]
    assert answer["usage"]["prompt_tokens"] == len("user:Say hello\nassistant:")
    assert answer["usage"]["completion_tokens"] == 13
    assert answer["speculation"]["accepted_tokens"] == 8


@pytest.mark.parametrize(
    ("limits", "expected"),
    [
        ({"max_completion_tokens": 3}, 3),
        ({"max_tokens": 3}, 3),
        ({"max_completion_tokens": 3, "max_tokens": 9}, 3),
        ({"max_completion_tokens": 9, "max_tokens": 3}, 9),
        ({}, 128 - len("user:Say hello\nassistant:")),
    ],
)
def test_max_completion_tokens_wins_and_the_default_is_the_rest(
    serve: Serve, limits: dict[str, int], expected: int
) -> None:
    served = serve(FakeEngine(answer=b"x" * 999, max_model_len=128))
    answer = chat(served, **limits)
    assert answer["usage"]["completion_tokens"] == expected
    assert answer["choices"][0]["finish_reason"] == "length"


def test_all_roles_and_content_parts_reach_the_template_as_text(serve: Serve) -> None:
    served = serve()
    roles = ["system", "developer", "user", "assistant", "tool", "function"]
    messages = [{"role": role, "content": f"by {role}"} for role in roles]
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    chat(served, messages=[*messages, {"role": "user", "content": parts}])
    # The template knows no tools, so that their results are told in words.
    messages[4] = {"role": "user", "content": "Result of the function: by tool"}
    assert served.engine.conversations == [[*messages, {"role": "user", "content": "one\ntwo"}]]


def test_unknown_keys_are_ignored_everywhere(serve: Serve) -> None:
    served = serve()
    chat(
        served,
        messages=[{"role": "user", "content": "hi", "id": 9, "name": "bob", "tool_calls": None}],
        user="me",
        metadata={"a": "b"},
        store=True,
        service_tier="auto",
        parallel_tool_calls=True,
        prompt_cache_key="k",
        safety_identifier="s",
        x_trace=1,
    )
    assert served.engine.conversations == [[{"role": "user", "content": "hi"}]]


@pytest.mark.parametrize(
    "harmless",
    [
        {"dry_multiplier": 0.0, "xtc_probability": 0, "top_a": 0, "tfs_z": 1.0, "repeat_penalty": 1.0},
        {"early_stopping": False, "stop_sequences": [], "min_new_tokens": 0, "prompt_embeds": None},
        {"reasoning": {"effort": "none"}, "max_new_tokens": None},
        {"tools": []},
        {"tools": None, "tool_choice": "none", "functions": [], "function_call": "none"},
        {"response_format": {"type": "text"}},
        {"modalities": ["text"], "audio": None, "verbosity": "medium", "reasoning_effort": "none"},
        {"prediction": None, "web_search_options": None, "add_generation_prompt": True},
    ],
)
def test_known_fields_that_ask_for_nothing_are_fine(served: Served, harmless: dict[str, Any]) -> None:
    assert chat(served, **harmless)["choices"][0]["message"]["content"] == "Hello, world!"


@pytest.mark.parametrize(
    ("fields", "engine_logprobs"),
    [
        ({}, None),
        ({"logprobs": None}, None),
        ({"logprobs": False}, None),
        ({"logprobs": True}, 0),
        ({"logprobs": True, "top_logprobs": 0}, 0),
        ({"logprobs": True, "top_logprobs": 2}, 2),
    ],
)
def test_logprobs_and_top_logprobs(serve: Serve, fields: dict[str, Any], engine_logprobs: int | None) -> None:
    served = serve()
    choice = chat(served, max_tokens=4, **fields)["choices"][0]
    assert served.engine.requests[0].params.logprobs == engine_logprobs
    if engine_logprobs is None:
        assert choice["logprobs"] is None
        return
    entries = choice["logprobs"]["content"]
    assert [entry["token"] for entry in entries] == list("Hell")
    assert [entry["bytes"] for entry in entries] == [[byte] for byte in b"Hell"]
    assert [entry["logprob"] for entry in entries] == [-0.125, -0.25, -0.375, -0.5]
    assert [len(entry["top_logprobs"]) for entry in entries] == [engine_logprobs] * 4
    if engine_logprobs:
        assert entries[1]["top_logprobs"] == [
            {"token": "e", "logprob": -0.25, "bytes": [101]},
            {"token": "f", "logprob": -1.25, "bytes": [102]},
        ]


def test_n_choices_are_summed(serve: Serve) -> None:
    served = serve(FakeEngine(answer=lambda prompt, params: b"a" * (params.choice + 1)))
    answer = chat(served, n=3, seed=5)
    assert [choice["message"]["content"] for choice in answer["choices"]] == ["a", "aa", "aaa"]
    assert answer["usage"]["prompt_tokens"] == len("user:Say hello\nassistant:")
    assert answer["usage"]["completion_tokens"] == 6
    assert answer["speculation"]["steps"] == 3
    assert answer["speculation"]["tokens_per_forward"] == 2.0
    details = answer["usage"]["completion_tokens_details"]
    assert details == {"accepted_prediction_tokens": 0, "rejected_prediction_tokens": 0}


def test_defaults_are_openais(serve: Serve) -> None:
    served = serve()
    chat(served)
    params = served.engine.requests[0].params
    match = SpeculationParams(acceptance=Acceptance.MATCH)
    assert params == SamplingParams(seed=params.seed, speculation=match)
    assert params.temperature == 1.0
    assert params.max_tokens is None


def test_a_template_that_refuses_is_a_400_that_names_messages(serve: Serve) -> None:
    served = serve(FakeEngine(template_error=InvalidRequest("no system role here", "messages")))
    response = post(served)
    assert response.status_code == 400
    error = response.json()["error"]
    assert (error["param"], error["message"]) == ("messages", "no system role here")


def test_a_template_that_breaks_is_a_500_with_an_error_object(serve: Serve) -> None:
    served = serve(FakeEngine(template_error=ZeroDivisionError("secret")))
    response = post(served)
    assert response.status_code == 500
    assert response.json()["error"]["type"] == "server_error"
    assert "secret" not in response.text
