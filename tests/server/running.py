"""A real HTTP server around an app, for tests: uvicorn in a thread, on a free port of 127.0.0.1."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import uvicorn
from fastapi import FastAPI

from server.listening import bind


@dataclass(frozen=True, slots=True)
class RunningServer:
    """A server that answers.

    Attributes:
        url: Its address, without a slash at the end.
        port: Its port on 127.0.0.1.
        app: What it serves.
    """

    url: str
    port: int
    app: FastAPI


@contextmanager
def running_server(app: FastAPI) -> Iterator[RunningServer]:
    """Serves `app` while the block runs."""
    listener = bind("127.0.0.1", 0)
    port = listener.getsockname()[1]
    config = uvicorn.Config(app, log_level="warning", ws="none", lifespan="on", timeout_graceful_shutdown=2)
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, args=([listener],), name=f"server on {port}")
    thread.start()
    try:
        deadline = time.monotonic() + 20
        while not server.started:
            assert thread.is_alive(), "the server ended while it started"
            assert time.monotonic() < deadline, "the server did not start in time"
            time.sleep(0.005)
        yield RunningServer(f"http://127.0.0.1:{port}", port, app)
    finally:
        server.should_exit = True
        thread.join(20)
        listener.close()
        assert not thread.is_alive(), "the server did not end"
