"""SIGTERM to the whole server around a tiny model that takes its time: three streams, and who comes later."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from tests.server.commands import LISTENING
from tests.server.sse import frames, payloads

ROOT = Path(__file__).parent.parent.parent
STEP_SECONDS, NUM_TOKENS = 0.04, 60
BODY = {
    "prompt": "x",
    "max_tokens": NUM_TOKENS,
    "ignore_eos": True,
    "stream": True,
    "speculation": {"enabled": False},
}
SCRIPT = f"""
import sys, time
from server import serve as module
from server.config import load_config
from tests.engine.async_engines import build_core

built = build_core()
forward = built.core._runner.forward

def slowly(batch):
    time.sleep({STEP_SECONDS})
    return forward(batch)

built.core._runner.forward = slowly
module._built = lambda config: built
module.serve(load_config({{"port": "0", "shutdown_grace_seconds": sys.argv[1]}}, {{}}))
"""


class Server:
    """The server's process, and what its three streams have got so far."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        self.process = process
        assert process.stderr is not None
        self.url = next(found[1] for line in process.stderr if (found := LISTENING.search(line)))
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
        self.process.send_signal(signal.SIGTERM)


@contextmanager
def serving(grace_seconds: int) -> Iterator[Server]:
    process = subprocess.Popen(
        [sys.executable, "-c", SCRIPT, str(grace_seconds)],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        yield Server(process)
    finally:
        process.kill()
        process.communicate()


def get_until(url: str, status: int) -> None:
    deadline = time.monotonic() + 5
    while httpx.get(url).status_code != status:
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_running_streams_end_well_while_newcomers_are_refused() -> None:
    with serving(grace_seconds=20) as server, ThreadPoolExecutor(3) as pool:
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
        assert server.process.wait(20) == 0


def test_streams_that_take_too_long_are_told() -> None:
    with serving(grace_seconds=0) as server, ThreadPoolExecutor(3) as pool:
        streams = [pool.submit(server.stream) for _ in range(3)]
        server.stop_after_the_first_tokens()
        for stream in streams:
            *chunks, last = payloads(stream.result())
            error = last["error"]
            assert (error["type"], error["code"]) == ("server_error", "engine_dead")
            assert "shutting down" in error["message"]
            assert chunks[-1]["choices"][0]["finish_reason"] is None
        assert server.process.wait(20) == 0


def test_a_second_sigterm_ends_everything_at_once() -> None:
    with serving(grace_seconds=20) as server, ThreadPoolExecutor(3) as pool:
        streams = [pool.submit(server.stream) for _ in range(3)]
        server.stop_after_the_first_tokens()
        get_until(f"{server.url}/ready", 503)
        server.process.send_signal(signal.SIGTERM)
        for stream in streams:
            with pytest.raises(httpx.RemoteProtocolError):
                stream.result()
        assert server.process.wait(20) != 0
