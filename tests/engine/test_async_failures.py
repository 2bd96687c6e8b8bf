"""The engine on its thread when something fails: a step, a speculator, or the loop itself."""

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from engine.async_engine import AsyncEngine
from engine.errors import EngineDead, InvalidRequest, RequestFailed
from engine.llm import Completion
from engine.outputs import StepStats
from engine.token_tree import TokenTree
from tests.engine.answers import PROMPT, essence, plain_answer
from tests.engine.async_engines import (
    ENDLESS,
    WISHES,
    Gate,
    answer_of,
    ask,
    build_core,
    is_empty,
    running,
    until,
)
from tests.scripted import ScriptedSpeculator, failing, forced


def test_a_failing_step_ends_its_requests_and_the_engine_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    with running(max_num_seqs=2) as engine:
        gate = Gate(engine._core)

        async def scenario() -> None:
            gate.open.clear()
            tasks = [asyncio.create_task(answer_of(engine, f"r{i}")) for i in range(3)]
            await until(lambda: len(engine._inboxes) + engine._commands.qsize() >= 3)
            await asyncio.sleep(0.05)
            gate.num_failures = 1
            gate.open.set()
            results = await asyncio.gather(*tasks, return_exceptions=True)
            failed = [isinstance(result, RequestFailed) for result in results]
            # The thread may have begun its first step before it heard of the others.
            assert failed in ([True, False, False], [True, True, False])
            for result in results:
                if isinstance(result, Completion):
                    assert essence(result) == essence(plain_answer(WISHES))
            assert engine.health().alive
            assert essence(await answer_of(engine, "later")) == essence(plain_answer(WISHES))

        ask(scenario)
        assert is_empty(engine)
    assert "a step failed" in caplog.text


@pytest.mark.parametrize("when", ["always", "now and then"])
def test_a_failing_speculator_costs_drafts_and_nothing_else(
    when: str, caplog: pytest.LogCaptureFixture
) -> None:
    expected = plain_answer(WISHES)
    fails, right = failing(RuntimeError("planted")), forced(expected.token_ids)

    def script(request: Any) -> Any:
        wanted = when == "always" or len(request.token_ids) % 3 == 0
        return (fails if wanted else right)(request)

    with running(ScriptedSpeculator(script)) as engine:

        async def scenario() -> None:
            answers = await asyncio.gather(*(answer_of(engine, f"r{i}") for i in range(3)))
            for answer in answers:
                assert essence(answer) == essence(expected)
            accepted = sum(answer.speculation.num_accepted_tokens for answer in answers)
            assert (accepted > 0) == (when != "always")
            assert engine.health().alive

        ask(scenario)
        assert is_empty(engine)
    assert "drafting with ngram failed" in caplog.text


def test_trees_against_the_contract_cost_drafts_and_nothing_else(caplog: pytest.LogCaptureFixture) -> None:
    class Unruly(ScriptedSpeculator):
        def propose(self, context: Any) -> list[TokenTree]:
            trees = [[TokenTree.chain((259,))], [TokenTree.chain((1,) * 30)], [TokenTree.chain((-1,))], []]
            self.num_proposed += 1
            return trees[self.num_proposed % len(trees)]

    with running(Unruly({})) as engine:

        async def scenario() -> None:
            assert essence(await answer_of(engine, "a")) == essence(plain_answer(WISHES))

        ask(scenario)
        assert is_empty(engine)
    assert "outside 0 to 258" in caplog.text
    assert "30 draft nodes proposed" in caplog.text


def kill_by_listener(engine: AsyncEngine) -> None:
    def die(stats: StepStats) -> None:
        raise RuntimeError("planted death")

    engine.subscribe(die)


def kill_by_schedule(engine: AsyncEngine) -> None:
    """Planning fails again and again: there is nobody to blame, and so nothing that could be ended alone."""

    def schedule() -> Any:
        raise RuntimeError("planted death")

    engine._core.scheduler.schedule = schedule  # type: ignore[method-assign]


def kill_by_exit(engine: AsyncEngine) -> None:
    def step(meanwhile: Callable[[], None]) -> Any:
        raise SystemExit("planted death")

    engine._core.step = step  # type: ignore[method-assign, assignment]


KILLERS = [kill_by_listener, kill_by_schedule, kill_by_exit]


@pytest.mark.parametrize("kill", KILLERS)
def test_death_reaches_every_client_and_every_later_one(
    kill: Callable[[AsyncEngine], None], caplog: pytest.LogCaptureFixture
) -> None:
    with running(max_num_seqs=2) as engine:
        gate = Gate(engine._core)

        async def scenario() -> None:
            gate.open.clear()
            tasks = [asyncio.create_task(answer_of(engine, f"r{i}")) for i in range(5)]
            await asyncio.sleep(0)
            kill(engine)
            # Two of one name, in case one of them is still in the queue when the engine dies.
            tasks += [asyncio.create_task(answer_of(engine, "r0")) for _ in range(2)]
            await asyncio.sleep(0)
            gate.open.set()
            results = await asyncio.gather(*tasks, return_exceptions=True)
            assert {type(result) for result in results[:5]} == {EngineDead}
            assert {type(result) for result in results[5:]} <= {EngineDead, InvalidRequest}
            health = engine.health()
            assert not health.alive
            assert "planted death" in health.reason
            with pytest.raises(EngineDead, match="planted death"):
                await answer_of(engine, "later")
            await engine.abort("r0")

        ask(scenario)


def test_a_step_that_hangs_is_told_to_all_who_wait_and_forgotten_when_it_is_over(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with running(max_num_seqs=2, step_timeout_seconds=1) as engine:
        gate = Gate(engine._core)

        async def scenario() -> None:
            gate.open.clear()
            tasks = [asyncio.create_task(answer_of(engine, f"r{i}", params=ENDLESS)) for i in range(4)]
            results = await asyncio.gather(*tasks, return_exceptions=True)
            assert {type(result) for result in results} == {EngineDead}
            health = engine.health()
            assert not health.alive
            assert "at one step for more than 1 seconds" in health.reason
            with pytest.raises(EngineDead, match="hangs"):
                await answer_of(engine, "later")
            with pytest.raises(EngineDead, match="hangs"):
                await engine.planner_report()
            gate.open.set()
            # What nobody waits for any more is dropped, not computed.
            await until(lambda: engine.health().alive and is_empty(engine))
            assert gate.num_passes <= 2
            assert not engine._readers
            assert essence(await answer_of(engine, "r0")) == essence(plain_answer(WISHES))

        ask(scenario)
    assert "4 open requests are ended" in caplog.text


def test_who_asks_for_the_planner_or_a_trace_before_a_step_hangs_is_told_as_well() -> None:
    with running(max_num_seqs=2, step_timeout_seconds=1) as engine:
        gate = Gate(engine._core)

        async def scenario() -> None:
            gate.open.clear()
            request = asyncio.create_task(answer_of(engine, "r", params=ENDLESS))
            await until(lambda: engine._core._in_step != ())
            asked = [
                asyncio.create_task(engine.planner_report()),
                asyncio.create_task(engine.trace(2)),
                asyncio.create_task(engine.planner_report()),
            ]
            await until(lambda: engine._tracer._wish is not None and len(engine._readers) == 3)
            asked.pop().cancel()
            results = await asyncio.gather(request, *asked, return_exceptions=True)
            assert {type(result) for result in results} == {EngineDead}
            assert not engine._readers
            gate.open.set()
            await until(lambda: engine.health().alive and is_empty(engine))
            assert (await engine.planner_report()).planner == "fixed"
            trace = asyncio.create_task(engine.trace(2))
            assert essence(await answer_of(engine, "later")) == essence(plain_answer(WISHES))
            assert b"traceEvents" in await trace

        ask(scenario)


def test_a_trace_of_steps_of_which_one_hangs_is_given_up_and_the_next_one_is_made() -> None:
    with running(max_num_seqs=2, step_timeout_seconds=1) as engine:
        gate = Gate(engine._core)

        async def scenario() -> None:
            gate.open.clear()
            trace = asyncio.create_task(engine.trace(3))
            await asyncio.sleep(0)
            request = asyncio.create_task(answer_of(engine, "r", params=ENDLESS))
            await until(lambda: engine._tracer._recording is not None)
            results = await asyncio.gather(request, trace, return_exceptions=True)
            assert {type(result) for result in results} == {EngineDead}
            gate.open.set()
            await until(lambda: engine.health().alive and is_empty(engine))
            trace = asyncio.create_task(engine.trace(1))
            assert essence(await answer_of(engine, "later")) == essence(plain_answer(WISHES))
            assert b"traceEvents" in await trace
            assert engine._tracer._recording is None

        ask(scenario)


def test_an_engine_that_hangs_is_not_waited_for(caplog: pytest.LogCaptureFixture) -> None:
    parts = build_core()
    engine = AsyncEngine(parts.core, parts.model, parts.tokenizer, step_timeout_seconds=1)
    gate = Gate(parts.core)
    gate.open.clear()
    engine.start()

    async def scenario() -> None:
        with pytest.raises(EngineDead, match="hangs"):
            await answer_of(engine, "a")

    ask(scenario)
    engine.close()
    assert engine._thread.is_alive()
    assert "it is left behind" in caplog.text
    gate.open.set()
    engine._thread.join(10)
    assert not engine._thread.is_alive()
    assert not engine.health().alive


def test_closing_ends_open_requests() -> None:
    with running() as engine:

        async def scenario() -> None:
            outputs: AsyncIterator[Any] = engine.generate("a", PROMPT, ENDLESS)
            await anext(outputs)
            waiting = asyncio.create_task(answer_of(engine, "b", params=ENDLESS))
            await asyncio.sleep(0)
            await asyncio.to_thread(engine.close)
            with pytest.raises(EngineDead, match="closed"):
                async for _ in outputs:
                    pass
            with pytest.raises(EngineDead, match="closed"):
                await waiting
            with pytest.raises(EngineDead, match="closed"):
                await answer_of(engine, "later")
            assert not engine.health().alive

        ask(scenario)
        engine.close()


def test_an_engine_closed_before_its_start_serves_nobody() -> None:
    parts = build_core()
    engine = AsyncEngine(parts.core, parts.model, parts.tokenizer)

    async def scenario() -> None:
        early = asyncio.create_task(answer_of(engine, "early"))
        await asyncio.sleep(0)
        engine.close()
        with pytest.raises(EngineDead):
            await early
        with pytest.raises(EngineDead):
            await answer_of(engine, "late")

    ask(scenario)


def test_a_client_whose_event_loop_is_gone_holds_nothing_up() -> None:
    with running() as engine:
        loop = asyncio.new_event_loop()

        async def first_output(outputs: AsyncIterator[Any]) -> None:
            await anext(outputs)

        outputs = engine.generate("gone", PROMPT, ENDLESS)
        loop.run_until_complete(first_output(outputs))
        loop.close()

        async def scenario() -> None:
            assert essence(await answer_of(engine, "here")) == essence(plain_answer(WISHES))
            await until(lambda: is_empty(engine))

        ask(scenario)
        del outputs
