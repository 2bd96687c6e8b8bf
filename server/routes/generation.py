"""The endpoints that generate text."""

from collections.abc import AsyncGenerator, Sequence
from typing import TypeVar

from fastapi import APIRouter
from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import Response

from server.protocol.chat import ChatCompletion, ChatCompletionChunk, ChatCompletionRequest
from server.protocol.completion import Completion, CompletionRequest
from server.routes.bodies import ERROR_RESPONSES, body_schema, event_schema
from server.routes.calls import Calls
from server.services.chat import ChatService
from server.services.completion import CompletionService
from server.sse import EventStream, data_frame

AnyChunk = TypeVar("AnyChunk", bound=BaseModel | bytes)

COMPLETION_EXAMPLE: dict[str, object] = {"prompt": "The capital of France is", "max_tokens": 16}
CHAT_EXAMPLE: dict[str, object] = {
    "messages": [{"role": "user", "content": "Name three primes."}],
    "max_completion_tokens": 64,
    "stream": True,
}


def generation_router(completions: CompletionService, chat: ChatService, calls: Calls) -> APIRouter:
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
        return await calls.answer(request, CompletionRequest, completions, _events)

    @router.post(
        "/v1/chat/completions",
        response_model=None,
        responses={200: _success(ChatCompletion, ChatCompletionChunk.__name__), **ERROR_RESPONSES},
        openapi_extra=body_schema(ChatCompletionRequest, CHAT_EXAMPLE),
    )
    async def create_chat_completion(request: Request) -> Response:
        """Continue a conversation."""
        return await calls.answer(request, ChatCompletionRequest, chat, _events)

    return router


def _events(batches: AsyncGenerator[Sequence[AnyChunk], None]) -> EventStream[AnyChunk]:
    """Events without names."""
    return EventStream(batches, data_frame)


def _success(answer: type[object], chunk: str) -> dict[str, object]:
    return {
        "model": answer,
        "description": "The answer; with stream, events of chunks and [DONE].",
        "content": {"text/event-stream": {"schema": event_schema(chunk)}},
    }
