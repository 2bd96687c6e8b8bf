"""The composition root: builds engine, metrics and app from the settings and runs them until a signal."""

import gc
import logging
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import closing, contextmanager

from engine.async_engine import AsyncEngine
from engine.config import EngineConfig
from engine.factory import Engine, build_engine
from server import __version__
from server.app import AppSettings, create_app
from server.config import LoadedConfig
from server.listening import Stopping, bind, run_app
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
            max_stored_responses=http.max_stored_responses,
            max_stored_bytes=int(http.max_stored_mb * 2**20),
            profiling=http.profiling,
            tool_parser=http.tool_parser,
        )
        app = create_app(engine, settings, metrics)

        def refuse_new_requests() -> None:
            app.state.outrider.admission.draining = True

        def end_requests() -> None:
            engine.stop("the server is shutting down and gives running requests no more time")

        run_app(app, listener, Stopping(http.shutdown_grace_seconds, refuse_new_requests, end_requests))


def _built(config: EngineConfig) -> Engine:
    """Builds the engine, in a thread that ends with it.

    OpenMP keeps workers for each thread that has computed something. With those of the main thread beside the
    engine thread's there would be more than cores, and none would wait awake for the next operator: a step of
    a small model would take half as long again.
    """
    future: Future[Engine] = Future()

    def build() -> None:
        try:
            future.set_result(build_engine(config))
        except BaseException as error:  # Whatever it is, it is raised where it is waited for.
            future.set_exception(error)

    thread = threading.Thread(target=build, name="outrider-start", daemon=True)
    thread.start()
    thread.join()
    return future.result()


@contextmanager
def _running_engine(config: EngineConfig) -> Iterator[AsyncEngine]:
    built = _built(config)
    # What is there now stays. Looking through all of it for garbage would hold everything up, the event loop
    # too, for as long as a step of a small model takes, each time that many objects have been made.
    gc.collect()
    gc.freeze()
    engine = AsyncEngine(
        built.core, built.model, built.tokenizer, step_timeout_seconds=config.scheduler.step_timeout_seconds
    )
    engine.start()
    try:
        yield engine
    finally:
        engine.close()
        log.info("engine closed")
