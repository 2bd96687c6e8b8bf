"""Runs a plan: warm-up, then every load in turn."""

import asyncio
import os
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import httpx

from engine.errors import StartupError
from server.bench.asking import Question, make_question
from server.bench.client import BenchClient, api_root, model_name
from server.bench.divergence import Divergence, explain
from server.bench.load import OnDone, Run, Timer, run_closed, run_open
from server.bench.paired import PairedRun, PairedSummary, run_paired, summarize_pairs
from server.bench.parts import StepTime
from server.bench.plan import Plan
from server.bench.progress import Progress
from server.bench.statistics import poisson_arrivals
from server.bench.summary import Summary, summarize

PLAIN = {"speculation": {"enabled": False}}


@dataclass(frozen=True, slots=True)
class Measured:
    """A load and what it brought; `steps` is where the server's time went, if it says."""

    run: Run
    summary: Summary
    steps: StepTime | None = None


@dataclass(frozen=True, slots=True)
class Compared:
    """A load in two ways and what it brought; `steps` is where the time went, candidate first."""

    run: PairedRun
    summary: PairedSummary
    divergences: tuple[Divergence, ...]
    steps: tuple[StepTime | None, StepTime | None] = (None, None)


@dataclass(frozen=True, slots=True)
class Outcome:
    """All that a plan brought.

    Attributes:
        ways: How it was asked: one name, or those of candidate and baseline.
        measured: Each load, of a plan that does not compare.
        compared: Each load, of one that does.
    """

    ways: tuple[str, ...]
    measured: tuple[Measured, ...] = ()
    compared: tuple[Compared, ...] = ()

    @property
    def num_failed(self) -> int:
        """Requests that failed."""
        singles = [item.summary for item in self.measured]
        pairs = [side for item in self.compared for side in (item.summary.candidate, item.summary.baseline)]
        return sum(summary.num_failed for summary in singles + pairs)


async def measure(plan: Plan, url: str, timer: Timer | None = None) -> Outcome:
    """Measures the server at `url`, and compares if the plan says so.

    Raises:
        StartupError: A server cannot be reached.
    """
    timer = timer or Timer()
    questions = [make_question(prompt, number, plan.wishes) for number, prompt in enumerate(plan.prompts)]
    async with _connect(plan, url) as first:
        if not plan.compares:
            client = await _client(first, plan, first_label(url), {}, timer)
            await _warm_up(client, questions, plan.warmup)
            return Outcome((client.label,), measured=await _measure_loads(plan, client, questions, timer))
        if plan.against is None:
            ways = (
                await _client(first, plan, "speculation", {}, timer),
                await _client(first, plan, "plain", PLAIN, timer),
            )
            return await _compare(plan, ways, questions, timer)
        async with _connect(plan, plan.against) as second:
            ways = (
                await _client(first, plan, first_label(url), {}, timer),
                await _client(second, plan, first_label(plan.against), {}, timer),
            )
            return await _compare(plan, ways, questions, timer)


async def trace(plan: Plan, url: str) -> bytes:
    """A trace of some steps of the server at `url`, while as many questions run as the plan's load has.

    Raises:
        StartupError: The server does not make any.
    """
    questions = [make_question(prompt, number, plan.wishes) for number, prompt in enumerate(plan.prompts)]
    group = questions[: max(plan.concurrency, default=len(questions))]
    async with _connect(plan, url) as http:
        client = await _client(http, plan, first_label(url), {}, Timer())
        address = f"{api_root(url).rstrip('/').removesuffix('/v1')}/profile"
        asked = asyncio.create_task(http.post(address, params={"steps": plan.profile_steps}))
        while not asked.done():
            await asyncio.gather(*(client.ask(question) for question in group))
        try:
            response = await asked
        except httpx.HTTPError as error:
            raise StartupError(f"{address} does not answer: {type(error).__name__}: {error}") from error
        if response.status_code != 200:
            raise StartupError(
                f"{address} answers {response.status_code}: for a trace start the server with --profiling"
            )
        return response.content


def first_label(url: str) -> str:
    """A server's address without its scheme, as reports call it."""
    return url.partition("://")[2].rstrip("/") or url


@asynccontextmanager
async def _connect(plan: Plan, url: str) -> AsyncIterator[httpx.AsyncClient]:
    key = os.environ.get("OPENAI_API_KEY")
    async with httpx.AsyncClient(
        base_url=api_root(url),
        headers={"Authorization": f"Bearer {key}"} if key else {},
        timeout=plan.timeout,
        limits=httpx.Limits(max_connections=None, max_keepalive_connections=None),
        trust_env=False,
    ) as http:
        yield http


async def _client(
    http: httpx.AsyncClient, plan: Plan, label: str, extra: dict[str, Any], timer: Timer
) -> BenchClient:
    name = plan.api_model or await model_name(http)
    return BenchClient(http, label, name, extra, timer.clock)


async def _warm_up(client: BenchClient, questions: Sequence[Question], count: int) -> None:
    """The first requests, one by one. One that fails will do so again where it is counted."""
    for number in range(count):
        await client.ask(questions[number % len(questions)])


async def _measure_loads(
    plan: Plan, client: BenchClient, questions: Sequence[Question], timer: Timer
) -> tuple[Measured, ...]:
    measured = []
    for concurrency in plan.concurrency:
        load = f"{concurrency} at once"
        with_bar = _Bar(plan, load, len(questions), timer.clock)
        async with client.steps.watching():
            run = await run_closed(client, questions, concurrency, with_bar.on_done, timer)
        with_bar.close()
        measured.append(Measured(run, summarize(load, concurrency, run), client.steps.take()))
    for rate in plan.rates:
        load = f"{rate:g} per second"
        with_bar = _Bar(plan, load, len(questions), timer.clock)
        arrivals = poisson_arrivals(rate, len(questions), plan.wishes.seed)
        async with client.steps.watching():
            run = await run_open(client, questions, arrivals, with_bar.on_done, timer)
        with_bar.close()
        measured.append(Measured(run, summarize(load, rate, run), client.steps.take()))
    return tuple(measured)


async def _compare(
    plan: Plan, ways: tuple[BenchClient, BenchClient], questions: Sequence[Question], timer: Timer
) -> Outcome:
    for way in ways:
        await _warm_up(way, questions, plan.warmup)
    compared = []
    for concurrency in plan.concurrency:
        load = f"{concurrency} at once, in pairs"
        bar = _Bar(plan, load, 2 * len(questions), timer.clock)
        run = await run_paired(ways, questions, concurrency, bar.on_done, timer)
        bar.close()
        summary = summarize_pairs(load, concurrency, run, plan.wishes.seed)
        steps = ways[0].steps.take(), ways[1].steps.take()
        compared.append(Compared(run, summary, await explain(ways[1], questions, run.pairs), steps))
    return Outcome((ways[0].label, ways[1].label), compared=tuple(compared))


class _Bar:
    """A progress bar, or none."""

    def __init__(self, plan: Plan, title: str, total: int, clock: Callable[[], float]) -> None:
        self._progress = None if plan.quiet else Progress(title, total, sys.stderr, clock)
        self.on_done: OnDone = (lambda record: None) if self._progress is None else self._progress.add

    def close(self) -> None:
        """Leaves its final line."""
        if self._progress is not None:
            self._progress.close()
