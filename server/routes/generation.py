"""The endpoints that generate text."""

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from server.disconnect import until_disconnect
from server.protocol.chat import ChatCompletion, ChatCompletionChunk, ChatCompletionRequest
from server.protocol.completion import Completion, CompletionRequest
from server.routes.bodies import (
    ERROR_RESPONSES,
    BodyReader,
    body_schema,
    event_schema,
    json_response,
    name_ignored,
)
from server.scopes import Scopes
from server.services.admission import Admission
from server.services.chat import ChatService
from server.services.completion import CompletionService
from server.sse import EventStream

COMPLETION_EXAMPLE: dict[str, object] = {"prompt": "The capital of France is", "max_tokens": 16}
CHAT_EXAMPLE: dict[str, object] = {
    "messages": [{"role": "user", "content": "Name three primes."}],
    "max_completion_tokens": 64,
    "stream": True,
}


def generation_router(
    completions: CompletionService,
    chat: ChatService,
    admission: Admission,
    scopes: Scopes,
    bodies: BodyReader,
) -> APIRouter:
    """POST /v1/completions and /v1/chat/completions."""
    router = APIRouter(tags=["generation"])

    @router.post(
        "/v1/completions",
        response_model=None,
        responses={200: _success(Completion, Completion.__name__), **ERROR_RESPONSES},
        openapi_extra=body_schema(CompletionRequest, COMPLETION_EXAMPLE),
    )
    async def create_completion(request: Request) -> Response:
        """Continue a text."""
        admission.check()
        body = await bodies.read(request, CompletionRequest)
        scope = scopes.name(request.headers)
        if body.stream:
            return name_ignored(EventStream(completions.stream(body, scope)), body.ignored_fields)
        answer = await until_disconnect(request.receive, completions.complete(body, scope))
        return name_ignored(json_response(answer), body.ignored_fields)

    @router.post(
        "/v1/chat/completions",
        response_model=None,
        responses={200: _success(ChatCompletion, ChatCompletionChunk.__name__), **ERROR_RESPONSES},
        openapi_extra=body_schema(ChatCompletionRequest, CHAT_EXAMPLE),
    )
    async def create_chat_completion(request: Request) -> Response:
        """Continue a conversation."""
        admission.check()
        body = await bodies.read(request, ChatCompletionRequest)
        scope = scopes.name(request.headers)
        if body.stream:
            return name_ignored(EventStream(chat.stream(body, scope)), body.ignored_fields)
        answer = await until_disconnect(request.receive, chat.complete(body, scope))
        return name_ignored(json_response(answer), body.ignored_fields)

    return router


def _success(answer: type[object], chunk: str) -> dict[str, object]:
    return {
        "model": answer,
        "description": "The answer; with stream, events of chunks and [DONE].",
        "content": {"text/event-stream": {"schema": event_schema(chunk)}},
    }
