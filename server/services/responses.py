"""Responses: a conversation in, the items of the answer out, kept for the next turn."""

from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from itertools import count
from typing import Literal

from engine.client import EngineClient
from engine.errors import InvalidRequest
from engine.outputs import FinishReason
from server.errors import ApiError, as_api_error
from server.protocol.chat import ChatCompletionRequest, ChatMessage
from server.protocol.response import ResponseRequest
from server.protocol.response_events import LifecycleEvent, LifecycleName
from server.protocol.response_object import DeletedResponse, ResponseError, ResponseObject
from server.services.answer_reader import AnswerReader
from server.services.chat_prompt import ChatPrompter
from server.services.generation import generate
from server.services.item_writers import Told
from server.services.ledger import Ledger
from server.services.logprobs import chat_logprobs
from server.services.models import ModelService
from server.services.reasoning import num_thought_tokens
from server.services.response_chat import MESSAGES, as_chat, items_said, messages_of
from server.services.response_frame import ResponseFrame, response_usage
from server.services.response_store import ResponseStore, StoredResponse
from server.services.response_writer import ResponseWriter
from server.services.truncation import shortened

Ending = Literal["completed", "incomplete"]

_LAST_EVENT: dict[Ending, LifecycleName] = {
    "completed": "response.completed",
    "incomplete": "response.incomplete",
}


@dataclass(frozen=True, slots=True)
class _Turn:
    """One call under way.

    Attributes:
        response_id: The response's id.
        scope: Whose it is.
        frame: The response around the answer.
        reader: Reads the engine's outputs.
        messages: The conversation to be stored, without the answer; None if it is not.
        numbers: The numbers of the stream's next events.
    """

    response_id: str
    scope: str
    frame: ResponseFrame
    reader: AnswerReader
    messages: list[ChatMessage] | None
    numbers: Iterator[int]


class ResponseService:
    """Serves /v1/responses.

    Args:
        engine: Where tokens come from.
        models: Which model names exist.
        prompter: Makes prompts of conversations.
        store: Keeps responses.
    """

    def __init__(
        self, engine: EngineClient, models: ModelService, prompter: ChatPrompter, store: ResponseStore
    ) -> None:
        self._engine = engine
        self._models = models
        self._prompter = prompter
        self._store = store

    async def complete(self, request: ResponseRequest, scope: str) -> ResponseObject:
        """The whole response, which the last event has, to a request of a scope (see SamplingParams)."""
        turn = await self._begin(request, scope)
        async with aclosing(self._events(turn)) as batches:
            async for batch in batches:
                last = batch[-1]
        assert isinstance(last, LifecycleEvent), "the last event has the response"
        return last.response

    async def stream(self, request: ResponseRequest, scope: str) -> AsyncGenerator[list[Told], None]:
        """The events; an error before the first one can still be an HTTP status, a later one is an event."""
        turn = await self._begin(request, scope)
        has_begun = False
        try:
            async with aclosing(self._events(turn)) as batches:
                async for batch in batches:
                    has_begun = True
                    yield batch
        except Exception as error:
            if not has_begun:
                raise
            failure = ResponseError(code="server_error", message=str(as_api_error(error)))
            yield [_event(turn, "response.failed", turn.frame.response("failed", error=failure))]

    def find(self, response_id: str, scope: str) -> bytes:
        """A stored response as it was answered, JSON.

        Raises:
            ApiError: 404; the scope has none of that id.
        """
        return self._stored(response_id, scope, "response_id", "response_not_found").body

    def delete(self, response_id: str, scope: str) -> DeletedResponse:
        """Forgets a stored response; those that continue it keep its conversation.

        Raises:
            ApiError: 404; the scope has none of that id.
        """
        self._stored(response_id, scope, "response_id", "response_not_found")
        self._store.remove(scope, response_id)
        return DeletedResponse(id=response_id, object="response", deleted=True)

    def _stored(self, response_id: str, scope: str, param: str, code: str) -> StoredResponse:
        found = self._store.get(scope, response_id)
        if found is None:
            raise ApiError(
                404,
                f"there is no response {response_id[:100]!r} here: it was not stored, was deleted, made room "
                "for newer ones, or belongs to other credentials; send the conversation as input",
                param=param,
                code=code,
            )
        return found

    async def _begin(self, request: ResponseRequest, scope: str) -> _Turn:
        is_stored = self._store.is_open if request.store is None else request.store
        if is_stored and not self._store.is_open:
            raise InvalidRequest("store is not supported: this server is set to store no responses", "store")
        head = self._models.head("resp_", request.model)
        messages = messages_of(request.input)
        if request.previous_response_id is not None:
            previous = self._stored(
                request.previous_response_id, scope, "previous_response_id", "previous_response_not_found"
            )
            messages = MESSAGES.validate_json(previous.conversation) + messages
        if not messages:
            raise InvalidRequest("input has nothing but thoughts; give it a message", "input")
        instructions = (
            [ChatMessage(role="system", content=request.instructions)] if request.instructions else []
        )
        chat = as_chat(request, [*instructions, *messages], self._engine.model.chat_template)
        if request.truncation == "auto":
            chat = await self._shortened(chat)
        [reader] = await self._prompter.readers(chat, head.id, scope)
        frame = ResponseFrame(request, head, is_stored=is_stored)
        # What was left out would not fit into the next turn either.
        kept = chat.messages[len(instructions) :] if is_stored else None
        return _Turn(head.id, scope, frame, reader, kept, count())

    async def _shortened(self, chat: ChatCompletionRequest) -> ChatCompletionRequest:
        room = self._engine.model.max_model_len - (chat.max_completion_tokens or 1)

        async def fits(messages: Sequence[ChatMessage]) -> bool:
            shorter = chat.model_copy(update={"messages": messages})
            return len(await self._prompter.render(shorter)) <= room

        return chat.model_copy(update={"messages": await shortened(chat.messages, fits)})

    async def _events(self, turn: _Turn) -> AsyncGenerator[list[Told], None]:
        """The events of one answer; those of one list came together and are to be sent together."""
        writer = ResponseWriter(turn.reader, turn.response_id.removeprefix("resp_"), turn.numbers)
        ledger = Ledger([turn.reader.choice])
        token_ids: list[int] = []
        begun = turn.frame.response("in_progress")
        events: list[Told] = [
            _event(turn, "response.created", begun),
            _event(turn, "response.in_progress", begun),
        ]
        async with aclosing(generate(self._engine, [turn.reader.choice])) as batches:
            async for batch in batches:
                for item in batch:
                    ledger.add(item)
                    token_ids += item.output.token_ids
                    logprobs = chat_logprobs(item.output.logprobs or ()).content
                    events += writer.write(turn.reader.read(item.output), logprobs)
                    reason = item.output.finish_reason
                if reason is None and events:
                    yield events
                    events = []
        status: Ending = "incomplete" if reason is FinishReason.LENGTH else "completed"
        events += writer.end(status)
        spelling = await self._engine.token_bytes(token_ids) if writer.has_thoughts else []
        usage = response_usage(ledger.usage, num_thought_tokens(spelling))
        response = turn.frame.response(status, writer.output, usage)
        response.speculation = ledger.speculation
        self._keep(turn, response)
        yield [*events, _event(turn, _LAST_EVENT[status], response)]

    def _keep(self, turn: _Turn, response: ResponseObject) -> None:
        """Before the client hears of its end, for it may go on at once."""
        if turn.messages is None:
            return
        conversation = [*turn.messages, *messages_of(items_said(response.output))]
        stored = StoredResponse(
            response.model_dump_json(exclude_unset=True).encode(),
            MESSAGES.dump_json(conversation, exclude_unset=True),
        )
        self._store.put(turn.scope, turn.response_id, stored)


def _event(turn: _Turn, kind: LifecycleName, response: ResponseObject) -> LifecycleEvent:
    return LifecycleEvent(type=kind, sequence_number=next(turn.numbers), response=response)
