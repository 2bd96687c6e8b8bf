"""How handlers read requests and write answers."""

import asyncio
import re
from collections.abc import Mapping, Sequence
from itertools import islice
from typing import TypeVar

from pydantic import BaseModel
from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import Response

from server.errors import ApiError
from server.protocol.error import ErrorResponse
from server.protocol.model import RequestModel
from server.protocol.parsing import parse, parse_in_pieces
from server.sse import as_json

AnyRequest = TypeVar("AnyRequest", bound=RequestModel)

JSON_TYPE = "application/json"
IGNORED_HEADER = "x-outrider-ignored-fields"
MAX_IGNORED_NAMES = 32
INLINE_BYTES = 1 << 16

# A header takes no other characters, and need not repeat a novel.
_SANE_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")

# For the schema: what every endpoint may answer besides its success.
ERROR_RESPONSES: dict[int | str, dict[str, object]] = {
    400: {"model": ErrorResponse, "description": "A field is wrong; param names it."},
    404: {"model": ErrorResponse, "description": "There is no such model."},
    413: {"model": ErrorResponse, "description": "The body is too large."},
    415: {"model": ErrorResponse, "description": "The body is not sent as JSON."},
    500: {"model": ErrorResponse, "description": "The request failed in the engine."},
    503: {"model": ErrorResponse, "description": "Too much to do, shutting down, or the engine has ended."},
}


class BodyReader:
    """Reads requests; large ones in a worker thread, one at a time, so that the event loop stays free.

    One at a time, because each thread that runs Python is one more that the event loop waits for.

    Args:
        inline_bytes: Bodies up to here are read at once, which takes less time than going to a thread.
    """

    def __init__(self, inline_bytes: int = INLINE_BYTES) -> None:
        self._inline_bytes = inline_bytes
        self._turn = asyncio.Semaphore(1)

    async def read(self, request: Request, kind: type[AnyRequest]) -> AnyRequest:
        """The request in the body.

        Raises:
            ApiError: It is none.
        """
        _check_headers(request.headers)
        body = await request.body()
        if len(body) <= self._inline_bytes:
            return parse(kind, body)
        async with self._turn:
            return await asyncio.to_thread(parse_in_pieces, kind, body)


def _check_headers(headers: Headers) -> None:
    content_type = headers.get("content-type", JSON_TYPE).partition(";")[0].strip().lower()
    if content_type != JSON_TYPE and not content_type.endswith("+json"):
        raise ApiError(
            415,
            f"the body must be JSON: send Content-Type: {JSON_TYPE}, not {content_type[:100]!r}",
            code="unsupported_media_type",
        )
    encoding = headers.get("content-encoding", "identity")
    if encoding != "identity":
        raise ApiError(
            415, f"the body must not be compressed, got {encoding[:100]!r}", code="unsupported_media_type"
        )


def json_response(model: BaseModel) -> Response:
    """A model as the answer."""
    return Response(as_json(model), media_type=JSON_TYPE)


def name_ignored(response: Response, fields: Sequence[str]) -> Response:
    """The response with a header that lists fields of the request that had no effect."""
    sane = (name for name in fields if _SANE_NAME.fullmatch(name))
    names = list(islice(sane, MAX_IGNORED_NAMES))
    unnamed = len(fields) - len(names)
    if fields:
        response.headers[IGNORED_HEADER] = ", ".join([*names, f"and {unnamed} more"] if unnamed else names)
    return response


def event_schema(*chunks: str, end: str | None = "[DONE]") -> dict[str, object]:
    """For the schema: an event of a stream, whose data is a chunk, an error before the end, or the end.

    Args:
        chunks: The names of the chunks' schemas.
        end: What the last event says, if one says nothing else.
    """
    payloads: list[dict[str, object]] = [
        {
            "type": "string",
            "contentMediaType": JSON_TYPE,
            "contentSchema": {"$ref": f"#/components/schemas/{name}"},
        }
        for name in (*chunks, ErrorResponse.__name__)
    ]
    data = {"anyOf": payloads if end is None else [*payloads, {"const": end}]}
    return {"type": "object", "properties": {"data": data}, "required": ["data"]}


def body_schema(kind: type[BaseModel], example: Mapping[str, object]) -> dict[str, object]:
    """For the schema: an endpoint that takes this body, which handlers read by themselves."""
    content = {"schema": {"$ref": f"#/components/schemas/{kind.__name__}"}, "example": example}
    return {"requestBody": {"required": True, "content": {JSON_TYPE: content}}}
