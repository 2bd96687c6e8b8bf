"""Where the time of steps goes, and traces of them."""

import asyncio
import json
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import pytest

from engine.errors import EngineDead, InvalidRequest
from engine.llm import LLM
from engine.outputs import StepPart, StepStats
from engine.step_timer import StepTimer
from tests.engine.answers import PROMPT
from tests.engine.async_engines import ENDLESS, WISHES, Gate, answer_of, ask, build_core, running, until


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_a_part_ends_where_the_next_begins() -> None:
    clock = Clock()
    timer = StepTimer(clock)
    for part, seconds in ((StepPart.BUILD, 1.0), (StepPart.FORWARD, 4.0), (StepPart.BUILD, 2.0)):
        timer.enter(part)
        clock.now += seconds
    timer.leave()
    clock.now += 100.0
    timer.enter(StepPart.SAMPLE)
    clock.now += 8.0
    assert timer.take() == {StepPart.BUILD: 3.0, StepPart.FORWARD: 4.0, StepPart.SAMPLE: 8.0}
    clock.now += 16.0
    assert timer.take() == {StepPart.SAMPLE: 16.0}  # It goes on.
    timer.leave()
    assert timer.take() == {StepPart.SAMPLE: 0.0}
    assert timer.take() == {}


def test_regions_are_opened_and_closed_with_the_parts() -> None:
    seen: list[str] = []

    @contextmanager
    def note(part: StepPart) -> Any:
        seen.append(f"+{part}")
        yield
        seen.append(f"-{part}")

    def region(part: StepPart) -> AbstractContextManager[object]:
        return note(part)

    timer = StepTimer(Clock())
    timer.enter(StepPart.COMMANDS)
    timer.mark_regions(region)
    timer.enter(StepPart.SCHEDULE)
    timer.take()
    timer.enter(StepPart.SCHEDULE)
    timer.leave()
    timer.enter(StepPart.OUTPUT)
    timer.mark_regions(None)
    timer.enter(StepPart.BUILD)
    assert seen == ["+commands", "-commands", "+schedule", "-schedule", "+output", "-output"]


def test_all_parts_of_a_step_take_time_in_a_step() -> None:
    llm = LLM(build_core())
    llm.generate([PROMPT], WISHES)
    seconds = llm.stats.part_seconds
    assert {*seconds} == {*StepPart} - {StepPart.COMMANDS}
    assert all(spent > 0 for spent in seconds.values())
    assert max(seconds, key=seconds.__getitem__) is StepPart.FORWARD
    assert llm.stats.num_generation_tokens == WISHES.max_tokens


def test_waiting_for_requests_is_no_part_of_a_step() -> None:
    reports: list[StepStats] = []
    with running() as engine:
        engine.subscribe(reports.append)

        async def scenario() -> None:
            await answer_of(engine, "one")
            await asyncio.sleep(0.5)
            await answer_of(engine, "two")

        ask(scenario)
    total = {part: sum(stats.part_seconds.get(part, 0.0) for stats in reports) for part in StepPart}
    assert all(seconds > 0 for seconds in total.values())
    assert total[StepPart.COMMANDS] < 0.25


def regions(trace: bytes) -> list[str]:
    events = json.loads(trace)["traceEvents"]
    return [event["name"] for event in events if event.get("cat") == "user_annotation"]


def test_some_steps_are_traced_with_a_region_for_each_part() -> None:
    with running() as engine:

        async def scenario() -> None:
            asked = asyncio.create_task(engine.trace(3))
            await asyncio.sleep(0.05)
            assert not asked.done()  # It waits for steps.
            with pytest.raises(InvalidRequest, match="a trace is being made already"):
                await engine.trace(1)
            await answer_of(engine, "one")
            trace = await asked
            found = regions(trace)
            assert {*StepPart} <= {*found}
            assert found.count("forward") == found.count("schedule") == 3
            assert b"aten::" in trace
            # Afterwards it is as before, and another can be made.
            again = asyncio.create_task(engine.trace(1))
            await asyncio.sleep(0.05)
            await answer_of(engine, "two")
            assert regions(await again).count("forward") == 1

        ask(scenario)


def test_a_trace_that_nobody_waits_for_is_forgotten() -> None:
    with running() as engine:

        async def scenario() -> None:
            early = asyncio.create_task(engine.trace(1))
            await asyncio.sleep(0.05)
            early.cancel()
            await asyncio.sleep(0)
            await answer_of(engine, "one")
            late = asyncio.create_task(engine.trace(1000))
            running_one = asyncio.create_task(answer_of(engine, "two", params=ENDLESS))
            await until(lambda: engine._tracer._recording is not None)
            late.cancel()
            await running_one
            assert engine.health().alive

        ask(scenario)


def test_an_engine_that_ends_owes_no_trace() -> None:
    with running() as engine:
        Gate(engine._core)

        async def scenario() -> None:
            waiting = asyncio.create_task(engine.trace(1))
            await asyncio.sleep(0.05)
            await asyncio.to_thread(engine.close)
            with pytest.raises(EngineDead):
                await waiting
            with pytest.raises(EngineDead):
                await engine.trace(1)

        ask(scenario)
