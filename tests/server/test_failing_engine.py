"""What clients and probes see of an engine whose step fails, hangs, or ends its thread."""

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import httpx

from engine.async_engine import AsyncEngine
from server.app import AppSettings, create_app
from tests.engine.async_engines import build_core
from tests.server.conftest import new_metrics
from tests.server.running import running_server

BODY = {"model": "tiny", "prompt": "one two one two", "max_tokens": 8, "ignore_eos": True}
STEP_TIMEOUT_SECONDS = 1.0
Fault = Callable[[], object]


class Faulty:
    """A served engine whose next passes do what a test wants.

    Attributes:
        fault: Called in place of the next pass of the model, once.
        http: A client.
    """

    def __init__(self, engine: AsyncEngine, http: httpx.Client) -> None:
        self.fault: Fault | None = None
        self.http = http
        runner = engine._core._runner
        self._forward = runner.forward
        runner.forward = self._pass  # type: ignore[method-assign]

    def _pass(self, batch: Any) -> Any:
        fault, self.fault = self.fault, None
        if fault is not None:
            fault()
        return self._forward(batch)

    def ask(self, **body: Any) -> httpx.Response:
        return self.http.post("/v1/completions", json={**BODY, **body})

    def ask_often(self) -> list[httpx.Response]:
        """Answers to four clients at once, two of whom get streams."""
        with ThreadPoolExecutor(4) as pool:
            asked = [pool.submit(self.ask, stream=stream) for stream in (False, True, False, True)]
            return [answer.result() for answer in asked]

    @property
    def health(self) -> int:
        return self.http.get("/health").status_code


@contextmanager
def serving() -> Iterator[Faulty]:
    parts = build_core()
    engine = AsyncEngine(parts.core, parts.model, parts.tokenizer, STEP_TIMEOUT_SECONDS)
    app = create_app(engine, AppSettings(served_model_name="tiny"), new_metrics(engine))
    engine.start()
    with running_server(app) as server, httpx.Client(base_url=server.url, timeout=20) as http:
        try:
            yield Faulty(engine, http)
        finally:
            engine.close()


def code_of(answer: httpx.Response) -> str:
    code: str = answer.json()["error"]["code"]
    return code


def test_a_step_that_raises_ends_its_requests_and_leaves_the_server_healthy() -> None:
    def fail() -> None:
        raise RuntimeError("planted")

    with serving() as faulty:
        faulty.fault = fail
        answer = faulty.ask()
        assert (answer.status_code, code_of(answer)) == (500, "internal_error")
        assert faulty.health == 200
        assert faulty.ask().json()["usage"]["completion_tokens"] == 8


def test_a_step_that_hangs_makes_the_server_unhealthy_and_nobody_waits_for_ever() -> None:
    over = threading.Event()
    with serving() as faulty:
        faulty.fault = lambda: over.wait(20)
        for answer in faulty.ask_often():
            assert (answer.status_code, code_of(answer)) == (503, "engine_dead")
        assert (faulty.health, faulty.http.get("/ready").status_code) == (503, 503)
        assert "hangs" in faulty.http.get("/health").json()["reason"]
        assert faulty.ask().status_code == 503
        over.set()
        deadline = time.monotonic() + 10
        while faulty.health != 200:
            assert time.monotonic() < deadline, "the hang is over"
            time.sleep(0.02)
        assert faulty.ask().json()["usage"]["completion_tokens"] == 8


def test_a_loop_that_ends_makes_the_server_unhealthy_at_once() -> None:
    def end() -> None:
        raise SystemExit("planted")

    with serving() as faulty:
        faulty.fault = end
        for answer in faulty.ask_often():
            assert (answer.status_code, code_of(answer)) == (503, "engine_dead")
        assert faulty.health == 503
        assert faulty.ask().status_code == 503
