"""The endpoints that show the model's tokens."""

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from server import __version__
from server.protocol.tokenization import (
    Detokenized,
    DetokenizeRequest,
    Tokenized,
    TokenizeRequest,
    Version,
)
from server.routes.bodies import ERROR_RESPONSES, BodyReader, body_schema, json_response
from server.services.tokenization import TokenizationService

TOKENIZE_EXAMPLE: dict[str, object] = {"prompt": "The capital of France is"}
DETOKENIZE_EXAMPLE: dict[str, object] = {"tokens": [504, 3575, 282, 4649, 314]}
ERRORS: dict[int | str, dict[str, object]] = {
    status: ERROR_RESPONSES[status] for status in (400, 404, 413, 415, 500)
}


def tokenization_router(tokenization: TokenizationService, bodies: BodyReader) -> APIRouter:
    """POST /tokenize and /detokenize, GET /version."""
    router = APIRouter(tags=["models"])

    @router.post(
        "/tokenize",
        response_model=None,
        responses={200: {"model": Tokenized, "description": "The tokens."}, **ERRORS},
        openapi_extra=body_schema(TokenizeRequest, TOKENIZE_EXAMPLE),
    )
    async def tokenize(request: Request) -> Response:
        """The tokens of a text or a conversation."""
        return json_response(await tokenization.tokenize(await bodies.read(request, TokenizeRequest)))

    @router.post(
        "/detokenize",
        response_model=None,
        responses={200: {"model": Detokenized, "description": "The text."}, **ERRORS},
        openapi_extra=body_schema(DetokenizeRequest, DETOKENIZE_EXAMPLE),
    )
    async def detokenize(request: Request) -> Response:
        """The text of tokens."""
        return json_response(await tokenization.detokenize(await bodies.read(request, DetokenizeRequest)))

    @router.head("/version", include_in_schema=False)
    @router.get("/version", response_description="The version.")
    async def version() -> Version:
        """The server's version."""
        return Version(version=__version__)

    return router
