"""The composition root: builds metrics, engine and app from the settings, and runs them until told to stop."""

import logging
import signal
import socket
from collections.abc import Iterator
from contextlib import closing, contextmanager

import uvicorn
from fastapi import FastAPI

from engine.async_engine import AsyncEngine
from engine.config import EngineConfig
from engine.errors import StartupError
from engine.factory import build_engine_core
from server import __version__
from server.app import AppSettings, create_app
from server.config import HttpConfig, LoadedConfig
from server.log_setup import configure_logging
from server.metrics import Metrics

log = logging.getLogger(__name__)

# Longer than nginx keeps an idle connection to an upstream (60 s), so that it is the proxy who hangs up.
# The other way round a request can be sent into a connection that is just being closed.
KEEP_ALIVE_SECONDS = 75


def serve(loaded: LoadedConfig) -> None:
    """Serves until SIGTERM or Ctrl+C.

    Raises:
        StartupError: The address is taken, or the engine cannot be built.
    """
    http = loaded.config.http
    configure_logging(http.log_level)
    log.info("Outrider %s", __version__)
    for note in loaded.notes:
        log.warning("%s", note)
    with closing(bind(http.host, http.port)) as listener, _running_engine(loaded.config.engine) as engine:
        name = http.served_model_name or engine.model.name
        metrics = Metrics(
            model_name=name, method=engine.model.method, max_draft_tokens=engine.model.max_draft_tokens
        )
        engine.subscribe(metrics.listener)
        settings = AppSettings(
            model_name=name, root_path=http.root_path, max_body_bytes=int(http.max_body_mb * 2**20)
        )
        run(create_app(engine, settings, metrics), listener, http)


@contextmanager
def _running_engine(config: EngineConfig) -> Iterator[AsyncEngine]:
    engine = AsyncEngine(build_engine_core(config))
    engine.start()
    try:
        yield engine
    finally:
        engine.close()
        log.info("Engine closed")


def bind(host: str, port: int) -> socket.socket:
    """A socket bound to the address but not listening yet: clients are refused until the server is up.

    Raises:
        StartupError: The address cannot be had. Said before the model is loaded, not after.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise StartupError(
            f"cannot listen on {host}:{port}: {error.strerror}; choose another with --host and --port"
        ) from error
    return listener


def run(app: FastAPI, listener: socket.socket, http: HttpConfig) -> None:
    """Runs the app on the socket until a signal; running answers get the grace time to finish."""
    server = _Server(
        uvicorn.Config(
            app,
            log_config=None,
            server_header=False,
            timeout_keep_alive=KEEP_ALIVE_SECONDS,
            timeout_graceful_shutdown=http.shutdown_grace_seconds,
        )
    )
    with _signals_swallowed():
        server.run(sockets=[listener])
    if not server.started:
        raise StartupError("the web application did not start; the log says why")


class _Server(uvicorn.Server):
    """uvicorn, saying where it listens in our words."""

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        for listener in sockets or []:
            host, port = listener.getsockname()[:2]
            log.info("Listening on http://%s:%d", f"[{host}]" if ":" in host else host, port)


@contextmanager
def _signals_swallowed() -> Iterator[None]:
    """Keeps the process alive past uvicorn's end, so that the engine is closed after it.

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
