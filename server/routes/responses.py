"""The endpoints of responses: conversations whose turns the server can keep."""

from collections.abc import AsyncGenerator, Sequence
from typing import Annotated

from fastapi import APIRouter, Path
from starlette.requests import Request
from starlette.responses import Response

from server.errors import ApiError
from server.protocol.error import ErrorResponse
from server.protocol.response import LOGPROBS, ResponseRequest
from server.protocol.response_events import RESPONSE_EVENTS
from server.protocol.response_object import DeletedResponse, ResponseObject
from server.routes.bodies import ERROR_RESPONSES, JSON_TYPE, body_schema, event_schema
from server.routes.calls import Calls
from server.services.item_writers import Told
from server.services.responses import ResponseService
from server.sse import EventStream, named_frame

EXAMPLE: dict[str, object] = {
    "instructions": "Answer in one line.",
    "input": "Name three primes.",
    "max_output_tokens": 64,
}
_NOT_FOUND: dict[int | str, dict[str, object]] = {
    404: {"model": ErrorResponse, "description": "These credentials have no such response."}
}
_EVENT_SCHEMA = event_schema(*(event.__name__ for event in RESPONSE_EVENTS), end=None)
_ID = Path(description="The id of a stored response.", examples=["resp_1"])


def responses_router(responses: ResponseService, calls: Calls) -> APIRouter:
    """POST /v1/responses, GET and DELETE /v1/responses/{response_id}."""
    router = APIRouter(tags=["responses"])

    @router.post(
        "/v1/responses",
        response_model=None,
        responses={
            200: {
                "model": ResponseObject,
                "description": "The response; with stream, events.",
                "content": {"text/event-stream": {"schema": _EVENT_SCHEMA}},
            },
            **ERROR_RESPONSES,
        },
        openapi_extra=body_schema(ResponseRequest, EXAMPLE),
    )
    async def create_response(request: Request) -> Response:
        """Answer a text or a conversation, or go on with an earlier response."""
        return await calls.answer(request, ResponseRequest, responses, _named_events)

    @router.get(
        "/v1/responses/{response_id}",
        response_model=ResponseObject,
        response_description="The response.",
        responses={400: ERROR_RESPONSES[400], **_NOT_FOUND},
    )
    async def get_response(request: Request, response_id: Annotated[str, _ID]) -> Response:
        """A stored response, as it was answered."""
        _check_query(request)
        return Response(responses.find(response_id, calls.scopes.name(request.headers)), media_type=JSON_TYPE)

    @router.delete("/v1/responses/{response_id}", response_description="It is gone.", responses=_NOT_FOUND)
    async def delete_response(request: Request, response_id: Annotated[str, _ID]) -> DeletedResponse:
        """Forget a stored response; those that go on from it keep what it said."""
        return responses.delete(response_id, calls.scopes.name(request.headers))

    return router


def _named_events(batches: AsyncGenerator[Sequence[Told], None]) -> EventStream[Told]:
    """Events with names, the last of which says that it is the last."""
    return EventStream(batches, named_frame, end=b"")


def _check_query(request: Request) -> None:
    """Refuses what a stored response cannot do; what it includes was decided when it was made."""
    for name, value in request.query_params.multi_items():
        harmless = {"stream": ("false",), "include": (LOGPROBS,), "include[]": (LOGPROBS,)}
        if name in ("stream", "starting_after", "include", "include[]") and value not in harmless.get(
            name, ()
        ):
            raise ApiError(
                400,
                f"{name} is not supported here: a stored response comes as it was answered; leave it out",
                param=name.removesuffix("[]"),
                code="invalid_value",
            )
