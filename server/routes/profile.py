"""The endpoint that traces the engine's steps."""

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from engine.client import EngineClient
from server.errors import ApiError
from server.routes.bodies import ERROR_RESPONSES, JSON_TYPE

DEFAULT_STEPS, MAX_STEPS = 8, 1000

_STEPS: dict[str, object] = {
    "name": "steps",
    "in": "query",
    "description": "How many steps to trace.",
    "schema": {"type": "integer", "minimum": 1, "maximum": MAX_STEPS, "default": DEFAULT_STEPS},
}


def profile_router(engine: EngineClient) -> APIRouter:
    """POST /profile.

    Args:
        engine: Whose steps are traced.
    """
    router = APIRouter(tags=["operation"])

    @router.post(
        "/profile",
        response_class=Response,
        responses={
            200: {"description": "The trace, for ui.perfetto.dev.", "content": {JSON_TYPE: {}}},
            **{status: ERROR_RESPONSES[status] for status in (400, 503)},
        },
        openapi_extra={"parameters": [_STEPS]},
    )
    async def trace(request: Request) -> Response:
        """Trace the next steps; the answer comes when they are done, so let something run."""
        return Response(await engine.trace(_steps(request)), media_type=JSON_TYPE)

    return router


def _steps(request: Request) -> int:
    given = request.query_params.get("steps", str(DEFAULT_STEPS))
    if not (given.isascii() and given.isdigit() and 1 <= int(given) <= MAX_STEPS):
        raise ApiError(
            400,
            f"steps must be a whole number from 1 to {MAX_STEPS}, got {given[:40]!r}",
            param="steps",
            code="invalid_value",
        )
    return int(given)
