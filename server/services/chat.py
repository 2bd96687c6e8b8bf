"""Chat completions: a conversation in, the assistant's answers out."""

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import replace

from engine.client import EngineClient
from engine.errors import InvalidRequest
from server.protocol.chat import (
    AssistantMessage,
    ChatChoice,
    ChatChunkChoice,
    ChatCompletion,
    ChatCompletionChunk,
    ChatCompletionRequest,
    ChatLogprobs,
    MessageDelta,
)
from server.services.generation import Choice, ChoiceOutput, generate, make_choices
from server.services.ledger import Ledger
from server.services.limits import Limits
from server.services.logprobs import chat_logprobs
from server.services.models import AnswerHead, ModelService
from server.services.params import chat_params
from server.services.prediction import with_prediction
from server.services.streaming import as_chunks


class ChatService:
    """Serves POST /v1/chat/completions.

    Args:
        engine: Where tokens come from.
        models: Which model names exist.
        limits: What one call may ask for.
    """

    def __init__(self, engine: EngineClient, models: ModelService, limits: Limits) -> None:
        self._engine = engine
        self._models = models
        self._limits = limits

    async def complete(self, request: ChatCompletionRequest, scope: str) -> ChatCompletion:
        """The whole answer, the fold of the chunks, to a request of a scope (see SamplingParams)."""
        head = self._models.head("chatcmpl", request.model)
        choices = await self._choices(request, head.id, scope)
        ledger = Ledger(choices)
        parts: dict[int, list[ChatChunkChoice]] = {choice.index: [] for choice in choices}
        async with aclosing(self._deltas(choices, ledger)) as batches:
            async for batch in batches:
                for delta in batch:
                    parts[delta.index].append(delta)
        return ChatCompletion(
            id=head.id,
            object="chat.completion",
            created=head.created,
            model=head.model,
            system_fingerprint=head.system_fingerprint,
            choices=[_fold(deltas) for deltas in parts.values()],
            usage=ledger.usage,
            speculation=ledger.speculation,
        )

    async def stream(
        self, request: ChatCompletionRequest, scope: str
    ) -> AsyncGenerator[list[ChatCompletionChunk], None]:
        """The answer in chunks; an error before the first one can still be an HTTP status."""
        head = self._models.head("chatcmpl", request.model)
        choices = await self._choices(request, head.id, scope)
        ledger = Ledger(choices)
        chunks = as_chunks(
            self._deltas(choices, ledger),
            lambda deltas: _chunk(head, deltas),
            ledger,
            request.stream_options.include_usage,
        )
        async with aclosing(chunks) as batches:
            async for batch in batches:
                yield batch

    async def _choices(self, request: ChatCompletionRequest, call_id: str, scope: str) -> list[Choice]:
        self._limits.check_choices(request.n, "n")
        messages = [message.model_dump() for message in request.messages]
        token_ids = await self._engine.apply_chat_template(messages)
        if not token_ids:
            raise InvalidRequest("messages make an empty prompt with this model's chat template", "messages")
        params = chat_params(request, len(token_ids), self._engine.model, self._limits.max_logprobs)
        params = await with_prediction(params, self._engine, request.prediction, token_ids)
        return make_choices(call_id, 0, request.n, token_ids, replace(params, cache_scope=scope))

    async def _deltas(
        self, choices: Sequence[Choice], ledger: Ledger
    ) -> AsyncGenerator[list[ChatChunkChoice], None]:
        begun: set[int] = set()
        async with aclosing(generate(self._engine, choices)) as batches:
            async for batch in batches:
                deltas = []
                for item in batch:
                    ledger.add(item)
                    deltas.append(_delta(item, first=item.choice.index not in begun))
                    begun.add(item.choice.index)
                yield [delta for delta in deltas if _says_something(delta)]


def _delta(item: ChoiceOutput, *, first: bool) -> ChatChunkChoice:
    output = item.output
    message = MessageDelta(content=output.text)
    if first:
        message.role = "assistant"
    return ChatChunkChoice(
        index=item.choice.index,
        delta=message,
        logprobs=None if output.logprobs is None else chat_logprobs(output.logprobs),
        finish_reason=output.finish_reason and output.finish_reason.value,
        stop_reason=output.stop_reason,
    )


def _says_something(choice: ChatChunkChoice) -> bool:
    return bool(choice.delta.role or choice.delta.content or choice.logprobs or choice.finish_reason)


def _chunk(head: AnswerHead, choices: list[ChatChunkChoice]) -> ChatCompletionChunk:
    return ChatCompletionChunk(
        id=head.id,
        object="chat.completion.chunk",
        created=head.created,
        model=head.model,
        system_fingerprint=head.system_fingerprint,
        choices=choices,
    )


def _fold(deltas: Sequence[ChatChunkChoice]) -> ChatChoice:
    logprobs = [delta.logprobs for delta in deltas if delta.logprobs is not None]
    last = deltas[-1]
    return ChatChoice(
        index=last.index,
        message=AssistantMessage(
            role="assistant",
            content="".join(delta.delta.content or "" for delta in deltas),
            refusal=None,
        ),
        logprobs=ChatLogprobs(content=[entry for part in logprobs for entry in part.content])
        if logprobs
        else None,
        finish_reason=last.finish_reason,
        stop_reason=last.stop_reason,
    )
