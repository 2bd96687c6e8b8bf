"""A real engine around a tiny model, behind the app, for tests that need true tokens over HTTP."""

from collections.abc import Iterator
from contextlib import contextmanager

from engine.async_engine import AsyncEngine
from engine.llm import LLM
from server.app import AppSettings, create_app
from tests.server.conftest import new_metrics
from tests.server.running import RunningServer, running_server


@contextmanager
def serving(llm: LLM, name: str = "tiny") -> Iterator[RunningServer]:
    """Serves an engine under a model's name while the block runs."""
    engine = AsyncEngine(llm.core, llm.model, llm.tokenizer)
    app = create_app(engine, AppSettings(served_model_name=name), new_metrics(engine))
    engine.start()
    try:
        with running_server(app) as server:
            yield server
    finally:
        engine.close()
