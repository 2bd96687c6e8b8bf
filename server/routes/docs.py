"""The API reference at /docs: one page of plain HTML, made from the app's own schema."""

from collections.abc import Callable, Mapping
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import HTMLResponse

from server.docs_page import Heading, Place, render_page
from server.reference import read_endpoints

# Nothing is loaded, run or sent: not even a fault in the page could make it do so.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"


def docs_router(schema: Callable[[], Mapping[str, Any]]) -> APIRouter:
    """GET /docs.

    Args:
        schema: The app's OpenAPI schema.
    """
    router = APIRouter(include_in_schema=False)

    @router.api_route("/docs", methods=["GET", "HEAD"])
    async def docs(request: Request) -> HTMLResponse:
        """The page; its links and examples go to where the client found it."""
        document = schema()
        info = document["info"]
        page = render_page(
            Heading(info["title"], info["version"], info.get("summary", "")),
            read_endpoints(document),
            Place(str(request.base_url).rstrip("/"), request.scope.get("root_path", "")),
        )
        return HTMLResponse(page, headers={"Content-Security-Policy": _POLICY})

    return router
