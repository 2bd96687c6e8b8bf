"""Socket and web server: from the address in the settings to an app that runs until a signal."""

import asyncio
import logging
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any

import uvicorn

from engine.errors import StartupError

log = logging.getLogger(__name__)

# Longer than nginx keeps an idle connection to an upstream (60 s), so that it is the proxy who hangs up.
# The other way round a request can be sent into a connection that is just being closed.
KEEP_ALIVE_SECONDS = 75

# How long the engine's thread may go on running Python while the event loop waits for the interpreter, which
# it does after each read and write. With Python's own 5 ms, 64 streams are a queue of such waits.
SWITCH_SECONDS = 0.001

# For the last words of requests that the grace time ends, and for bytes that slow clients have yet to read.
LAST_WORDS_SECONDS = 2

DRAIN_LOOK_SECONDS = 0.05


@dataclass(frozen=True, slots=True)
class Stopping:
    """What an app does when it is to stop.

    Attributes:
        grace_seconds: The time that running requests get to finish.
        refuse: Called on the event loop when a signal has come: from then on new requests are refused.
        end: Called on the event loop when the grace time is over: running requests are told so and end.
    """

    grace_seconds: int
    refuse: Callable[[], None]
    end: Callable[[], None]


def bind(host: str, port: int) -> socket.socket:
    """A socket bound to the address but not listening yet: clients are refused until the server is up.

    Raises:
        StartupError: The address cannot be had. Said before the model is loaded, not after.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # asyncio sets TCP_NODELAY only on sockets that name their protocol; without it each small write after the
    # first waits for the client to acknowledge, up to 40 ms.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise StartupError(
            f"cannot listen on {host}:{port}: {error.strerror}; choose another with --host and --port"
        ) from error
    return listener


def run_app(app: Any, listener: socket.socket, stopping: Stopping) -> None:
    """Runs an ASGI app on a bound socket until SIGTERM or Ctrl+C, then returns.

    It answers until the last running request has finished, so that whoever still comes is told to go
    elsewhere, and probes see that it drains. Requests that the grace time is too short for are told so; those
    that do not end by that are cancelled, as all are by a second signal.

    Args:
        app: The application.
        listener: What `bind` returned.
        stopping: What the app does when a signal has come.

    Raises:
        StartupError: The app did not start.
        KeyboardInterrupt: A second signal did not wait for running requests.
    """
    config = uvicorn.Config(
        app,
        log_config=None,
        server_header=False,
        timeout_keep_alive=KEEP_ALIVE_SECONDS,
        timeout_graceful_shutdown=LAST_WORDS_SECONDS,
    )
    server = _Server(config, stopping)
    with _signals_swallowed(), _quick_switching():
        try:
            server.run(sockets=[listener])
        except SystemExit as error:
            raise StartupError("the web application did not start; the log says why") from error
    if server.force_exit:
        raise KeyboardInterrupt


class _Server(uvicorn.Server):
    """uvicorn, saying where it listens in our words, and draining before it hangs up."""

    def __init__(self, config: uvicorn.Config, stopping: Stopping) -> None:
        super().__init__(config)
        self._stopping = stopping

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """The second signal is meant, whichever it is; uvicorn itself waits for a second Ctrl+C."""
        self.force_exit = self.should_exit
        super().handle_exit(sig, frame)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        for listener in sockets or [] if self.started else []:
            host, port = listener.getsockname()[:2]
            log.info("listening on http://%s:%d", f"[{host}]" if ":" in host else host, port)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._stopping.refuse()
        log.info("stopping: running requests have %s s to finish", self._stopping.grace_seconds)
        await self._drain()
        await super().shutdown(sockets)
        if self.force_exit:
            await self._cut_off()

    async def _drain(self) -> None:
        """Waits for running requests, those that come and are refused meanwhile included."""
        deadline = time.monotonic() + self._stopping.grace_seconds
        while self.server_state.tasks and not self.force_exit:
            if time.monotonic() >= deadline:
                log.warning("the grace time is over: %d requests are ended", len(self.server_state.tasks))
                self._stopping.end()
                return
            await asyncio.sleep(DRAIN_LOOK_SECONDS)

    async def _cut_off(self) -> None:
        """Ends what uvicorn leaves to the event loop's own end, which would tell of each task at length."""
        running = tuple(self.server_state.tasks)
        log.warning("stopped by a second signal: %d running requests are cut off", len(running))
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        await self.lifespan.shutdown()


@contextmanager
def _quick_switching() -> Iterator[None]:
    previous = sys.getswitchinterval()
    sys.setswitchinterval(SWITCH_SECONDS)
    try:
        yield
    finally:
        sys.setswitchinterval(previous)


@contextmanager
def _signals_swallowed() -> Iterator[None]:
    """Keeps the process alive past uvicorn's end, so that what was opened before it can be closed.

    While it runs, uvicorn handles the signals; when it is done, it raises those it got once more for
    the handlers it found, and the usual ones would end the process there.
    """
    stops = (signal.SIGINT, signal.SIGTERM)
    previous = {stop: signal.signal(stop, lambda number, frame: None) for stop in stops}
    try:
        yield
    finally:
        for stop, handler in previous.items():
            signal.signal(stop, handler)
