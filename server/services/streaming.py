"""From deltas to chunks: what both endpoints' streams have in common."""

from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from typing import TypeVar

from server.protocol.base import StreamOptions
from server.protocol.usage import Answer
from server.services.ledger import Ledger

AnyDelta = TypeVar("AnyDelta")
AnyChunk = TypeVar("AnyChunk", bound=Answer)


async def as_chunks(
    deltas: AsyncGenerator[Sequence[AnyDelta], None],
    make_chunk: Callable[[list[AnyDelta]], AnyChunk],
    ledger: Ledger,
    options: StreamOptions,
) -> AsyncGenerator[list[AnyChunk], None]:
    """Yields the chunks of a stream; those of one list came together and are to be sent together.

    With usage, every chunk has the key, null but in the last one, which has no choices, unless the usage so
    far is wanted in each.
    """
    async with aclosing(deltas) as batches:
        async for batch in batches:
            chunks = [make_chunk([delta]) for delta in batch]
            if options.include_usage:
                for chunk in chunks:
                    chunk.usage = ledger.usage if options.continuous_usage_stats else None
            elif ledger.complete:
                # The output that completes a call ends a choice, so the last chunk has a finish_reason.
                chunks[-1].speculation = ledger.speculation
            yield chunks
    if options.include_usage:
        last = make_chunk([])
        last.usage = ledger.usage
        last.speculation = ledger.speculation
        yield [last]
