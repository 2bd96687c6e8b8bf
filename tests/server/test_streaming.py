"""Server-sent events: their frames, and that joined they are the whole answer."""

import json
import re
import socket
from collections.abc import Callable, Sequence
from typing import Any

import httpx
import pytest

from engine.errors import EngineDead, Overloaded, RequestFailed
from engine.outputs import FinishReason
from engine.sampling_params import SamplingParams
from tests.fakes import FakeEngine
from tests.server.conftest import Served
from tests.server.sse import chunks, frames, payloads

Serve = Callable[..., Served]
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
HELLO = [{"role": "user", "content": "hi"}]
GOOD: dict[str, dict[str, Any]] = {COMPLETIONS: {"prompt": "x"}, CHAT: {"messages": HELLO}}

both_endpoints = pytest.mark.parametrize("path", [COMPLETIONS, CHAT])


def stream(served: Served, path: str, **body: Any) -> httpx.Response:
    return served.http.post(path, json={**GOOD[path], "stream": True, **body})


def whole(served: Served, path: str, **body: Any) -> dict[str, Any]:
    response = served.http.post(path, json={**GOOD[path], **body})
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


def answer_by_choice(prompt: Sequence[int], params: SamplingParams) -> bytes:
    return "Aé好🙂".encode()[: 4 + params.choice * 3] + b"." * params.choice


def joined_completion(events: list[dict[str, Any]], index: int) -> dict[str, Any]:
    parts = [c for event in events for c in event["choices"] if c["index"] == index]
    logprobs = [part["logprobs"] for part in parts if part["logprobs"]]
    merged = {
        key: [item for part in logprobs for item in part[key]] if logprobs[0][key] is not None else None
        for key in (logprobs[0] if logprobs else ())
    }
    assert all(part["finish_reason"] is None for part in parts[:-1])
    return {
        "index": index,
        "text": "".join(part["text"] for part in parts),
        "logprobs": merged or None,
        "finish_reason": parts[-1]["finish_reason"],
        "stop_reason": parts[-1]["stop_reason"],
    }


def joined_chat(events: list[dict[str, Any]], index: int) -> dict[str, Any]:
    parts = [c for event in events for c in event["choices"] if c["index"] == index]
    logprobs = [entry for part in parts if part["logprobs"] for entry in part["logprobs"]["content"]]
    assert [part["delta"].get("role") for part in parts] == ["assistant", *[None] * (len(parts) - 1)]
    assert all(part["finish_reason"] is None for part in parts[:-1])
    return {
        "index": index,
        "message": {
            "role": "assistant",
            "content": "".join(part["delta"]["content"] for part in parts),
            "refusal": None,
        },
        "logprobs": {"content": logprobs} if logprobs else None,
        "finish_reason": parts[-1]["finish_reason"],
        "stop_reason": parts[-1]["stop_reason"],
    }


@pytest.mark.parametrize("tokens_per_step", [1, 3, 50])
@pytest.mark.parametrize(
    "body",
    [
        {},
        {"n": 3},
        {"max_tokens": 1},
        {"max_tokens": 9},
        {"prompt": ["a", "bé", "c"], "n": 2},
        {"prompt": "é!", "echo": True, "logprobs": 2},
        {"prompt": [[5, 6], [7]], "echo": True, "logprobs": 0, "max_tokens": 0},
        {"logprobs": 3, "n": 2},
    ],
)
def test_the_whole_completion_is_the_joined_stream(
    serve: Serve, body: dict[str, Any], tokens_per_step: int
) -> None:
    served = serve(FakeEngine(answer=answer_by_choice, tokens_per_step=tokens_per_step))
    expected = whole(served, COMPLETIONS, **body)
    events = chunks(stream(served, COMPLETIONS, **body))
    assert [joined_completion(events, i) for i in range(len(expected["choices"]))] == expected["choices"]
    assert {event["object"] for event in events} == {"text_completion"}


@pytest.mark.parametrize("tokens_per_step", [1, 3, 50])
@pytest.mark.parametrize(
    "body",
    [{}, {"n": 3}, {"max_tokens": 1}, {"logprobs": True}, {"logprobs": True, "top_logprobs": 3, "n": 2}],
)
def test_the_whole_chat_is_the_joined_stream(
    serve: Serve, body: dict[str, Any], tokens_per_step: int
) -> None:
    served = serve(FakeEngine(answer=answer_by_choice, tokens_per_step=tokens_per_step))
    expected = whole(served, CHAT, **body)
    events = chunks(stream(served, CHAT, **body))
    assert [joined_chat(events, i) for i in range(len(expected["choices"]))] == expected["choices"]
    assert {event["object"] for event in events} == {"chat.completion.chunk"}


@both_endpoints
def test_all_chunks_of_an_answer_have_one_head(served: Served, path: str) -> None:
    events = chunks(stream(served, path, n=2, model="fake"))
    heads = {(e["id"], e["created"], e["model"], e["system_fingerprint"]) for e in events}
    assert len(heads) == 1


def test_several_tokens_ride_in_one_chunk_with_a_logprob_each(served: Served) -> None:
    events = chunks(stream(served, CHAT, logprobs=True, top_logprobs=2))
    first = events[0]["choices"][0]
    assert first["delta"] == {"role": "assistant", "content": "Hel"}
    assert [entry["token"] for entry in first["logprobs"]["content"]] == ["H", "e", "l"]
    assert [entry["top_logprobs"][0]["token"] for entry in first["logprobs"]["content"]] == ["H", "e", "l"]


@both_endpoints
@pytest.mark.parametrize(
    "options",
    [{}, {"stream_options": None}, {"stream_options": {}}, {"stream_options": {"include_usage": False}}],
)
def test_no_usage_unless_asked_and_speculation_with_the_last_reason(
    served: Served, path: str, options: dict[str, Any]
) -> None:
    *events, last = chunks(stream(served, path, **options))
    assert all("usage" not in event for event in [*events, last])
    assert all("speculation" not in event for event in events)
    assert last["choices"][0]["finish_reason"] == "stop"
    assert last["speculation"] == whole(served, path)["speculation"]


@both_endpoints
@pytest.mark.parametrize("body", [{}, {"max_tokens": 1}, {"n": 3}])
def test_usage_comes_once_in_a_last_chunk_without_choices(
    served: Served, path: str, body: dict[str, Any]
) -> None:
    *events, last = chunks(stream(served, path, stream_options={"include_usage": True}, **body))
    assert all(event["usage"] is None and event["choices"] for event in events)
    assert all("speculation" not in event for event in events)
    expected = whole(served, path, **body)
    assert last["choices"] == []
    assert last["usage"] == expected["usage"]
    assert last["speculation"] == expected["speculation"]


def test_speculation_rides_once_when_choices_end_at_different_times(serve: Serve) -> None:
    served = serve(FakeEngine(answer=lambda prompt, params: b"abc" * (3 - params.choice), step_seconds=0.01))
    events = chunks(stream(served, COMPLETIONS, n=3))
    assert [i for i, event in enumerate(events) if "speculation" in event] == [len(events) - 1]
    assert events[-1]["choices"][0]["index"] == 0
    assert events[-1]["speculation"]["steps"] == 6


def test_choices_are_interleaved(serve: Serve) -> None:
    served = serve(FakeEngine(step_seconds=0.01))
    events = chunks(stream(served, COMPLETIONS, n=2))
    order = [event["choices"][0]["index"] for event in events]
    assert sorted(order[:2]) == [0, 1]
    assert order != sorted(order)


@both_endpoints
def test_headers_that_keep_a_stream_flowing(served: Served, path: str) -> None:
    response = served.http.post(
        path, json={**GOOD[path], "stream": True}, headers={"accept-encoding": "gzip, br, deflate"}
    )
    assert response.headers["content-type"].startswith("text/event-stream")
    assert "no-cache" in response.headers["cache-control"]
    assert response.headers["x-accel-buffering"] == "no"
    assert "content-encoding" not in response.headers
    assert "content-length" not in response.headers


def test_the_first_bytes_leave_before_the_end(serve: Serve) -> None:
    served = serve(FakeEngine(answer=b"x" * 30, step_seconds=0.05))
    body = {"prompt": "x", "stream": True, "max_tokens": 30}
    with served.http.stream("POST", COMPLETIONS, json=body) as response:
        pieces = response.iter_bytes()
        next(pieces)
        assert served.engine.active
        assert b"".join(pieces).endswith(b"data: [DONE]\n\n")
    assert not served.engine.active


def test_the_tokens_of_a_step_are_one_write(serve: Serve) -> None:
    """Counts HTTP chunks, of which uvicorn makes one per write."""
    served = serve(FakeEngine(answer=b"abcdef", tokens_per_step=3, step_seconds=0.02))
    body = json.dumps({"prompt": "x", "stream": True}).encode()
    head = (
        "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nConnection: close\r\n"
    )
    with socket.create_connection(("127.0.0.1", served.server.port), timeout=10) as connection:
        connection.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        raw = b"".join(iter(lambda: connection.recv(65536), b""))
    rest, writes = raw.partition(b"\r\n\r\n")[2], []
    while rest:
        size, _, rest = rest.partition(b"\r\n")
        writes.append(rest[: int(size, 16)])
        rest = rest[int(size, 16) + 2 :]
    assert [write.count(b"data: ") for write in writes] == [1, 1, 1, 0]
    assert b'"abc"' in writes[0]
    assert writes[2] == b"data: [DONE]\n\n"


@both_endpoints
def test_an_error_before_the_first_chunk_is_a_status(serve: Serve, path: str) -> None:
    served = serve(FakeEngine(admission_error=Overloaded("32 run and 1024 wait")))
    response = stream(served, path)
    assert response.status_code == 503
    assert response.headers["retry-after"] == "1"
    assert response.headers["content-type"] == "application/json"
    assert response.json()["error"] == {
        "message": "32 run and 1024 wait",
        "type": "server_error",
        "param": None,
        "code": "overloaded",
    }


@both_endpoints
@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (RequestFailed("no luck"), "internal_error", "no luck"),
        (EngineDead("the loop has ended"), "engine_dead", "the loop has ended"),
        (ZeroDivisionError("secret"), "internal_error", "internal error; the server's log has the details"),
    ],
)
def test_an_error_after_it_is_the_last_frame_before_done(
    serve: Serve, path: str, error: Exception, code: str, message: str
) -> None:
    served = serve(FakeEngine(error_after=2, error=error))
    response = stream(served, path)
    assert response.status_code == 200
    *events, last = payloads(response.text)
    assert len(events) == 2
    assert last == {"error": {"message": message, "type": "server_error", "param": None, "code": code}}


@pytest.mark.parametrize(
    ("ending", "code"), [(FinishReason.ABORT, "aborted"), (FinishReason.ERROR, "internal_error")]
)
def test_an_answer_that_the_engine_gave_up_does_not_look_finished(
    serve: Serve, ending: FinishReason, code: str
) -> None:
    served = serve(FakeEngine(ending=ending))
    *events, last = payloads(stream(served, COMPLETIONS).text)
    assert all(event["choices"][0]["finish_reason"] is None for event in events)
    assert (last["error"]["type"], last["error"]["code"]) == ("server_error", code)
    assert "log" not in last["error"]["message"]


def test_one_failing_choice_ends_the_call_and_aborts_the_others(serve: Serve) -> None:
    def answer(prompt: Sequence[int], params: SamplingParams) -> bytes:
        if params.choice == 1:
            raise RequestFailed("choice 1 failed")
        return b"x" * 400

    engine = FakeEngine(answer=answer, step_seconds=0.01)
    served = serve(engine)
    assert stream(served, COMPLETIONS, n=3, max_tokens=400).status_code == 500
    assert not engine.active
    assert sorted(name.rpartition("-")[2] for name in engine.aborted) == ["0", "1", "2"]


TRICKY = 'quote " slash \\ / tab \t line \n bell \x07 del \x7f <é好🙂\u2028> [nul \x00]'


@both_endpoints
@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize(
    "options", [{}, {"include_usage": True}, {"include_usage": True, "continuous_usage_stats": True}]
)
def test_text_alone_is_written_as_the_models_write_it(
    serve: Serve, path: str, n: int, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The JSON around it is made once, and there is no telling that from the bytes."""
    served = serve(FakeEngine(answer=TRICKY.encode() * 2, tokens_per_step=5))

    def written() -> list[str]:
        text = stream(served, path, n=n, max_tokens=200, stream_options=options).text
        return [re.sub(r'"id":"\w+-\w+"|"created":\d+', "", frame) for frame in frames(text)]

    short = written()
    assert any(r"\u0000" in frame for frame in short)
    for module in ("chat_choice", "completion"):
        monkeypatch.setattr(f"server.services.{module}.is_text_alone", lambda output: False)
    assert short == written()
