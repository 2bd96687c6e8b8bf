"""A real HTTP server around an app, for tests: uvicorn in a thread, on a free port of 127.0.0.1."""

import asyncio
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import uvicorn
from fastapi import FastAPI

from server.listening import bind

GRACE_SECONDS = 2


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


class _Server(uvicorn.Server):
    """uvicorn without its pauses of a tenth of a second each, before it ends and while it does."""

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        self._loop, self._ending = asyncio.get_running_loop(), asyncio.Event()
        await super().startup(sockets)

    async def main_loop(self) -> None:
        await self.on_tick(0)
        await self._ending.wait()

    def end(self) -> None:
        """Ends the server, from another thread."""
        self.should_exit = True
        self._loop.call_soon_threadsafe(self._ending.set)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        for server in self.servers:
            server.close()
        for listener in sockets or []:
            listener.close()
        for connection in list(self.server_state.connections):
            connection.shutdown()
        deadline = time.monotonic() + GRACE_SECONDS
        while (self.server_state.connections or self.server_state.tasks) and time.monotonic() < deadline:
            await asyncio.sleep(0.002)
        for task in self.server_state.tasks:
            task.cancel()
        await self.lifespan.shutdown()


@contextmanager
def running_server(app: FastAPI) -> Iterator[RunningServer]:
    """Serves `app` while the block runs."""
    listener = bind("127.0.0.1", 0)
    port = listener.getsockname()[1]
    config = uvicorn.Config(app, log_level="warning", ws="none", lifespan="on")
    server = _Server(config)
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
        if server.started:
            server.end()
        thread.join(20)
        listener.close()
        assert not thread.is_alive(), "the server did not end"
