"""The endpoints for operators: health, readiness, metrics."""

from typing import Protocol

from fastapi import APIRouter
from pydantic import BaseModel, Field
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from server.services.admission import Admission


class MetricsSource(Protocol):
    """Who has the metrics."""

    def render(self, accept: str = "") -> tuple[bytes, str]:
        """The scrape and its content type."""


class ProbeStatus(BaseModel):
    """What a probe found."""

    status: str = Field(description="ok, or unavailable.")
    reason: str | None = Field(description="Why it is unavailable.")


def probes_router(admission: Admission, metrics: MetricsSource) -> APIRouter:
    """GET /health, /ready and /metrics."""
    router = APIRouter(tags=["operation"])
    unavailable: dict[int | str, dict[str, object]] = {
        503: {"model": ProbeStatus, "description": "It is not; the reason says why."}
    }

    @router.head("/health", include_in_schema=False)
    @router.get("/health", response_model=ProbeStatus, response_description="It is.", responses=unavailable)
    async def health() -> Response:
        """Whether the server is alive; restart it when this is not 200."""
        found = admission.health
        return _status(None if found.alive else found.reason or "the engine has ended")

    @router.head("/ready", include_in_schema=False)
    @router.get("/ready", response_model=ProbeStatus, response_description="It is.", responses=unavailable)
    async def ready() -> Response:
        """Whether the server takes requests; send it none while this is not 200."""
        return _status(admission.obstacle)

    @router.head("/metrics", include_in_schema=False)
    @router.get(
        "/metrics",
        response_class=Response,
        responses={200: {"description": "The scrape.", "content": {"text/plain": {}}}},
    )
    async def scrape(request: Request) -> Response:
        """Metrics for Prometheus."""
        body, content_type = metrics.render(request.headers.get("accept", ""))
        return Response(body, headers={"Content-Type": content_type})

    return router


def _status(obstacle: str | None) -> Response:
    found = ProbeStatus(status="unavailable" if obstacle else "ok", reason=obstacle)
    return JSONResponse(found.model_dump(), 503 if obstacle else 200)
