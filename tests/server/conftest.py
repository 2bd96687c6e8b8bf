import logging
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass

import httpx
import pytest

from engine.client import EngineClient
from server.app import AppSettings, create_app
from server.metrics import Metrics
from tests.fakes import FakeEngine
from tests.server.running import RunningServer, running_server

SETTINGS = AppSettings(served_model_name="fake")

StartServer = Callable[..., RunningServer]


@dataclass(frozen=True, slots=True)
class Served:
    """A server around an engine, and a client for it."""

    server: RunningServer
    engine: FakeEngine
    http: httpx.Client

    @property
    def url(self) -> str:
        return self.server.url


def new_metrics(engine: EngineClient) -> Metrics:
    metrics = Metrics(
        model_name=engine.model.name,
        method=engine.model.method,
        max_draft_tokens=engine.model.max_draft_tokens,
    )
    engine.subscribe(metrics.listener)
    return metrics


@pytest.fixture
def logging_as_it_was() -> Iterator[None]:
    """A command sets up logging for its process, which in a test goes on."""
    loggers = [logging.getLogger(name) for name in (None, "engine", "server", "uvicorn", "uvicorn.access")]
    before = [(logger.level, logger.handlers[:], logger.filters[:], logger.propagate) for logger in loggers]
    yield
    for logger, (level, handlers, filters, propagate) in zip(loggers, before, strict=True):
        logger.setLevel(level)
        logger.handlers[:], logger.filters[:], logger.propagate = handlers, filters, propagate


@pytest.fixture
def start_server() -> Iterator[StartServer]:
    """Starts servers around engines; they end with the test."""
    with ExitStack() as stack:

        def start(engine: EngineClient, settings: AppSettings = SETTINGS) -> RunningServer:
            app = create_app(engine, settings, new_metrics(engine))
            return stack.enter_context(running_server(app))

        yield start


@pytest.fixture
def serve(start_server: StartServer) -> Iterator[Callable[..., Served]]:
    """Starts servers around fake engines, each with a client."""
    with ExitStack() as stack:

        def start(engine: FakeEngine | None = None, settings: AppSettings = SETTINGS) -> Served:
            engine = engine or FakeEngine()
            server = start_server(engine, settings)
            http = stack.enter_context(httpx.Client(base_url=server.url, timeout=20))
            return Served(server, engine, http)

        yield start


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    """One server for all tests of a module that only ask."""
    engine = FakeEngine()
    app = create_app(engine, SETTINGS, new_metrics(engine))
    with running_server(app) as server, httpx.Client(base_url=server.url, timeout=20) as http:
        yield Served(server, engine, http)
