"""Completions: prompts in, texts out."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from functools import partial

from engine.client import EngineClient
from engine.errors import InvalidRequest
from engine.outputs import RequestOutput
from server.protocol.completion import Completion, CompletionChoice, CompletionLogprobs, CompletionRequest
from server.protocol.fields import PromptInput
from server.services.bad_words import with_bad_words
from server.services.generation import Choice, make_choices
from server.services.ledger import Ledger
from server.services.limits import Limits
from server.services.logprobs import CompletionLogprobsBuilder, TextOffsets, join_logprobs, prompt_logprobs
from server.services.models import AnswerHead, ModelService
from server.services.params import check_token_ids, completion_params
from server.services.prediction import with_prediction
from server.services.streaming import ChunkStream, is_text_alone, write_all


@dataclass(frozen=True, slots=True)
class Echo:
    """A prompt as it is repeated in front of its answers.

    Attributes:
        text: Its text.
        hidden: Characters of its tokens' texts, a BOS for instance, that stand before `text` unseen.
        first_token: Bytes of its first token, which nothing predicted.
    """

    text: str
    hidden: int
    first_token: bytes


class CompletionService:
    """Serves POST /v1/completions.

    Args:
        engine: Where tokens come from.
        models: Which model names exist.
        limits: What one call may ask for.
    """

    def __init__(self, engine: EngineClient, models: ModelService, limits: Limits) -> None:
        self._engine = engine
        self._models = models
        self._limits = limits

    async def complete(self, request: CompletionRequest, scope: str) -> Completion:
        """The whole answer, the fold of the chunks, to a request of a scope (see SamplingParams)."""
        head = self._models.head("cmpl-", request.model)
        writers = await self._writers(request, head.id, scope)
        ledger = Ledger([writer.choice for writer in writers])
        parts = await write_all(self._engine, writers, ledger)
        answer = _chunk(head, [_fold(deltas) for deltas in parts])
        answer.usage = ledger.usage
        answer.speculation = ledger.speculation
        return answer

    async def stream(
        self, request: CompletionRequest, scope: str
    ) -> AsyncGenerator[list[Completion | bytes], None]:
        """The answer in chunks; an error before the first one can still be an HTTP status."""
        head = self._models.head("cmpl-", request.model)
        writers = await self._writers(request, head.id, scope)
        chunks = ChunkStream(self._engine, writers, partial(_chunk, head), request.stream_options)
        async with aclosing(chunks.batches()) as batches:
            async for batch in batches:
                yield batch

    async def _writers(self, request: CompletionRequest, call_id: str, scope: str) -> "list[_ChoiceWriter]":
        self._limits.check_choices(len(request.prompt) * request.n, "prompt")
        writers = []
        num_reported = 0
        for prompt_index, prompt in enumerate(request.prompt):
            token_ids, ends = await self._token_ids(prompt, request.suffix)
            params = completion_params(request, len(token_ids), self._engine.model, self._limits.max_logprobs)
            # Behind the check of its length, since a prompt that does not fit may have millions of them.
            check_token_ids(token_ids, self._engine.model, "prompt")
            await asyncio.sleep(0)  # There may be a thousand prompts, and others have their turn.
            params = await with_bad_words(params, self._engine, request.bad_words)
            params = await with_prediction(params, self._engine, request.prediction, token_ids)
            params = replace(params, cache_scope=scope, stop_token_ids=(*params.stop_token_ids, *ends))
            num_reported += len(token_ids) * (request.n if request.echo else 1)
            self._limits.check_prompt_logprobs(params, num_reported)
            echo = await self._echo(prompt, token_ids) if request.echo else None
            choices = make_choices(
                call_id, prompt_index, request.n, token_ids, params, repeats_prompt=request.echo
            )
            writers += [_ChoiceWriter(choice, echo, request) for choice in choices]
        return writers

    async def _token_ids(self, prompt: PromptInput, suffix: str) -> tuple[Sequence[int], Sequence[int]]:
        """A prompt's token ids, and ids that end its answer beside the model's own."""
        if not isinstance(prompt, str):
            return prompt, ()
        if suffix:
            infill = await self._engine.encode_infill(prompt, suffix)
            return infill.token_ids, infill.end_token_ids
        token_ids = await self._engine.encode(prompt)
        if not token_ids:
            raise InvalidRequest("prompt must not be empty: the model needs a token to start from", "prompt")
        return token_ids, ()

    async def _echo(self, prompt: PromptInput, token_ids: Sequence[int]) -> Echo:
        decoded = await self._engine.decode(token_ids)
        (first_token,) = await self._engine.token_bytes(token_ids[:1])
        if isinstance(prompt, str):
            hidden = len(decoded) - len(prompt) if decoded.endswith(prompt) else 0
            return Echo(prompt, hidden, first_token)
        return Echo(decoded, 0, first_token)


class _ChoiceWriter:
    """Turns the outputs of one choice into deltas."""

    def __init__(self, choice: Choice, echo: Echo | None, request: CompletionRequest) -> None:
        self.choice = choice
        self._with_token_ids = request.return_token_ids
        self._num_top_of_prompt = request.prompt_logprobs if choice.params.choice == 0 else None
        self._num_top_of_echo = request.logprobs
        self._has_begun = False
        self._echo = echo
        with_top = bool(choice.params.logprobs)
        start = len(echo.text) if echo else 0
        self._logprobs = CompletionLogprobsBuilder(TextOffsets(start), with_top=with_top)
        self._prompt_logprobs = CompletionLogprobsBuilder(
            TextOffsets(-echo.hidden if echo else 0), with_top=with_top
        )

    def write_or_text(self, output: RequestOutput) -> CompletionChoice | str | None:
        if self._has_begun and not self._with_token_ids and is_text_alone(output):
            return output.text or None
        delta = self.write(output)
        return delta if _says_something(delta) else None

    def text_delta(self, text: str) -> CompletionChoice:
        return CompletionChoice(
            index=self.choice.index, text=text, logprobs=None, finish_reason=None, stop_reason=None
        )

    def write(self, output: RequestOutput) -> CompletionChoice:
        echo, self._echo = self._echo, None
        delta = CompletionChoice(
            index=self.choice.index,
            text=(echo.text if echo else "") + output.text,
            logprobs=self._logprobs_of(output, echo),
            finish_reason=output.finish_reason and output.finish_reason.value,
            stop_reason=output.stop_reason,
        )
        if self._with_token_ids:
            delta.token_ids = list(output.token_ids)
            if not self._has_begun:
                delta.prompt_token_ids = list(self.choice.prompt_token_ids)
        if self._num_top_of_prompt is not None and output.prompt_logprobs is not None:
            delta.prompt_logprobs = prompt_logprobs(output.prompt_logprobs, self._num_top_of_prompt)
        self._has_begun = True
        return delta

    def _logprobs_of(self, output: RequestOutput, echo: Echo | None) -> CompletionLogprobs | None:
        if output.logprobs is None:
            return None
        answer = self._logprobs.build(output.logprobs)
        if echo is None or output.prompt_logprobs is None:
            return answer
        assert self._num_top_of_echo is not None, "a prompt is repeated with logprobs if the answer has some"
        entries = [
            entry and replace(entry, top=entry.top[: self._num_top_of_echo])
            for entry in output.prompt_logprobs
        ]
        prompt = self._prompt_logprobs.build(entries, [echo.first_token])
        return join_logprobs([prompt, answer])


def _says_something(delta: CompletionChoice) -> bool:
    return bool(
        delta.text or delta.logprobs or delta.prompt_logprobs or delta.token_ids or delta.finish_reason
    )


def _chunk(head: AnswerHead, choices: list[CompletionChoice]) -> Completion:
    return Completion(
        id=head.id,
        object="text_completion",
        created=head.created,
        model=head.model,
        system_fingerprint=head.system_fingerprint,
        choices=choices,
    )


def _fold(deltas: Sequence[CompletionChoice]) -> CompletionChoice:
    logprobs = [delta.logprobs for delta in deltas if delta.logprobs is not None]
    last = deltas[-1]
    whole = CompletionChoice(
        index=last.index,
        text="".join(delta.text for delta in deltas),
        logprobs=join_logprobs(logprobs) if logprobs else None,
        finish_reason=last.finish_reason,
        stop_reason=last.stop_reason,
    )
    if deltas[0].prompt_logprobs is not None:
        whole.prompt_logprobs = deltas[0].prompt_logprobs
    if last.token_ids is not None:
        whole.prompt_token_ids = deltas[0].prompt_token_ids
        whole.token_ids = [token_id for delta in deltas for token_id in delta.token_ids or ()]
    return whole
