"""Socket and web server: from the address in the settings to an app that runs until a signal."""

import asyncio
import logging
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
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


def run_app(
    app: Any, listener: socket.socket, shutdown_grace_seconds: int, on_stop: Callable[[], None]
) -> None:
    """Runs an ASGI app on a bound socket until SIGTERM or Ctrl+C, then returns.

    No connection is taken any more from then on, so that a balancer moves on at once; requests that are
    running get the grace time to finish and are cancelled after it, or by a second Ctrl+C.

    Args:
        app: The application.
        listener: What `bind` returned.
        shutdown_grace_seconds: The time that running requests get.
        on_stop: Called on the event loop when a signal has come, before anything is waited for.

    Raises:
        StartupError: The app did not start.
        KeyboardInterrupt: A second Ctrl+C did not wait for running requests.
    """
    config = uvicorn.Config(
        app,
        log_config=None,
        server_header=False,
        timeout_keep_alive=KEEP_ALIVE_SECONDS,
        timeout_graceful_shutdown=shutdown_grace_seconds,
    )
    server = _Server(config, on_stop)
    with _signals_swallowed(), _quick_switching():
        try:
            server.run(sockets=[listener])
        except SystemExit as error:
            raise StartupError("the web application did not start; the log says why") from error
    if server.force_exit:
        raise KeyboardInterrupt


class _Server(uvicorn.Server):
    """uvicorn, saying where it listens in our words, and telling when it stops."""

    def __init__(self, config: uvicorn.Config, on_stop: Callable[[], None]) -> None:
        super().__init__(config)
        self._on_stop = on_stop

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        for listener in sockets or [] if self.started else []:
            host, port = listener.getsockname()[:2]
            log.info("listening on http://%s:%d", f"[{host}]" if ":" in host else host, port)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._on_stop()
        log.info("stopping: running requests have %s s to finish", self.config.timeout_graceful_shutdown)
        await super().shutdown(sockets)
        if self.force_exit:
            await self._cut_off()

    async def _cut_off(self) -> None:
        """Ends what uvicorn leaves to the event loop's own end, which would tell of each task at length."""
        running = tuple(self.server_state.tasks)
        log.warning("stopped by a second Ctrl+C: %d running requests are cut off", len(running))
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
