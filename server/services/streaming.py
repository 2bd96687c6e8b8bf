"""From outputs to the chunks of a stream: what both endpoints have in common."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from typing import Generic, Protocol, TypeVar

from pydantic import BaseModel
from pydantic_core import to_json

from engine.client import EngineClient
from engine.outputs import RequestOutput
from server.protocol.base import StreamOptions
from server.protocol.usage import Answer
from server.services.generation import Choice, generate
from server.services.ledger import Ledger
from server.sse import as_json

AnyDelta = TypeVar("AnyDelta", bound=BaseModel)
AnyChunk = TypeVar("AnyChunk", bound=Answer)
Written = TypeVar("Written", bound=BaseModel, covariant=True)

_MARK = "\0"


class ChoiceWriter(Protocol[Written]):
    """Turns the outputs of one choice into deltas."""

    @property
    def choice(self) -> Choice:
        """Which choice."""

    def write(self, output: RequestOutput) -> Written:
        """What an output adds."""

    def write_or_text(self, output: RequestOutput) -> Written | str | None:
        """The same for a stream: the text alone if that is all there is, None if there is nothing."""

    def text_delta(self, text: str) -> Written:
        """A text as `write` would tell of it."""


def is_text_alone(output: RequestOutput) -> bool:
    """Whether an output, which is not a choice's first, has nothing to tell of but text."""
    return output.finish_reason is None and output.logprobs is None and output.prompt_logprobs is None


async def write_all(
    engine: EngineClient, writers: Sequence[ChoiceWriter[AnyDelta]], ledger: Ledger
) -> list[list[AnyDelta]]:
    """The deltas of whole answers, one list per writer."""
    parts: list[list[AnyDelta]] = [[] for _ in writers]
    async with aclosing(generate(engine, [writer.choice for writer in writers])) as batches:
        async for batch in batches:
            for item in batch:
                ledger.add(item)
                index = item.choice.index
                write = writers[index].write
                parts[index].append(
                    await asyncio.to_thread(write, item.output) if item.is_long else write(item.output)
                )
    return parts


class ChunkStream(Generic[AnyDelta, AnyChunk]):
    """The chunks of one stream.

    With usage, every chunk has the key, null but in the last one, which has no choices, unless the usage so
    far is wanted in each.

    Most chunks add text to a choice and nothing else. They differ in that text alone, so that the JSON around
    it is made once for each choice.

    Args:
        engine: Where outputs come from.
        writers: Those of all choices, each in its choice's place.
        make_chunk: A chunk of deltas.
        options: Whether usage is wanted.
    """

    def __init__(
        self,
        engine: EngineClient,
        writers: Sequence[ChoiceWriter[AnyDelta]],
        make_chunk: Callable[[list[AnyDelta]], AnyChunk],
        options: StreamOptions,
    ) -> None:
        self._engine = engine
        self._writers = writers
        self._make_chunk = make_chunk
        self._options = options
        self._ledger = Ledger([writer.choice for writer in writers])
        self._around_text: dict[int, tuple[bytes, bytes]] = {}

    async def batches(self) -> AsyncGenerator[list[AnyChunk | bytes], None]:
        """All of them, some as JSON; those of one list came together and are to be sent together."""
        choices = [writer.choice for writer in self._writers]
        async with aclosing(generate(self._engine, choices)) as batches:
            async for batch in batches:
                chunks: list[AnyChunk | bytes] = []
                for item in batch:
                    self._ledger.add(item)
                    write = self._writers[item.choice.index].write_or_text
                    delta = (
                        await asyncio.to_thread(write, item.output) if item.is_long else write(item.output)
                    )
                    if delta is not None:
                        chunks.append(self._chunk(item.choice.index, delta))
                yield chunks
        if self._options.include_usage:
            last = self._make_chunk([])
            last.usage = self._ledger.usage
            last.speculation = self._ledger.speculation
            yield [last]

    def _chunk(self, index: int, delta: AnyDelta | str) -> AnyChunk | bytes:
        if not isinstance(delta, str):
            return self._whole_chunk(delta)
        if self._options.continuous_usage_stats:
            return self._whole_chunk(self._writers[index].text_delta(delta))
        if index not in self._around_text:
            marked = as_json(self._whole_chunk(self._writers[index].text_delta(_MARK)))
            # What the request has a say in, such as the model's name, stands in front of the text.
            before, _, behind = marked.rpartition(to_json(_MARK))
            self._around_text[index] = before, behind
        before, behind = self._around_text[index]
        return before + to_json(delta) + behind

    def _whole_chunk(self, delta: AnyDelta) -> AnyChunk:
        chunk = self._make_chunk([delta])
        if self._options.include_usage:
            chunk.usage = self._ledger.usage if self._options.continuous_usage_stats else None
        elif self._ledger.complete:
            # The output that completes a call ends a choice, so the last chunk has a finish_reason.
            chunk.speculation = self._ledger.speculation
        return chunk
