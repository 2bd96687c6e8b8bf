"""SIGTERM to the whole server around a tiny model that takes its time: three streams, and who comes later."""

import json
import multiprocessing
import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.server.commands import LISTENING
from tests.server.sse import frames, payloads

STEP_SECONDS, NUM_TOKENS = 0.04, 60
BODY = {
    "prompt": "x",
    "max_tokens": NUM_TOKENS,
    "ignore_eos": True,
    "stream": True,
    "speculation": {"enabled": False},
}


def serve_slowly(grace_seconds: int, log: str) -> None:
    """What the process does: a server whose steps take their time."""
    # What it says, and nobody else: the process is forked.
    os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT), 2)
    import torch

    from server import serve as module
    from server.config import load_config
    from tests.engine.async_engines import build_core

    torch.set_num_threads(1)
    built = build_core()
    forward = built.core._runner.forward

    def slowly(batch: Any) -> Any:
        time.sleep(STEP_SECONDS)
        return forward(batch)

    built.core._runner.forward = slowly
    module._built = lambda config: built
    module.serve(load_config({"port": "0", "shutdown_grace_seconds": str(grace_seconds)}, {}))


@pytest.fixture(scope="module")
def forking() -> Any:
    """Processes that are forked off one that has loaded all modules, which takes longer than a test."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["server.serve", "tests.engine.async_engines"])
    return context


class Server:
    """The server's process, and what its three streams have got so far."""

    def __init__(self, process: Any, log: Path) -> None:
        self.process = process
        deadline = time.monotonic() + 120
        while not (log.exists() and (found := LISTENING.search(log.read_text()))):
            assert process.is_alive()
            assert time.monotonic() < deadline
            time.sleep(0.02)
        self.url = found[1]
        self._begun = threading.Barrier(4, timeout=20)

    def stream(self) -> str:
        """One streamed answer; the others begin, too, before it goes on."""
        with httpx.stream("POST", f"{self.url}/v1/completions", json=BODY, timeout=20) as response:
            pieces = response.iter_text()
            first = next(pieces)
            self._begun.wait()
            return first + "".join(pieces)

    def stop_after_the_first_tokens(self) -> None:
        self._begun.wait()
        self.process.terminate()

    def status(self) -> int | None:
        """The exit status, once it has ended."""
        self.process.join(20)
        status: int | None = self.process.exitcode
        return status


Serving = Callable[[int], AbstractContextManager[Server]]


@pytest.fixture
def serving(forking: Any, tmp_path: Path) -> Serving:
    @contextmanager
    def start(grace_seconds: int) -> Iterator[Server]:
        process = forking.Process(target=serve_slowly, args=(grace_seconds, str(tmp_path / "log")))
        process.start()
        try:
            yield Server(process, tmp_path / "log")
        finally:
            process.kill()
            process.join()

    return start


def get_until(url: str, status: int) -> None:
    deadline = time.monotonic() + 5
    while httpx.get(url).status_code != status:
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_running_streams_end_well_while_newcomers_are_refused(serving: Serving) -> None:
    with serving(20) as server, ThreadPoolExecutor(3) as pool:
        streams = [pool.submit(server.stream) for _ in range(3)]
        server.stop_after_the_first_tokens()
        get_until(f"{server.url}/ready", 503)
        assert httpx.get(f"{server.url}/health").status_code == 200
        late = httpx.post(f"{server.url}/v1/completions", json=BODY)
        assert (late.status_code, late.json()["error"]["code"]) == (503, "shutting_down")
        for stream in streams:
            *chunks, done = frames(stream.result())
            assert done == "[DONE]"
            assert json.loads(chunks[-1])["choices"][0]["finish_reason"] == "length"
        assert server.status() == 0


def test_streams_that_take_too_long_are_told(serving: Serving) -> None:
    with serving(0) as server, ThreadPoolExecutor(3) as pool:
        streams = [pool.submit(server.stream) for _ in range(3)]
        server.stop_after_the_first_tokens()
        for stream in streams:
            *chunks, last = payloads(stream.result())
            error = last["error"]
            assert (error["type"], error["code"]) == ("server_error", "engine_dead")
            assert "shutting down" in error["message"]
            assert chunks[-1]["choices"][0]["finish_reason"] is None
        assert server.status() == 0


def test_a_second_sigterm_ends_everything_at_once(serving: Serving) -> None:
    with serving(20) as server, ThreadPoolExecutor(3) as pool:
        streams = [pool.submit(server.stream) for _ in range(3)]
        server.stop_after_the_first_tokens()
        get_until(f"{server.url}/ready", 503)
        server.process.terminate()
        for stream in streams:
            with pytest.raises(httpx.RemoteProtocolError):
                stream.result()
        assert server.status() not in (0, None)
