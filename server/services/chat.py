"""Chat completions: a conversation in, the assistant's answers out."""

from collections.abc import AsyncGenerator
from contextlib import aclosing

from engine.client import EngineClient
from server.protocol.chat import (
    ChatChunkChoice,
    ChatCompletion,
    ChatCompletionChunk,
    ChatCompletionRequest,
)
from server.services.chat_choice import ChatChoiceWriter, fold
from server.services.chat_prompt import ChatPrompter
from server.services.ledger import Ledger
from server.services.models import AnswerHead, ModelService
from server.services.streaming import ChunkStream, write_all


class ChatService:
    """Serves POST /v1/chat/completions.

    Args:
        engine: Where tokens come from.
        models: Which model names exist.
        prompter: Makes prompts of conversations.
    """

    def __init__(self, engine: EngineClient, models: ModelService, prompter: ChatPrompter) -> None:
        self._engine = engine
        self._models = models
        self._prompter = prompter

    async def complete(self, request: ChatCompletionRequest, scope: str) -> ChatCompletion:
        """The whole answer, the fold of the chunks, to a request of a scope (see SamplingParams)."""
        head = self._models.head("chatcmpl-", request.model)
        writers = await self._writers(request, head.id, scope)
        ledger = Ledger([writer.choice for writer in writers])
        parts = await write_all(self._engine, writers, ledger)
        answer = ChatCompletion(
            id=head.id,
            object="chat.completion",
            created=head.created,
            model=head.model,
            system_fingerprint=head.system_fingerprint,
            choices=[fold(deltas) for deltas in parts],
            usage=ledger.usage,
            speculation=ledger.speculation,
        )
        if request.prompt_logprobs is not None:
            answer.prompt_logprobs = writers[0].prompt_logprobs
        if request.return_token_ids:
            answer.prompt_token_ids = list(writers[0].choice.prompt_token_ids)
        return answer

    async def stream(
        self, request: ChatCompletionRequest, scope: str
    ) -> AsyncGenerator[list[ChatCompletionChunk | bytes], None]:
        """The answer in chunks; an error before the first one can still be an HTTP status."""
        head = self._models.head("chatcmpl-", request.model)
        writers = await self._writers(request, head.id, scope)
        make_chunk = _ChunkMaker(head, writers[0], with_prompt=request.return_token_ids)
        chunks = ChunkStream(self._engine, writers, make_chunk, request.stream_options)
        async with aclosing(chunks.batches()) as batches:
            async for batch in batches:
                yield batch

    async def _writers(
        self, request: ChatCompletionRequest, call_id: str, scope: str
    ) -> list[ChatChoiceWriter]:
        return [
            ChatChoiceWriter(reader, with_token_ids=request.return_token_ids)
            for reader in await self._prompter.readers(request, call_id, scope)
        ]


class _ChunkMaker:
    """Makes chunks of deltas; those that come first have what is told of the prompt."""

    def __init__(self, head: AnswerHead, writer: ChatChoiceWriter, *, with_prompt: bool) -> None:
        self._head = head
        self._writer = writer
        self._prompt_is_due = with_prompt
        self._logprobs_are_due = True

    def __call__(self, choices: list[ChatChunkChoice]) -> ChatCompletionChunk:
        chunk = ChatCompletionChunk(
            id=self._head.id,
            object="chat.completion.chunk",
            created=self._head.created,
            model=self._head.model,
            system_fingerprint=self._head.system_fingerprint,
            choices=choices,
        )
        if self._prompt_is_due:
            chunk.prompt_token_ids = list(self._writer.choice.prompt_token_ids)
            self._prompt_is_due = False
        if self._logprobs_are_due and self._writer.prompt_logprobs is not None:
            chunk.prompt_logprobs = self._writer.prompt_logprobs
            self._logprobs_are_due = False
        return chunk
