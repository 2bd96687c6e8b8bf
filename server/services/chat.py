"""Chat completions: a conversation in, the assistant's answers out."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

from engine.client import EngineClient
from server.protocol.chat import (
    ChatChunkChoice,
    ChatCompletion,
    ChatCompletionChunk,
    ChatCompletionRequest,
)
from server.services.chat_choice import ChatChoiceWriter, fold, says_something
from server.services.chat_prompt import ChatPrompter
from server.services.generation import generate
from server.services.ledger import Ledger
from server.services.models import AnswerHead, ModelService
from server.services.streaming import as_chunks


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
        parts: dict[int, list[ChatChunkChoice]] = {writer.choice.index: [] for writer in writers}
        async with aclosing(self._deltas(writers, ledger)) as batches:
            async for batch in batches:
                for delta in batch:
                    parts[delta.index].append(delta)
        answer = ChatCompletion(
            id=head.id,
            object="chat.completion",
            created=head.created,
            model=head.model,
            system_fingerprint=head.system_fingerprint,
            choices=[fold(deltas) for deltas in parts.values()],
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
    ) -> AsyncGenerator[list[ChatCompletionChunk], None]:
        """The answer in chunks; an error before the first one can still be an HTTP status."""
        head = self._models.head("chatcmpl-", request.model)
        writers = await self._writers(request, head.id, scope)
        ledger = Ledger([writer.choice for writer in writers])
        chunks = as_chunks(
            self._deltas(writers, ledger),
            lambda deltas: _chunk(head, deltas),
            ledger,
            request.stream_options,
        )
        prompt_is_due = request.return_token_ids
        logprobs_are_due = request.prompt_logprobs is not None
        async with aclosing(chunks) as batches:
            async for batch in batches:
                if prompt_is_due and batch:
                    batch[0].prompt_token_ids = list(writers[0].choice.prompt_token_ids)
                    prompt_is_due = False
                if logprobs_are_due and writers[0].prompt_logprobs is not None:
                    first = next(chunk for chunk in batch if chunk.choices[0].index == 0)
                    first.prompt_logprobs = writers[0].prompt_logprobs
                    logprobs_are_due = False
                yield batch

    async def _writers(
        self, request: ChatCompletionRequest, call_id: str, scope: str
    ) -> list[ChatChoiceWriter]:
        return [
            ChatChoiceWriter(reader, with_token_ids=request.return_token_ids)
            for reader in await self._prompter.readers(request, call_id, scope)
        ]

    async def _deltas(
        self, writers: Sequence[ChatChoiceWriter], ledger: Ledger
    ) -> AsyncGenerator[list[ChatChunkChoice], None]:
        by_index = {writer.choice.index: writer for writer in writers}
        outputs = generate(self._engine, [writer.choice for writer in writers])
        async with aclosing(outputs) as batches:
            async for batch in batches:
                deltas = []
                for item in batch:
                    ledger.add(item)
                    write = by_index[item.choice.index].write
                    is_long = item.output.prompt_logprobs is not None
                    deltas.append(
                        await asyncio.to_thread(write, item.output) if is_long else write(item.output)
                    )
                yield [delta for delta in deltas if says_something(delta)]


def _chunk(head: AnswerHead, choices: list[ChatChunkChoice]) -> ChatCompletionChunk:
    return ChatCompletionChunk(
        id=head.id,
        object="chat.completion.chunk",
        created=head.created,
        model=head.model,
        system_fingerprint=head.system_fingerprint,
        choices=choices,
    )
