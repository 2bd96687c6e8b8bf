"""Health, readiness, metrics, request ids, the body limit and path prefixes."""

import re
import socket
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from typing import Any

import httpx
import pytest

from engine.errors import EngineDead, EngineError, InvalidRequest, Overloaded, RequestFailed
from server.app import AppSettings
from tests.fakes import FakeEngine
from tests.server.conftest import Served

Serve = Callable[..., Served]
HELLO = [{"role": "user", "content": "hi"}]

h11_alone = pytest.mark.skipif(
    find_spec("httptools") is not None, reason="httptools itself refuses methods that it has never heard of"
)


def http_counts(served: Served) -> dict[tuple[str, str, str], float]:
    pattern = r'^outrider_http_requests_total\{method="(.*?)",route="(.*?)",status="(.*?)"\} (\S+)$'
    found = re.findall(pattern, served.http.get("/metrics").text, re.MULTILINE)
    return {(method, route, status): float(count) for method, route, status, count in found}


def test_models(served: Served) -> None:
    listed = served.http.get("/v1/models").json()
    assert listed["object"] == "list"
    (card,) = listed["data"]
    assert (card["id"], card["object"], card["max_model_len"]) == ("fake", "model", 512)
    assert served.http.get("/v1/models/fake").json() == card
    assert served.http.get("/v1/models/org/fake-model").json()["id"] == "org/fake-model"


@pytest.mark.parametrize("name", ["nope", "org/nope", ""])
def test_an_unknown_model_is_a_404(served: Served, name: str) -> None:
    response = served.http.get(f"/v1/models/{name}")
    assert response.status_code == 404
    assert response.json()["error"]["code"] == "model_not_found"


def test_without_a_served_name_the_engines_is_shown(serve: Serve) -> None:
    served = serve(settings=AppSettings())
    assert served.http.get("/v1/models").json()["data"][0]["id"] == "org/fake-model"


def test_health_and_readiness_of_a_living_engine(served: Served) -> None:
    for path in ("/health", "/ready"):
        response = served.http.get(path)
        assert (response.status_code, response.json()) == (200, {"status": "ok", "reason": None})


@pytest.mark.parametrize("path", ["/health", "/ready", "/metrics", "/v1/models", "/v1/models/fake"])
def test_head_answers_as_get_does_without_a_body(served: Served, path: str) -> None:
    response = served.http.head(path)
    asked = served.http.get(path)
    assert (response.status_code, response.content) == (200, b"")
    assert response.headers["content-type"] == asked.headers["content-type"]


def test_a_trace_of_steps_is_handed_out_where_the_operator_allows_it(serve: Serve) -> None:
    served = serve(settings=AppSettings(profiling=True))
    for query, steps in (("", 8), ("?steps=3", 3)):
        response = served.http.post(f"/profile{query}")
        assert response.headers["content-type"] == "application/json"
        assert response.json()["steps"] == steps
    assert "/profile" in served.http.get("/openapi.json").json()["paths"]
    assert http_counts(served)["POST", "/profile", "200"] == 2
    assert serve().http.post("/profile").status_code == 404


def test_the_planners_table_is_shown_where_the_operator_allows_it(serve: Serve) -> None:
    served = serve(settings=AppSettings(profiling=True))
    table = served.http.get("/debug/planner").json()
    assert table["forward"] == [
        {"rows": 1, "milliseconds": 10.0, "num_seen": 7},
        {"rows": 8, "milliseconds": 17.5, "num_seen": 0},
        {"rows": 16, "milliseconds": 1235.0, "num_seen": 0},
    ]
    assert table["methods"][0]["acceptance"] == [[0.75, 0.125], [0.6667, 0.25]]
    assert (table["prediction_error"], table["num_granted"]) == (0.0003333, 44)
    assert table["requests"][0]["request_id"] == "chatcmpl-1"
    assert table["outcomes"] == [{"outcome": "load", "num_steps": 3}]
    assert "/debug/planner" in served.http.get("/openapi.json").json()["paths"]
    assert http_counts(served)["GET", "/debug/planner", "200"] == 1
    assert serve().http.get("/debug/planner").status_code == 404


@pytest.mark.parametrize(
    ("error", "status"), [(InvalidRequest("nothing is planned"), 400), (EngineDead("gone"), 503)]
)
def test_why_there_is_no_table_is_said(serve: Serve, error: EngineError, status: int) -> None:
    served = serve(FakeEngine(planner_error=error), AppSettings(profiling=True))
    response = served.http.get("/debug/planner")
    assert response.status_code == status
    assert str(error) in response.json()["error"]["message"]


@pytest.mark.parametrize("steps", ["0", "1001", "-1", "many", "", "1.5"])
def test_a_trace_of_no_number_of_steps_is_refused(serve: Serve, steps: str) -> None:
    served = serve(settings=AppSettings(profiling=True))
    error = served.http.post(f"/profile?steps={steps}").json()["error"]
    assert error["message"] == f"steps must be a whole number from 1 to 1000, got {steps!r}"
    assert (error["param"], error["code"]) == ("steps", "invalid_value")


def test_why_there_is_no_trace_is_said(serve: Serve) -> None:
    served = serve(FakeEngine(trace_error=EngineDead("gone")), AppSettings(profiling=True))
    assert served.http.post("/profile").status_code == 503


def test_a_dead_engine_is_told_with_its_reason(serve: Serve) -> None:
    served = serve(FakeEngine(alive=False))
    for path in ("/health", "/ready"):
        response = served.http.get(path)
        assert response.status_code == 503
        assert response.json() == {"status": "unavailable", "reason": "the loop died of a test"}


def test_a_draining_server_is_alive_but_takes_nothing(serve: Serve) -> None:
    served = serve()
    served.server.app.state.outrider.admission.draining = True
    assert served.http.get("/health").status_code == 200
    assert served.http.get("/ready").status_code == 503
    for path, body in (("completions", {"prompt": "x"}), ("chat/completions", {"messages": HELLO})):
        response = served.http.post(f"/v1/{path}", json=body)
        assert response.status_code == 503
        assert response.json()["error"]["code"] == "shutting_down"
        assert response.headers["retry-after"]
    assert not served.engine.requests


@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (Overloaded("full"), 503, "overloaded"),
        (EngineDead("dead"), 503, "engine_dead"),
        (RequestFailed("failed"), 500, "internal_error"),
        (EngineError("no tokenizer"), 500, "internal_error"),
    ],
)
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_the_engines_errors(serve: Serve, error: EngineError, status: int, code: str, path: str) -> None:
    served = serve(FakeEngine(admission_error=error))
    body = {"prompt": "x"} if path == "/v1/completions" else {"messages": HELLO}
    response = served.http.post(path, json=body)
    assert response.status_code == status
    assert response.json()["error"] == {
        "message": str(error),
        "type": "server_error",
        "param": None,
        "code": code,
    }
    assert ("retry-after" in response.headers) == (code == "overloaded")


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/nope", 404),
        ("POST", "/v1/nope", 404),
        ("GET", "/", 404),
        ("POST", "/v1/completions/", 404),
        ("GET", "/v1/completions", 405),
        ("DELETE", "/v1/chat/completions", 405),
        ("POST", "/health", 405),
        pytest.param("BREW", "/v1/models", 405, marks=h11_alone),
    ],
)
def test_unknown_routes_and_methods(served: Served, method: str, path: str, status: int) -> None:
    response = served.http.request(method, path)
    assert response.status_code == status
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error"
    assert path in error["message"]
    assert ("allow" in response.headers) == (status == 405)


@pytest.mark.parametrize(
    ("path", "methods"),
    [
        ("/health", "GET, HEAD"),
        ("/v1/responses/resp_1", "DELETE, GET"),
        ("/v1/completions", "POST"),
        ("/docs", "GET, HEAD"),
    ],
)
def test_allow_names_all_methods_of_a_path(served: Served, path: str, methods: str) -> None:
    response = served.http.put(path)
    assert (response.status_code, response.headers["allow"]) == (405, methods)


def test_an_exception_nobody_foresaw_is_a_500_with_an_error_object(serve: Serve) -> None:
    class Broken(FakeEngine):
        def health(self) -> Any:
            raise ZeroDivisionError("secret")

    served = serve(Broken())
    response = served.http.get("/health")
    assert response.status_code == 500
    assert response.json()["error"]["code"] == "internal_error"
    assert "secret" not in response.text
    assert response.headers["x-request-id"]


def test_metrics_have_their_own_content_type(served: Served) -> None:
    response = served.http.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain; version=")
    assert "outrider_num_requests_running" in response.text


def test_requests_are_counted_by_route_template(serve: Serve) -> None:
    served = serve()
    served.http.get("/v1/models/fake")
    served.http.get("/v1/models/a/b")
    served.http.post("/v1/completions", json={"prompt": "x"})
    served.http.post("/v1/completions", json={"prompt": "x", "stream": True})
    served.http.post("/v1/completions", json={})
    served.http.get("/nope")
    counts = http_counts(served)
    assert counts["GET", "/v1/models/{model}", "200"] == 1
    assert counts["GET", "/v1/models/{model}", "404"] == 1
    assert counts["POST", "/v1/completions", "200"] == 2
    assert counts["POST", "/v1/completions", "400"] == 1
    assert counts["other", "other", "404"] == 1


def test_what_clients_make_up_makes_no_series(serve: Serve) -> None:
    served = serve()
    served.http.get("/metrics")
    before = set(http_counts(served))
    for number in range(50):
        served.http.get(f"/random/{number}")
        served.http.get(f"/v1/models/random-{number}")
        served.http.request(f"METHOD{number}", "/v1/models")
        served.http.post("/v1/completions", json={"prompt": "x", "model": f"random-{number}"})
    assert set(http_counts(served)) == before


@pytest.mark.parametrize("given", ["abc-123", "a" * 128, "trace:1/2+3="])
def test_a_sane_request_id_comes_back(served: Served, given: str) -> None:
    for path in ("/health", "/nope"):
        assert served.http.get(path, headers={"x-request-id": given}).headers["x-request-id"] == given


@pytest.mark.parametrize("given", [None, "", "a" * 129, "a b", 'x"y', "ü".encode("latin-1")])
def test_any_other_is_replaced(served: Served, given: str | bytes | None) -> None:
    headers: Any = {} if given is None else {"x-request-id": given}
    response = served.http.post("/v1/completions", json={"prompt": "x", "stream": True}, headers=headers)
    assert re.fullmatch("req-[0-9a-f]{32}", response.headers["x-request-id"])


def in_pieces(body: bytes) -> Iterator[bytes]:
    for start in range(0, len(body), 65536):
        yield body[start : start + 65536]


@pytest.mark.parametrize("chunked", [False, True])
def test_a_body_of_10_mb_is_refused_and_the_next_request_served(served: Served, chunked: bool) -> None:
    body = b'{"prompt": "' + b"x" * 10_000_000 + b'"}'
    response = served.http.post(
        "/v1/completions",
        content=in_pieces(body) if chunked else body,
        headers={"content-type": "application/json"},
    )
    assert response.status_code == 413
    error = response.json()["error"]
    assert (error["type"], error["code"]) == ("invalid_request_error", "request_too_large")
    assert str(8 * 1024 * 1024) in error["message"]
    assert served.http.post("/v1/completions", json={"prompt": "x"}).status_code == 200


def test_who_sends_too_much_in_one_go_can_still_read_the_answer(served: Served) -> None:
    """Closing a connection while bytes come in resets it, and most clients then see no answer."""
    size = 30_000_000
    head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    with socket.create_connection(("127.0.0.1", served.server.port), timeout=10) as connection:
        connection.sendall(f"{head}Content-Length: {size}\r\n\r\n".encode())
        connection.sendall(b"x" * size)
        assert connection.recv(100).startswith(b"HTTP/1.1 413 ")


@pytest.mark.parametrize("chunked", [False, True])
def test_the_limit_itself_is_allowed(serve: Serve, chunked: bool) -> None:
    served = serve(settings=AppSettings(max_body_bytes=100))
    for size, status in ((100, 200), (101, 413)):
        body = b'{"prompt": "%b"}' % (b"x" * (size - 14))
        response = served.http.post(
            "/v1/completions",
            content=iter([body[:50], body[50:]]) if chunked else body,
            headers={"content-type": "application/json"},
        )
        assert response.status_code == status, response.text


def test_who_asks_before_sending_too_much_is_told_at_once(served: Served) -> None:
    head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    with socket.create_connection(("127.0.0.1", served.server.port), timeout=5) as connection:
        connection.sendall(f"{head}Content-Length: 99999999\r\nExpect: 100-continue\r\n\r\n".encode())
        assert connection.recv(100).startswith(b"HTTP/1.1 413 ")


def test_prefix_of_a_proxy_that_strips_it(serve: Serve) -> None:
    served = serve(settings=AppSettings(served_model_name="fake", root_path="/llm"))
    assert '"/llm/openapi.json"' in served.http.get("/docs").text.replace("'", '"')
    assert served.http.get("/openapi.json").json()["servers"] == [{"url": "/llm"}]
    assert served.http.get("/v1/models").status_code == 200
    assert served.http.get("/llm/v1/models").status_code == 200  # a proxy that does not strip it


def test_without_a_prefix_nothing_has_one(served: Served) -> None:
    assert '"/openapi.json"' in served.http.get("/docs").text.replace("'", '"')
    assert "servers" not in served.http.get("/openapi.json").json()


def test_head_of_a_stream_that_fails_early_is_no_stream(serve: Serve) -> None:
    served = serve()
    response = served.http.post("/v1/completions", json={"prompt": "", "stream": True})
    assert response.status_code == 400
    assert isinstance(response, httpx.Response)
    assert response.json()["error"]["param"] == "prompt"
