"""How requests are spread over time."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from time import perf_counter

from server.bench.asking import Question
from server.bench.client import BenchClient
from server.bench.records import Record

Sleep = Callable[[float], Awaitable[object]]
OnDone = Callable[[Record], None]


@dataclass(frozen=True, slots=True)
class Timer:
    """A clock and a way to wait by it; tests bring their own.

    Attributes:
        clock: Monotonic, in seconds.
        sleep: Waits so many seconds.
    """

    clock: Callable[[], float] = perf_counter
    sleep: Sleep = asyncio.sleep


@dataclass(frozen=True, slots=True)
class Run:
    """What a load brought.

    Attributes:
        records: A record per request, in the order they were sent.
        seconds: From the first sending to the last end.
    """

    records: tuple[Record, ...]
    seconds: float


async def run_closed(
    client: BenchClient, questions: Sequence[Question], concurrency: int, on_done: OnDone, timer: Timer
) -> Run:
    """Keeps `concurrency` requests running: as one ends, the next is sent."""
    waiting = iter(questions)
    began = timer.clock()
    records: list[Record] = []

    async def work() -> None:
        for question in waiting:
            record = await client.ask(question, began)
            records.append(record)
            on_done(record)

    await asyncio.gather(*(work() for _ in range(concurrency)))
    return Run(tuple(sorted(records, key=lambda record: record.sent)), timer.clock() - began)


async def run_open(
    client: BenchClient,
    questions: Sequence[Question],
    arrivals: Sequence[float],
    on_done: OnDone,
    timer: Timer,
) -> Run:
    """Sends each request at its time, however many are still running.

    A server that falls behind gets no mercy, which is what a closed loop would give it.
    """
    began = timer.clock()
    records: list[Record] = []

    async def send(question: Question, due: float) -> None:
        await timer.sleep(max(0.0, due - timer.clock()))
        record = await client.ask(question, began, due)
        records.append(record)
        on_done(record)

    pairs = zip(questions, arrivals, strict=True)
    await asyncio.gather(*(send(question, began + arrival) for question, arrival in pairs))
    return Run(tuple(sorted(records, key=lambda record: record.sent)), timer.clock() - began)
