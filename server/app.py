"""The HTTP application."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic.json_schema import models_json_schema
from starlette.middleware import Middleware
from starlette.routing import Route, Router

from engine.client import EngineClient
from engine.sampling_params import MAX_LOGPROBS
from server import __version__
from server.errors import add_exception_handlers
from server.metrics import Metrics
from server.middleware import (
    BodyLimitMiddleware,
    ErrorMiddleware,
    HttpMetricsMiddleware,
    RequestIdMiddleware,
    RootPathMiddleware,
)
from server.protocol.chat import ChatCompletionChunk, ChatCompletionRequest
from server.protocol.completion import CompletionRequest
from server.protocol.response import ResponseRequest
from server.protocol.response_events import RESPONSE_EVENTS
from server.protocol.tokenization import DetokenizeRequest, TokenizeRequest
from server.routes.bodies import BodyReader
from server.routes.calls import Calls
from server.routes.docs import docs_router
from server.routes.generation import generation_router
from server.routes.models import models_router
from server.routes.planner import planner_router
from server.routes.probes import probes_router
from server.routes.profile import profile_router
from server.routes.responses import responses_router
from server.routes.tokenization import tokenization_router
from server.scopes import Scopes
from server.services.admission import Admission
from server.services.chat import ChatService
from server.services.chat_prompt import ChatPrompter
from server.services.completion import CompletionService
from server.services.limits import Limits
from server.services.models import ModelService
from server.services.response_store import ResponseStore
from server.services.responses import ResponseService
from server.services.tokenization import TokenizationService
from server.tools.formats import ToolParserName
from server.tools.plan import ToolPlanner


@dataclass(frozen=True, slots=True)
class AppSettings:
    """What the operator decides about the HTTP side.

    Attributes:
        served_model_name: The model's name for clients; None takes the engine's, which works in any case.
        root_path: Path prefix that a proxy in front strips.
        max_body_bytes: Longest request body.
        max_logprobs: Alternatives per token that a request may ask for.
        max_choices: Answers that one request may ask for: prompts times n.
        max_stored_responses: Responses that are kept in memory; 0 keeps none.
        max_stored_bytes: Memory that they may take together.
        profiling: Whether clients may ask for traces of steps and for the planner's table.
        tool_parser: How the model writes calls of functions; None reads it off its chat template.
    """

    served_model_name: str | None = None
    root_path: str = ""
    max_body_bytes: int = 8 * 1024 * 1024
    max_logprobs: int = MAX_LOGPROBS
    max_choices: int = 1024
    max_stored_responses: int = 1000
    max_stored_bytes: int = 64 * 1024 * 1024
    profiling: bool = False
    tool_parser: ToolParserName | None = None


@dataclass(frozen=True, slots=True)
class AppState:
    """What whoever runs the app may reach, at `app.state.outrider`.

    Attributes:
        admission: The door; set its `draining` to take no new requests.
    """

    admission: Admission


def create_app(engine: EngineClient, settings: AppSettings, metrics: Metrics) -> FastAPI:
    """The application in front of an engine.

    Args:
        engine: Serves the requests; who runs it subscribes `metrics.listener` to it.
        settings: What the operator decided.
        metrics: Counts HTTP requests, and has what /metrics shows.
    """
    models = ModelService(engine, settings.served_model_name)
    limits = Limits(settings.max_logprobs, settings.max_choices)
    prompter = ChatPrompter(engine, limits, ToolPlanner(engine, settings.tool_parser))
    completions, chat = CompletionService(engine, models, limits), ChatService(engine, models, prompter)
    store = ResponseStore(settings.max_stored_responses, settings.max_stored_bytes)
    admission, bodies = Admission(engine), BodyReader()
    calls = Calls(admission, Scopes(), bodies)
    app = FastAPI(
        title="Outrider",
        version=__version__,
        summary="OpenAI-compatible API with lossless speculative decoding.",
        redirect_slashes=False,
        docs_url=None,
        redoc_url=None,
        middleware=[
            Middleware(RootPathMiddleware, root_path=settings.root_path),
            Middleware(RequestIdMiddleware),
            Middleware(HttpMetricsMiddleware, observer=metrics),
            Middleware(ErrorMiddleware),
            Middleware(BodyLimitMiddleware, max_bytes=settings.max_body_bytes),
        ],
    )
    app.state.outrider = AppState(admission)
    add_exception_handlers(app)
    routers = [
        generation_router(completions, chat, calls),
        responses_router(ResponseService(engine, models, prompter, store), calls),
        models_router(models),
        tokenization_router(TokenizationService(engine, models), bodies),
        probes_router(admission, metrics),
        docs_router(lambda: _schema(app)),
    ]
    if settings.profiling:
        routers += [profile_router(engine), planner_router(engine)]
    metrics.watch_routes(_paths([app.router, *routers]))
    for router in routers:
        app.include_router(router)
    app.openapi = lambda: _schema(app)  # type: ignore[method-assign]
    return app


def _paths(routers: Sequence[Router]) -> Iterator[tuple[str, str]]:
    """Path and method of everything that is served."""
    for router in routers:
        for route in router.routes:
            if isinstance(route, Route):
                yield from ((route.path_format, method) for method in route.methods or ())


def _schema(app: FastAPI) -> dict[str, object]:
    """FastAPI's schema, with the bodies that handlers read themselves, and without its own 422."""
    if app.openapi_schema is None:
        schema = get_openapi(title=app.title, version=app.version, summary=app.summary, routes=app.routes)
        _, bodies = models_json_schema(
            [
                (CompletionRequest, "validation"),
                (ChatCompletionRequest, "validation"),
                (ResponseRequest, "validation"),
                (TokenizeRequest, "validation"),
                (DetokenizeRequest, "validation"),
                (ChatCompletionChunk, "serialization"),
                *((event, "serialization") for event in RESPONSE_EVENTS),
            ],
            ref_template="#/components/schemas/{model}",
        )
        components = schema["components"]["schemas"]
        components.update(bodies["$defs"])
        for operations in schema["paths"].values():
            for operation in operations.values():
                operation["responses"].pop("422", None)
        for unused in ("HTTPValidationError", "ValidationError"):
            components.pop(unused, None)
        app.openapi_schema = schema
    return app.openapi_schema
