"""From exceptions to OpenAI's error object: one shape for whatever goes wrong.

    {"error": {"message": ..., "type": ..., "param": ..., "code": ...}}

| exception              | status | type                  | code                    |
|------------------------|--------|-----------------------|-------------------------|
| InvalidRequest         | 400    | invalid_request_error | invalid_value           |
| ContextTooLong         | 400    | invalid_request_error | context_length_exceeded |
| Overloaded             | 503    | server_error          | overloaded              |
| EngineDead             | 503    | server_error          | engine_dead             |
| RequestFailed, others  | 500    | server_error          | internal_error          |
| ClientDisconnect       | 499    | nobody reads it                                 |

Overload is a 503 and not a 429: OpenAI's 429 speaks of the client's own quota, and load balancers turn to
another replica on a 503. Its Retry-After is honoured by the official client.
"""

import logging
from collections.abc import Mapping, Sequence

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Match, Route

from engine.errors import ContextTooLong, EngineDead, EngineError, InvalidRequest, Overloaded
from server.protocol.error import ErrorBody, ErrorResponse

CLIENT_CLOSED_REQUEST = 499
RETRY_AFTER_SECONDS = 1

_HTTP_CODES = {404: "not_found", 405: "method_not_allowed", 413: "request_too_large"}

OTHER_KINDS = {
    "assistants": "assistants",
    "audio": "model of speech",
    "batches": "batches",
    "classify": "model of classification",
    "embeddings": "model of embeddings",
    "files": "store of files",
    "fine_tuning": "training",
    "images": "model of images",
    "messages": "endpoint of that format",
    "moderations": "model of moderation",
    "pooling": "model of embeddings",
    "realtime": "model of speech",
    "rerank": "model of ranking",
    "score": "model of ranking",
    "threads": "assistants",
    "uploads": "store of files",
    "vector_stores": "store of vectors",
    "videos": "model of videos",
}
"""What there is under /v1 elsewhere."""

logger = logging.getLogger(__name__)


class ApiError(Exception):
    """An error as the client is to see it.

    Args:
        status: HTTP status.
        message: What is wrong, with the value and the limit, and what to do.
        param: The request field at fault, as the client spells it.
        code: A word that programs can compare.
        headers: HTTP headers to send along.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.param = param
        self.code = code
        self.headers = dict(headers or {})

    @property
    def body(self) -> ErrorResponse:
        """OpenAI's error object."""
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        return ErrorResponse(error=ErrorBody(message=str(self), type=kind, param=self.param, code=self.code))

    @property
    def response(self) -> Response:
        """The whole HTTP answer."""
        return Response(self.body.model_dump_json(), self.status, self.headers, media_type="application/json")


def unavailable(message: str, code: str) -> ApiError:
    """A 503 that asks the client to come back."""
    return ApiError(503, message, code=code, headers={"Retry-After": str(RETRY_AFTER_SECONDS)})


def as_api_error(error: Exception) -> ApiError:
    """What the client is told of an exception; one that nobody foresaw is logged and not shown."""
    match error:
        case ApiError():
            return error
        case ContextTooLong():
            return ApiError(400, str(error), param=error.param, code="context_length_exceeded")
        case InvalidRequest():
            return ApiError(400, str(error), param=error.param, code="invalid_value")
        case Overloaded():
            return unavailable(str(error) or "the waiting queue is full; try again later", "overloaded")
        case EngineDead():
            return ApiError(503, str(error) or "the engine has ended", code="engine_dead")
        case EngineError():
            return ApiError(500, str(error) or "the request failed in the engine", code="internal_error")
    logger.error("unexpected error while serving a request", exc_info=error)
    return ApiError(500, "internal error; the server's log has the details", code="internal_error")


def add_exception_handlers(app: FastAPI, routes: Sequence[Route]) -> None:
    """Makes every error of `app` answer with the error object.

    Args:
        app: The app.
        routes: All that it serves. A path may have a route for each of its methods, and an error of the first
            names that one's methods only.
    """

    async def _on_http_exception(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        headers = dict(error.headers or {})
        if error.status_code == 405:
            matching = [route for route in routes if route.matches(request.scope)[0] is not Match.NONE]
            headers["Allow"] = ", ".join(sorted({name for route in matching for name in route.methods or ()}))
        return _http_error(request, error, headers)

    app.add_exception_handler(ApiError, _on_error)
    app.add_exception_handler(EngineError, _on_error)
    app.add_exception_handler(HTTPException, _on_http_exception)
    app.add_exception_handler(ClientDisconnect, _on_disconnect)


async def _on_error(request: Request, error: Exception) -> Response:
    return as_api_error(error).response


def _http_error(request: Request, error: HTTPException, headers: Mapping[str, str]) -> Response:
    where = f"{request.method} {request.url.path}"
    messages = {
        404: f"there is nothing at {where}{_other_kind(request.url.path)}; /docs lists what there is",
        405: f"{where} is not allowed; the Allow header lists the methods that are",
    }
    return ApiError(
        error.status_code,
        messages.get(error.status_code, error.detail),
        code=_HTTP_CODES.get(error.status_code),
        headers=headers,
    ).response


def _other_kind(path: str) -> str:
    """What a path of OpenAI's API asks for that needs a model, or a store, of another kind."""
    parts = path.removeprefix("/").split("/")
    wanted = OTHER_KINDS.get(parts[1]) if len(parts) > 1 and parts[0] == "v1" else None
    return f", since this server's model generates text and it has no {wanted}" if wanted else ""


async def _on_disconnect(request: Request, error: Exception) -> Response:
    # Nobody reads it; the status is for the metrics and the log.
    return Response(status_code=CLIENT_CLOSED_REQUEST)
