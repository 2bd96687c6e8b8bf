"""Pure ASGI middleware, outermost first: root path, request id, metrics, errors, body limit."""

import re
import time
import uuid
from collections.abc import Callable
from typing import Protocol

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from server.errors import CLIENT_CLOSED_REQUEST, ApiError, as_api_error

REQUEST_ID_HEADER = "x-request-id"
UNMATCHED_ROUTE = "unmatched"

_SANE_ID = re.compile(r"[A-Za-z0-9._:/+=-]{1,128}")


class HttpObserver(Protocol):
    """Who counts HTTP requests."""

    def http_request(self, route: str, method: str, status: int, seconds: float) -> None:
        """Counts one answered request by its route's template."""


class RootPathMiddleware:
    """Tells the app of the path prefix that a proxy strips, so that links on /docs and the schema have it.

    Args:
        app: What answers.
        root_path: The prefix, such as /llm; none if empty.
    """

    def __init__(self, app: ASGIApp, root_path: str) -> None:
        self._app = app
        self._root_path = root_path.rstrip("/")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers a request."""
        if self._root_path:
            scope["root_path"] = self._root_path
        await self._app(scope, receive, send)


class RequestIdMiddleware:
    """Gives every answer an x-request-id: the client's own if it is sane, else a new one.

    It is in `scope["state"]["request_id"]` for whoever logs.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers a request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = Headers(scope=scope).get(REQUEST_ID_HEADER, "")
        request_id = given if _SANE_ID.fullmatch(given) else f"req-{uuid.uuid4().hex}"
        scope.setdefault("state", {})["request_id"] = request_id

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)[REQUEST_ID_HEADER] = request_id
            await send(message)

        await self._app(scope, receive, send_with_id)


class HttpMetricsMiddleware:
    """Counts requests by route template, so that paths made up by clients make no new series.

    Args:
        app: What answers.
        observer: Who counts.
        clock: A monotonic clock in seconds.
    """

    def __init__(
        self, app: ASGIApp, observer: HttpObserver, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self._app = app
        self._observer = observer
        self._clock = clock

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers a request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started = self._clock()
        status = CLIENT_CLOSED_REQUEST

        async def send_and_note(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, send_and_note)
        finally:
            # The router notes the route it chose in this same dict.
            route = getattr(scope.get("route"), "path_format", UNMATCHED_ROUTE)
            self._observer.http_request(route, scope["method"], status, self._clock() - started)


class ErrorMiddleware:
    """The last resort: an exception that nothing else caught still answers with an error object."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers a request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started = False

        async def send_and_note(message: Message) -> None:
            nonlocal started
            started = started or message["type"] == "http.response.start"
            await send(message)

        try:
            await self._app(scope, receive, send_and_note)
        except ClientDisconnect:
            pass
        except Exception as error:
            if started:
                # The server then cuts the connection, which tells the client that the answer is no whole one.
                raise
            await as_api_error(error).response(scope, receive, send)


class BodyLimitMiddleware:
    """Refuses bodies over a limit with a 413, whether or not their length is announced.

    The rest is left unread; the web server throws it away and keeps the connection, so that clients who
    send before they read still see the answer.

    Args:
        app: What answers.
        max_bytes: The limit.
    """

    def __init__(self, app: ASGIApp, max_bytes: int) -> None:
        self._app = app
        self._max_bytes = max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers a request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        length = Headers(scope=scope).get("content-length", "")
        if length.isdecimal() and int(length[:20]) > self._max_bytes:
            raise self._too_large
        num_read = 0

        async def receive_counted() -> Message:
            nonlocal num_read
            message = await receive()
            num_read += len(message.get("body", b""))
            if num_read > self._max_bytes:
                raise self._too_large
            return message

        await self._app(scope, receive_counted, send)

    @property
    def _too_large(self) -> ApiError:
        return ApiError(
            413, f"the body is larger than {self._max_bytes} bytes, the limit", code="request_too_large"
        )
