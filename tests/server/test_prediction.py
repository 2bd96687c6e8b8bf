"""Predicted Outputs over HTTP: what reaches the engine, what usage says, what is refused."""

from collections.abc import Callable
from typing import Any

import pytest

from tests.fakes import FakeEngine
from tests.server.conftest import Served
from tests.server.sse import chunks
from tests.server.test_validation import PATHS, refused

Serve = Callable[..., Served]
BODIES: dict[str, dict[str, Any]] = {
    "chat": {"messages": [{"role": "user", "content": "hi"}]},
    "completions": {"prompt": "hi", "max_tokens": 99},
}


def predicted(content: object) -> dict[str, object]:
    return {"type": "content", "content": content}


def post(served: Served, endpoint: str, **fields: Any) -> dict[str, Any]:
    response = served.http.post(PATHS[endpoint], json={**BODIES[endpoint], **fields})
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


@pytest.mark.parametrize("endpoint", PATHS)
@pytest.mark.parametrize(
    ("content", "text"),
    [
        ("Hello", "Hello"),
        ([{"type": "text", "text": "Hel"}, {"type": "text", "text": "lo"}], "Hello"),
        ("", ""),
    ],
)
def test_the_text_reaches_the_engine_as_tokens(
    serve: Serve, endpoint: str, content: object, text: str
) -> None:
    served = serve()
    post(served, endpoint, prediction=predicted(content), n=2)
    for request in served.engine.requests:
        assert request.params.speculation.prediction == tuple(text.encode())


def test_completions_take_a_plain_string_and_serve_every_prompt(serve: Serve) -> None:
    served = serve()
    post(served, "completions", prompt=["a", "b"], prediction="Hello")
    assert [request.params.speculation.prediction for request in served.engine.requests] == [(*b"Hello",)] * 2
    assert refused(served, "chat", {"prediction": "Hello"})["param"] == "prediction"


@pytest.mark.parametrize("endpoint", PATHS)
def test_usage_counts_the_predictions_tokens(serve: Serve, endpoint: str) -> None:
    """Hello, of Hello, moon! is in the answer; over two choices."""
    served = serve(FakeEngine(answer=b"Hello, world!"))
    body = {"prediction": predicted("Hello, moon!"), "n": 2}
    expected = {"accepted_prediction_tokens": 14, "rejected_prediction_tokens": 10}
    assert post(served, endpoint, **body)["usage"]["completion_tokens_details"] == expected
    stream = {**BODIES[endpoint], **body, "stream": True, "stream_options": {"include_usage": True}}
    events = chunks(served.http.post(PATHS[endpoint], json=stream))
    assert events[-1]["usage"]["completion_tokens_details"] == expected
    plain = post(served, endpoint, **body, speculation={"enabled": False})
    assert set(plain["usage"]["completion_tokens_details"].values()) == {0}


@pytest.mark.parametrize("endpoint", PATHS)
@pytest.mark.parametrize(
    "wrong",
    [
        [],
        {},
        {"type": "content"},
        {"type": "text", "content": "x"},
        predicted(None),
        predicted([]),
        predicted(5),
        predicted([{"type": "image_url", "image_url": {}}]),
        7,
        True,
    ],
)
def test_what_is_no_prediction_is_refused(served: Served, endpoint: str, wrong: object) -> None:
    assert refused(served, endpoint, {"prediction": wrong})["param"] == "prediction"


@pytest.mark.parametrize("endpoint", PATHS)
def test_a_prediction_longer_than_any_answer_is_refused(serve: Serve, endpoint: str) -> None:
    served = serve(FakeEngine(max_model_len=64))
    post(served, endpoint, prediction=predicted("x" * 64), max_tokens=5)
    error = refused(served, endpoint, {"prediction": predicted("x" * 65), "max_tokens": 5})
    assert error["param"] == "prediction"
    assert "65" in error["message"]
    assert "64" in error["message"]


@pytest.mark.parametrize("endpoint", PATHS)
def test_a_server_without_predictions_refuses_them(serve: Serve, endpoint: str) -> None:
    served = serve(FakeEngine(takes_predictions=False))
    error = refused(served, endpoint, {"prediction": predicted("x")})
    assert error["param"] == "prediction"
    assert "set to draft from no predictions" in error["message"]
    post(served, endpoint, prediction=predicted(""))
    post(served, endpoint, prediction=None)
