"""The endpoint that shows what the planner of speculation goes by."""

from dataclasses import asdict

from fastapi import APIRouter
from starlette.responses import JSONResponse, Response

from engine.client import EngineClient
from engine.planning import PlannerReport
from server.routes.bodies import ERROR_RESPONSES

_DIGITS = 4
"""Significant ones of what is measured; more would be noise."""


def planner_router(engine: EngineClient) -> APIRouter:
    """GET /debug/planner.

    Args:
        engine: Whose planner it is.
    """
    router = APIRouter(tags=["operation"])

    @router.get(
        "/debug/planner",
        response_model=PlannerReport,
        response_description="The table.",
        responses={status: ERROR_RESPONSES[status] for status in (400, 503)},
    )
    async def planner() -> Response:
        """What the planner knows of costs and acceptance, and what it made of them."""
        return JSONResponse(_rounded(asdict(await engine.planner_report())))

    return router


def _rounded(value: object) -> object:
    """The same, with its floats for people to read."""
    if isinstance(value, float):
        return float(f"{value:.{_DIGITS}g}")
    if isinstance(value, dict):
        return {key: _rounded(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [_rounded(part) for part in value]
    return value
