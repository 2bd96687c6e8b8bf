"""A client that goes away takes its engine requests with it, streamed or not, running or queued."""

import json
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from tests.fakes import FakeEngine
from tests.server.conftest import Served

Serve = Callable[..., Served]
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
HELLO = [{"role": "user", "content": "hi"}]
LONG: dict[str, dict[str, Any]] = {
    COMPLETIONS: {"prompt": "x", "max_tokens": 400, "n": 3},
    CHAT: {"messages": HELLO, "n": 3},
}


def slow_engine(**settings: Any) -> FakeEngine:
    return FakeEngine(answer=b"x" * 400, step_seconds=0.02, tokens_per_step=1, **settings)


def eventually(holds: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + 5
    while not holds():
        assert time.monotonic() < deadline, what
        time.sleep(0.01)


def send(served: Served, path: str, body: dict[str, Any]) -> socket.socket:
    connection = socket.create_connection(("127.0.0.1", served.server.port), timeout=10)
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    connection.sendall(f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data)
    return connection


def expect_all_aborted(engine: FakeEngine, count: int) -> None:
    eventually(lambda: not engine.active, "the engine goes on for nobody")
    assert len(engine.requests) == count
    assert sorted(engine.aborted) == sorted(request.request_id for request in engine.requests)
    assert engine.running == 0


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_a_stream_that_is_closed(serve: Serve, path: str) -> None:
    served = serve(slow_engine())
    with served.http.stream("POST", path, json={**LONG[path], "stream": True}) as response:
        lines = response.iter_lines()
        for _ in range(6):
            next(lines)
        assert len(served.engine.active) == 3
    expect_all_aborted(served.engine, 3)


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_a_client_that_waits_no_longer_for_the_whole_answer(serve: Serve, path: str) -> None:
    served = serve(slow_engine())
    with pytest.raises(httpx.ReadTimeout):
        served.http.post(path, json=LONG[path], timeout=0.3)
    expect_all_aborted(served.engine, 3)


@pytest.mark.parametrize("stream", [True, False])
def test_a_request_that_is_still_queued(serve: Serve, stream: bool) -> None:
    served = serve(slow_engine(capacity=0))
    with send(served, COMPLETIONS, {**LONG[COMPLETIONS], "stream": stream}):
        eventually(lambda: len(served.engine.active) == 3, "the requests never came")
    expect_all_aborted(served.engine, 3)


@pytest.mark.parametrize("stream", [True, False])
def test_neighbours_go_on(serve: Serve, stream: bool) -> None:
    served = serve(slow_engine())
    answers: list[httpx.Response] = []
    body = {"prompt": "y", "max_tokens": 40}
    neighbour = threading.Thread(target=lambda: answers.append(served.http.post(COMPLETIONS, json=body)))
    with send(served, COMPLETIONS, {**LONG[COMPLETIONS], "stream": stream}):
        eventually(lambda: len(served.engine.active) == 3, "the requests never came")
        neighbour.start()
        eventually(lambda: len(served.engine.active) == 4, "the neighbour never came")
    neighbour.join(10)
    assert answers[0].json()["choices"][0]["text"] == "x" * 40
    eventually(lambda: not served.engine.active, "the engine goes on for nobody")
    assert len(served.engine.aborted) == 3


def test_a_body_that_never_ends_asks_nothing_of_the_engine(serve: Serve) -> None:
    served = serve()
    with socket.create_connection(("127.0.0.1", served.server.port), timeout=10) as connection:
        head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        connection.sendall(f'{head}Content-Length: 100\r\n\r\n{{"prompt":'.encode())
    assert served.http.post(COMPLETIONS, json={"prompt": "x"}).status_code == 200
    assert len(served.engine.requests) == 1


def test_what_ends_by_itself_is_not_aborted(serve: Serve) -> None:
    served = serve()
    for path in (COMPLETIONS, CHAT):
        for stream in (True, False):
            served.http.post(path, json={**LONG[path], "stream": stream, "n": 2})
    assert not served.engine.active
    assert not served.engine.aborted


def test_a_client_that_left_counts_as_499(serve: Serve) -> None:
    served = serve(slow_engine())
    with pytest.raises(httpx.ReadTimeout):
        served.http.post(COMPLETIONS, json=LONG[COMPLETIONS], timeout=0.3)
    line = 'outrider_http_requests_total{method="POST",route="/v1/completions",status="499"} 1.0'
    eventually(lambda: line in served.http.get("/metrics").text, "no 499 was counted")
