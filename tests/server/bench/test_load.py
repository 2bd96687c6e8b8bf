"""Closed and open loops, and the figures of a run."""

import asyncio
from collections.abc import Callable
from io import StringIO
from typing import Any

import pytest

from server.bench.asking import Question
from server.bench.client import BenchClient
from server.bench.load import Run, Timer, run_closed, run_open
from server.bench.progress import Progress
from server.bench.records import Acceptance, DraftCounts, Record
from server.bench.summary import KindFigures, summarize
from tests.server.bench.scripted import Answer, ScriptedClock, ScriptedServer, question, record, steady, usage

NO_ONE: Callable[[Record], None] = lambda _: None  # noqa: E731
QUESTIONS = [question(f"p{number}", number=number) for number in range(6)]


class Gate(BenchClient):
    """A client whose answers come when the test says so; counts how many it waits for."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.running = self.most = 0

    async def ask(self, question: Question, began: float = 0.0, due: float | None = None) -> Record:
        self.asked.append(question.prompt.name)
        self.running += 1
        self.most = max(self.most, self.running)
        for _ in range(3):
            await asyncio.sleep(0)
        self.running -= 1
        return record(question.prompt.name, sent=float(len(self.asked)))


@pytest.mark.parametrize(("concurrency", "most"), [(1, 1), (3, 3), (50, 6)])
def test_a_closed_loop_keeps_that_many_running(concurrency: int, most: int) -> None:
    gate, done = Gate(), list[Record]()
    run = asyncio.run(run_closed(gate, QUESTIONS, concurrency, done.append, Timer()))
    assert gate.most == most
    assert gate.asked == [f"p{number}" for number in range(6)]
    assert len(run.records) == len(done) == 6


class Alarms:
    """A clock at which sleepers wake one after another, in the order of their times."""

    def __init__(self) -> None:
        self.now = 50.0
        self._sleeping: list[tuple[float, asyncio.Future[None]]] = []

    async def sleep(self, seconds: float) -> None:
        alarm = asyncio.get_running_loop().create_future()
        self._sleeping.append((self.now + seconds, alarm))
        await alarm

    async def ring(self) -> None:
        while True:
            await asyncio.sleep(0)
            if self._sleeping:
                first = min(self._sleeping, key=lambda sleeper: sleeper[0])
                self._sleeping.remove(first)
                self.now = first[0]
                first[1].set_result(None)
                await asyncio.sleep(0)


def test_an_open_loop_sends_at_its_times_whatever_still_runs() -> None:
    """No answer comes before the last request has been sent."""
    alarms, sent = Alarms(), list[tuple[str, float]]()

    class Held(BenchClient):
        def __init__(self) -> None:
            self.all_sent = asyncio.Event()

        async def ask(self, question: Question, began: float = 0.0, due: float | None = None) -> Record:
            assert due == alarms.now
            sent.append((question.prompt.name, alarms.now - began))
            if len(sent) == len(QUESTIONS):
                self.all_sent.set()
            await self.all_sent.wait()
            return record(question.prompt.name)

    async def main() -> Run:
        ringing = asyncio.create_task(alarms.ring())
        timer = Timer(lambda: alarms.now, alarms.sleep)
        run = await run_open(Held(), QUESTIONS, arrivals, NO_ONE, timer)
        ringing.cancel()
        return run

    arrivals = [0.5, 1.0, 1.25, 4.0, 4.5, 9.0]
    run = asyncio.run(main())
    assert sent == [(f"p{number}", time) for number, time in enumerate(arrivals)]
    assert len(run.records) == 6
    assert run.seconds == 9.0


def run_scripted(script: Callable[[dict[str, Any]], Answer], count: int) -> Run:
    server = ScriptedServer(script)
    return asyncio.run(run_closed(server.client(), QUESTIONS[:count], 1, NO_ONE, server.clock.timer))


def test_the_figures_of_a_run() -> None:
    """Two answers of 0.5 + 3 * 0.1 s, of 4 chunks of 2 tokens each; one failure in between, of 0.2 s."""

    def script(body: dict[str, Any]) -> Answer:
        if body["seed"] == 1:
            return Answer([(0.2, b'{"error": {"message": "no"}}')], 500)
        told = {"drafted_tokens": 5, "accepted_tokens": 4, "steps": 4}
        return steady(["ab", "cd", "ef", "gh"], 0.5, 0.1, usage(8, speculation=told))

    summary = summarize("1 at once", 1, run_scripted(script, 3))
    assert (summary.requests, summary.num_failed, summary.errors) == (3, 1, {"HTTP 500: no": 1})
    assert summary.seconds == pytest.approx(1.8)
    assert (summary.num_prompt_tokens, summary.num_output_tokens, summary.counted_by) == (10, 16, "usage")
    assert summary.output_tokens_per_second == pytest.approx(16 / 1.8)
    assert summary.requests_per_second == pytest.approx(2 / 1.8)
    assert summary.finish_reasons == {"length": 2}
    assert summary.tokens_per_chunk == 2.0
    assert summary.acceptance == Acceptance(10, 8, 8, 16)
    assert summary.ttft is not None
    assert summary.tpot is not None
    assert summary.itl is not None
    assert summary.e2e is not None
    assert [summary.ttft.count, summary.ttft.p50] == pytest.approx([2, 0.5])
    assert [summary.tpot.count, summary.tpot.p50] == pytest.approx([2, 0.05])
    assert [summary.itl.count, summary.itl.p99] == pytest.approx([12, 0.05])
    assert [summary.e2e.count, summary.e2e.largest] == pytest.approx([2, 0.8])
    [kind] = summary.kinds
    assert kind == KindFigures("chat", 2, kind.decode_tokens_per_second, Acceptance(10, 8, 8, 16))
    assert kind.decode_tokens_per_second == pytest.approx(20.0)


def test_a_run_of_failures_has_figures_too() -> None:
    summary = summarize("1 at once", 1, run_scripted(lambda _: Answer([(0.1, b"no")], 503), 2))
    assert summary.errors == {"HTTP 503: b'no'": 2}
    assert (summary.num_output_tokens, summary.output_tokens_per_second, summary.kinds) == (0, 0.0, ())
    assert (summary.ttft, summary.tpot, summary.itl, summary.acceptance) == (None, None, None, None)


def test_mixed_counting_is_said() -> None:
    records = (record(num_output_tokens=3), record(arrivals=(0.1,), lengths=(1,)))
    assert summarize("", 1, Run(records, 1.0)).counted_by == "chunks and usage"
    assert summarize("", 1, Run((), 0.0)).counted_by == "nothing"


class Terminal(StringIO):
    def isatty(self) -> bool:
        return True


def test_progress_on_a_terminal_redraws_its_line() -> None:
    clock, terminal = ScriptedClock(), Terminal()
    progress = Progress("1 at once", 4, terminal, clock)
    clock.now += 2
    progress.add(record(num_output_tokens=10))
    assert terminal.getvalue() == ("\r1 at once [======                  ] 1/4  5.0 tokens/s  6 s left\x1b[K")
    progress.add(record(error="no"))
    assert terminal.getvalue().count("\r") == 1, "drawn twice within a tenth of a second"
    progress.close()
    assert terminal.getvalue().endswith("2/4  5.0 tokens/s  2 s left  1 failed\x1b[K\n")


def test_progress_elsewhere_is_one_line() -> None:
    clock, file = ScriptedClock(), StringIO()
    progress = Progress("1 at once", 1, file, clock)
    clock.now += 2
    progress.add(record(drafts=DraftCounts(1, 1, 1), num_output_tokens=10))
    assert file.getvalue() == ""
    progress.close()
    assert file.getvalue() == f"1 at once [{'=' * 24}] 1/1  5.0 tokens/s\n"
