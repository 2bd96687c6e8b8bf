"""Chat completions: a conversation in, the assistant's answers out."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import replace

from engine.chat_options import ChatOptions
from engine.client import EngineClient
from engine.errors import InvalidRequest
from server.protocol.chat import (
    ChatChunkChoice,
    ChatCompletion,
    ChatCompletionChunk,
    ChatCompletionRequest,
)
from server.services.bad_words import with_bad_words
from server.services.chat_choice import ChatChoiceWriter, fold, says_something
from server.services.generation import generate, make_choices
from server.services.ledger import Ledger
from server.services.limits import Limits
from server.services.models import AnswerHead, ModelService
from server.services.params import chat_params
from server.services.prediction import with_prediction
from server.services.reasoning import OPENING, ReasoningSplitter, has_thoughts
from server.services.streaming import as_chunks
from server.tools.plan import ToolPlanner


class ChatService:
    """Serves POST /v1/chat/completions.

    Args:
        engine: Where tokens come from.
        models: Which model names exist.
        limits: What one call may ask for.
        tools: What a request's tools mean.
    """

    def __init__(
        self, engine: EngineClient, models: ModelService, limits: Limits, tools: ToolPlanner
    ) -> None:
        self._engine = engine
        self._models = models
        self._limits = limits
        self._tools = tools

    async def complete(self, request: ChatCompletionRequest, scope: str) -> ChatCompletion:
        """The whole answer, the fold of the chunks, to a request of a scope (see SamplingParams)."""
        head = self._models.head("chatcmpl", request.model)
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
        head = self._models.head("chatcmpl", request.model)
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
        self._limits.check_choices(request.n, "n")
        plan = await self._tools.plan(request)
        messages, tools = await asyncio.to_thread(self._tools.conversation, request)
        options = ChatOptions(request.continue_final_message, request.chat_template_kwargs)
        token_ids = await self._engine.apply_chat_template(messages, tools, options)
        if not token_ids:
            raise InvalidRequest("messages make an empty prompt with this model's chat template", "messages")
        params = chat_params(request, len(token_ids), self._engine.model, self._limits.max_logprobs)
        self._limits.check_prompt_logprobs(params, len(token_ids))
        params = await with_bad_words(params, self._engine, request.bad_words)
        params = await with_prediction(params, self._engine, request.prediction, token_ids)
        params = replace(params, cache_scope=scope)
        if plan is not None:
            params = plan.applied(params)
        splits, is_open = await self._thoughts(request, token_ids)
        return [
            ChatChoiceWriter(
                choice,
                plan,
                ReasoningSplitter(is_open=is_open) if splits else None,
                with_token_ids=request.return_token_ids,
            )
            for choice in make_choices(call_id, 0, request.n, token_ids, params)
        ]

    async def _thoughts(
        self, request: ChatCompletionRequest, prompt_token_ids: Sequence[int]
    ) -> tuple[bool, bool]:
        """Whether thoughts are taken apart, and whether the prompt has begun them."""
        if not (request.separate_reasoning and has_thoughts(self._engine.model.chat_template)):
            return False, False
        # The tag and white space, in however many tokens.
        end = await self._engine.decode(prompt_token_ids[-len(OPENING) - 4 :])
        return True, end.rstrip().endswith(OPENING)

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
