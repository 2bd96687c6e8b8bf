"""The composition root: builds engine, metrics and app from the settings and runs them until a signal."""

import logging
from collections.abc import Iterator
from contextlib import closing, contextmanager

from engine.async_engine import AsyncEngine
from engine.config import EngineConfig
from engine.factory import build_engine
from server import __version__
from server.app import AppSettings, create_app
from server.config import LoadedConfig
from server.listening import bind, run_app
from server.log_setup import configure_logging
from server.metrics import Metrics

log = logging.getLogger(__name__)


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
        metrics = Metrics(
            model_name=http.served_model_name or engine.model.name,
            method=engine.model.method,
            max_draft_tokens=engine.model.max_draft_tokens,
            weights=engine.model.weights,
            probed_acceptance=engine.model.probed_acceptance,
        )
        engine.subscribe(metrics.listener)
        settings = AppSettings(
            served_model_name=http.served_model_name,
            root_path=http.root_path,
            max_body_bytes=int(http.max_body_mb * 2**20),
            max_logprobs=http.max_logprobs,
            max_choices=http.max_choices,
            profiling=http.profiling,
        )
        app = create_app(engine, settings, metrics)

        def refuse_new_requests() -> None:
            app.state.outrider.admission.draining = True

        run_app(app, listener, http.shutdown_grace_seconds, refuse_new_requests)


@contextmanager
def _running_engine(config: EngineConfig) -> Iterator[AsyncEngine]:
    built = build_engine(config)
    engine = AsyncEngine(built.core, built.model, built.tokenizer)
    engine.start()
    try:
        yield engine
    finally:
        engine.close()
        log.info("engine closed")
