"""The way of every call that generates: read, known by its scope, answered whole or in events."""

from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import Response

from server.disconnect import until_disconnect
from server.protocol.base import SamplingRequest
from server.routes.bodies import BodyReader, json_response, name_ignored
from server.scopes import Scopes
from server.services.admission import Admission
from server.sse import AnyEvent, EventStream

AnyCall = TypeVar("AnyCall", bound=SamplingRequest)
Asked = TypeVar("Asked", bound=SamplingRequest, contravariant=True)
Told = TypeVar("Told", covariant=True)


class Generating(Protocol[Asked, Told]):
    """A service that answers one kind of call, of the scope that it is told (see SamplingParams)."""

    async def complete(self, request: Asked, scope: str) -> BaseModel:
        """The whole answer."""

    def stream(self, request: Asked, scope: str) -> AsyncGenerator[Sequence[Told], None]:
        """The answer piece by piece; those of one batch are sent together."""


@dataclass(frozen=True, slots=True)
class Calls:
    """Takes calls in.

    Attributes:
        admission: Whether any are taken.
        scopes: Whose each is.
        bodies: Reads them.
    """

    admission: Admission
    scopes: Scopes
    bodies: BodyReader

    async def answer(
        self,
        request: Request,
        kind: type[AnyCall],
        service: Generating[AnyCall, AnyEvent],
        streamed: Callable[[AsyncGenerator[Sequence[AnyEvent], None]], EventStream[AnyEvent]],
    ) -> Response:
        """What the service says to a call.

        Args:
            request: The HTTP request.
            kind: What its body is to be.
            service: Who answers.
            streamed: How batches become a stream of events, where the call asks for one.

        Raises:
            ApiError: The server is shutting down, the body is none of that kind, or the service refuses it.
        """
        self.admission.check()
        body = await self.bodies.read(request, kind)
        scope = self.scopes.name(request.headers)
        if body.stream:
            return name_ignored(streamed(service.stream(body, scope)), body.ignored_fields)
        answer = await until_disconnect(request.receive, service.complete(body, scope))
        return name_ignored(json_response(answer), body.ignored_fields)
