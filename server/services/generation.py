"""The engine requests of one API call, run together."""

import asyncio
import secrets
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace

from engine.client import MAX_BATCH, EngineClient
from engine.errors import RequestFailed
from engine.outputs import FinishReason, RequestOutput
from engine.sampling_params import SEED_MAX, SamplingParams
from server.errors import ApiError, unavailable


@dataclass(frozen=True, slots=True)
class Choice:
    """One answer to be generated: one engine request.

    Attributes:
        index: Its index in the API's answer: prompt_index * n + its number among the n.
        prompt_index: Which of the call's prompts it answers.
        request_id: The engine's name for it.
        prompt_token_ids: The prompt.
        params: How to choose its tokens.
    """

    index: int
    prompt_index: int
    request_id: str
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams


@dataclass(frozen=True, slots=True)
class ChoiceOutput:
    """What one step brought for one choice."""

    choice: Choice
    output: RequestOutput

    @property
    def is_long(self) -> bool:
        """Whether telling of it takes long, as the log probabilities of a whole prompt do."""
        return self.output.prompt_logprobs is not None


def make_choices(
    call_id: str,
    prompt_index: int,
    n: int,
    prompt_token_ids: Sequence[int],
    params: SamplingParams,
    *,
    repeats_prompt: bool = False,
) -> list[Choice]:
    """The n choices of one prompt.

    They differ by `params.choice` and share the seed. Without one it is drawn here, once per prompt, so
    that equal prompts of a call differ while the choices of one prompt stay streams of one seed. The
    prompt's own log probabilities come with the first choice, unless each of them repeats the prompt.
    """
    seed = secrets.randbelow(SEED_MAX + 1) if params.seed is None else params.seed
    prompt = tuple(prompt_token_ids)
    return [
        Choice(
            index=prompt_index * n + number,
            prompt_index=prompt_index,
            request_id=f"{call_id}-{prompt_index * n + number}",
            prompt_token_ids=prompt,
            params=replace(
                params,
                seed=seed,
                choice=number,
                prompt_logprobs=params.prompt_logprobs if number == 0 or repeats_prompt else None,
            ),
        )
        for number in range(n)
    ]


def generate(engine: EngineClient, choices: Sequence[Choice]) -> AsyncGenerator[list[ChoiceOutput], None]:
    """Runs all choices at once and yields what they bring; what arrives together comes together.

    But no more than MAX_BATCH at a time, and the event loop gets a turn in between.

    The first choice that fails ends the call. Leaving early, for whatever reason, aborts the rest.
    """
    # Most calls have one choice, which needs no task beside the call's own: a switch per token less.
    return _follow(engine, choices[0]) if len(choices) == 1 else _follow_all(engine, choices)


async def _follow_all(
    engine: EngineClient, choices: Sequence[Choice]
) -> AsyncGenerator[list[ChoiceOutput], None]:
    arrived: asyncio.Queue[ChoiceOutput | Exception] = asyncio.Queue()
    tasks = [asyncio.create_task(_pass_on(engine, choice, arrived)) for choice in choices]
    unfinished = len(tasks)
    try:
        while unfinished:
            batch: list[ChoiceOutput] = []
            for item in await _drain(arrived):
                if isinstance(item, Exception):
                    if batch:
                        yield batch
                    raise item
                batch.append(item)
                unfinished -= item.output.finish_reason is not None
            yield batch
            if not arrived.empty():
                await asyncio.sleep(0)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _drain(queue: "asyncio.Queue[ChoiceOutput | Exception]") -> list[ChoiceOutput | Exception]:
    items = [await queue.get()]
    while len(items) < MAX_BATCH and not queue.empty():
        items.append(queue.get_nowait())
    return items


async def _pass_on(
    engine: EngineClient, choice: Choice, arrived: "asyncio.Queue[ChoiceOutput | Exception]"
) -> None:
    try:
        async with aclosing(_follow(engine, choice)) as batches:
            async for batch in batches:
                for item in batch:
                    arrived.put_nowait(item)
    except Exception as error:
        arrived.put_nowait(error)


async def _follow(engine: EngineClient, choice: Choice) -> AsyncGenerator[list[ChoiceOutput], None]:
    """What one choice brings."""
    outputs = engine.generate(choice.request_id, choice.prompt_token_ids, choice.params)
    finished = False
    async with aclosing(outputs) as batches:
        async for batch in batches:
            error = _bad_ending(batch[-1])
            good = batch if error is None else batch[:-1]
            if good:
                yield [ChoiceOutput(choice, output) for output in good]
            if error is not None:
                raise error
            finished = batch[-1].finish_reason is not None
            if len(batch) == MAX_BATCH:
                await asyncio.sleep(0)
    if not finished:
        raise RequestFailed("the engine ended the request without a reason")


def _bad_ending(output: RequestOutput) -> ApiError | None:
    """An answer that was cut off by us must not look like a finished one; OpenAI has no name for it."""
    if output.finish_reason is FinishReason.ABORT:
        return unavailable("the server ended the request before its answer was complete", "aborted")
    if output.finish_reason is FinishReason.ERROR:
        return ApiError(500, "the request failed in the engine", code="internal_error")
    return None
