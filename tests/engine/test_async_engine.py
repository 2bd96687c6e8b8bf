"""The engine on its thread: outputs, early exits, refusals, failures, and its death."""

import asyncio
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch

from engine.async_engine import AsyncEngine
from engine.config import CacheConfig, EngineConfig, NgramSpeculation, SchedulerConfig
from engine.engine_core import EngineCore
from engine.errors import ContextTooLong, EngineDead, InvalidRequest, Overloaded, RequestFailed
from engine.factory import assemble
from engine.llm import Completion
from engine.model.input_batch import InputBatch
from engine.outputs import FinishReason, StepStats
from engine.sampling_params import SamplingParams
from engine.speculation.base import Speculator
from engine.token_tree import TokenTree
from tests.engine.answers import PROMPT, essence, plain_answer, target
from tests.scripted import ScriptedSpeculator, failing, forced

WISHES = SamplingParams(temperature=0.9, seed=1, max_tokens=24, ignore_eos=True)
ENDLESS = replace(WISHES, max_tokens=100)
PATIENCE = 20.0


def build_core(speculator: Speculator | None = None, **room: int) -> Any:
    """An engine core, its model's description and its tokenizer."""
    config = EngineConfig(
        cache=CacheConfig(block_size=4, num_kv_blocks=256),
        scheduler=SchedulerConfig(**{"max_num_seqs": 8, "max_num_batched_tokens": 128, **room}),
        speculation=NgramSpeculation(num_draft_tokens=4, ngram_min=1),
    )
    return assemble(config, target(), None, speculator)


@contextmanager
def running(speculator: Speculator | None = None, **room: int) -> Iterator[AsyncEngine]:
    """An engine on its thread, ended afterwards."""
    parts = build_core(speculator, **room)
    engine = AsyncEngine(parts.core, parts.model, parts.tokenizer)
    engine.start()
    try:
        yield engine
    finally:
        engine.close()
        assert not engine._thread.is_alive()


def ask(scenario: Callable[[], Awaitable[None]]) -> None:
    """Runs a scenario on an event loop; a client left waiting fails it."""

    async def limited() -> None:
        await asyncio.wait_for(scenario(), PATIENCE)

    asyncio.run(limited())


async def answer_of(
    engine: AsyncEngine, request_id: str, prompt: tuple[int, ...] = PROMPT, params: SamplingParams = WISHES
) -> Completion:
    answer = Completion(list(prompt))
    async for output in engine.generate(request_id, prompt, params):
        assert output.request_id == request_id
        assert answer.finish_reason is None
        answer.add(output)
    return answer


class Gate:
    """Holds the target's passes back, or makes them fail, as a test wants it."""

    def __init__(self, core: EngineCore) -> None:
        self.open = threading.Event()
        self.open.set()
        self.num_failures = 0
        self.num_passes = 0
        self._forward = core._runner.forward
        core._runner.forward = self  # type: ignore[method-assign]

    def __call__(self, batch: InputBatch) -> torch.Tensor:
        assert self.open.wait(PATIENCE)
        self.num_passes += 1
        if self.num_failures:
            self.num_failures -= 1
            raise RuntimeError("planted")
        return self._forward(batch)


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.002)


def is_empty(engine: AsyncEngine) -> bool:
    core = engine._core
    pool = core.scheduler.kv.pool
    return not (core.has_work or core._requests or engine._inboxes) and pool.num_free == pool.num_blocks


def test_an_answer_comes_piece_by_piece() -> None:
    with running() as engine:

        async def scenario() -> None:
            outputs = [output async for output in engine.generate("a", PROMPT, WISHES)]
            assert len(outputs) > 5
            assert [output.finish_reason for output in outputs[:-1]] == [None] * (len(outputs) - 1)
            assert outputs[-1].num_output_tokens == 24
            answer = Completion(list(PROMPT))
            for output in outputs:
                answer.add(output)
            assert essence(answer) == essence(plain_answer(WISHES))
            assert engine.health().alive

        ask(scenario)
        assert is_empty(engine)


def test_many_requests_from_several_event_loops() -> None:
    prompts = [tuple(f"prompt {i} prompt {i}".encode()) for i in range(6)]
    expected = [essence(plain_answer(WISHES, prompt)) for prompt in prompts]
    failures: list[BaseException] = []

    def client(engine: AsyncEngine, name: str) -> None:
        async def scenario() -> None:
            answers = await asyncio.gather(
                *(answer_of(engine, f"{name}-{i}", prompt) for i, prompt in enumerate(prompts))
            )
            assert [essence(answer) for answer in answers] == expected

        try:
            ask(scenario)
        except BaseException as error:
            failures.append(error)

    with running() as engine:
        threads = [threading.Thread(target=client, args=(engine, f"loop{i}")) for i in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not failures
        assert is_empty(engine)


def test_leaving_the_iterator_early_aborts() -> None:
    finished: list[FinishReason] = []

    def note(stats: StepStats) -> None:
        finished.extend(entry.reason for entry in stats.finished)

    with running() as engine:
        engine.subscribe(note)

        async def scenario() -> None:
            outputs = engine.generate("a", PROMPT, ENDLESS)
            async for _ in outputs:
                break
            await outputs.aclose()  # type: ignore[attr-defined]
            await until(lambda: bool(finished))
            # The name is free again, and the engine as good as new.
            assert essence(await answer_of(engine, "a")) == essence(plain_answer(WISHES))

        ask(scenario)
        assert is_empty(engine)
    assert finished == [FinishReason.ABORT, FinishReason.LENGTH]


@pytest.mark.parametrize("queued", [False, True], ids=["running", "still in the queue"])
def test_a_cancelled_client_aborts(queued: bool) -> None:
    with running(max_num_seqs=1) as engine:
        gate = Gate(engine._core)

        async def scenario() -> None:
            gate.open.clear()
            first = asyncio.create_task(answer_of(engine, "first"))
            second = asyncio.create_task(answer_of(engine, "second", params=ENDLESS))
            await until(lambda: len(engine._inboxes) + engine._commands.qsize() == 2)
            gone, stays = (second, first) if queued else (first, second)
            gone.cancel()
            gate.open.set()
            expected = WISHES if queued else ENDLESS
            assert essence(await stays) == essence(plain_answer(expected))
            with pytest.raises(asyncio.CancelledError):
                await gone

        ask(scenario)
        assert is_empty(engine)


def test_abort_ends_the_stream_with_what_there_is() -> None:
    with running() as engine:

        async def scenario() -> None:
            answer = Completion(list(PROMPT))
            async for output in engine.generate("a", PROMPT, ENDLESS):
                answer.add(output)
                if output.finish_reason is None:
                    await engine.abort("a")
            assert answer.finish_reason is FinishReason.ABORT
            expected = plain_answer(ENDLESS)
            assert answer.token_ids == expected.token_ids[: len(answer.token_ids)]
            assert 0 < len(answer.token_ids) < 100
            await engine.abort("a")
            await engine.abort("never heard of")
            assert (await answer_of(engine, "b")).finish_reason is FinishReason.LENGTH

        ask(scenario)
        assert is_empty(engine)


def test_a_name_in_use_is_refused_and_its_owner_goes_on() -> None:
    with running() as engine:
        gate = Gate(engine._core)

        async def scenario() -> None:
            gate.open.clear()
            owner = asyncio.create_task(answer_of(engine, "a"))
            await asyncio.sleep(0)
            second = asyncio.create_task(answer_of(engine, "a", (1, 2, 3)))
            # A namesake that leaves before its refusal arrives must not take the owner with it.
            third = asyncio.create_task(answer_of(engine, "a", (1, 2, 3)))
            await asyncio.sleep(0)
            third.cancel()
            await asyncio.sleep(0)
            gate.open.set()
            with pytest.raises(InvalidRequest, match="request id a is in use"):
                await second
            assert essence(await owner) == essence(plain_answer(WISHES))

        ask(scenario)
        assert is_empty(engine)


REFUSED: dict[str, tuple[Any, SamplingParams, type[InvalidRequest], str | None]] = {
    "no tokens": ((), WISHES, InvalidRequest, "prompt"),
    "an id behind the vocabulary": ((1, 259), WISHES, InvalidRequest, "prompt"),
    "a negative id": ((-1,), WISHES, InvalidRequest, "prompt"),
    "a prompt as long as the context": ((1,) * 128, WISHES, ContextTooLong, "prompt"),
    "an answer too long for the context": (
        (1,) * 100,
        replace(WISHES, max_tokens=29),
        ContextTooLong,
        "max_tokens",
    ),
    "a biased id that does not exist": (
        (1,),
        replace(WISHES, logit_bias=((300, 1.0),)),
        InvalidRequest,
        "logit_bias",
    ),
}


@pytest.mark.parametrize("case", REFUSED.values(), ids=REFUSED.keys())
def test_what_cannot_be_served_is_refused_and_the_next_request_is_served(case: Any) -> None:
    prompt, params, error, param = case
    with running() as engine:

        async def scenario() -> None:
            with pytest.raises(error) as caught:
                await answer_of(engine, "bad", prompt, params)
            assert caught.value.param == param
            assert essence(await answer_of(engine, "good")) == essence(plain_answer(WISHES))

        ask(scenario)
        assert is_empty(engine)


def test_a_request_that_admission_chokes_on_fails_alone(caplog: pytest.LogCaptureFixture) -> None:
    """The server checks types; another user of the engine may not, and must not end it for everyone."""
    with running() as engine:

        async def scenario() -> None:
            good = asyncio.create_task(answer_of(engine, "good"))
            await asyncio.sleep(0)
            with pytest.raises(RequestFailed):
                await answer_of(engine, "bad", ("a", 1))  # type: ignore[arg-type]
            assert essence(await good) == essence(plain_answer(WISHES))
            assert engine.health().alive

        ask(scenario)
        assert is_empty(engine)


def test_a_full_queue_refuses() -> None:
    with running(max_num_seqs=1, max_num_queued=1) as engine:
        gate = Gate(engine._core)

        async def scenario() -> None:
            first = asyncio.create_task(answer_of(engine, "first"))
            await until(lambda: gate.num_passes > 0)
            gate.open.clear()
            rest = [asyncio.create_task(answer_of(engine, f"r{i}")) for i in range(4)]
            await asyncio.sleep(0)
            gate.open.set()
            results = await asyncio.gather(first, *rest, return_exceptions=True)
            refused = [result for result in results if isinstance(result, Overloaded)]
            served = [result for result in results if isinstance(result, Completion)]
            assert len(refused) + len(served) == 5
            assert refused
            assert len(served) >= 2
            assert essence(await answer_of(engine, "later")) == essence(plain_answer(WISHES))

        ask(scenario)
        assert is_empty(engine)


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
    def step() -> Any:
        raise SystemExit("planted death")

    engine._core.step = step  # type: ignore[method-assign]


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


def test_text_goes_both_ways() -> None:
    with running() as engine:

        async def scenario() -> None:
            ids = await engine.encode("héllo")
            assert ids == list("héllo".encode())
            assert await engine.decode([*ids, 257]) == "héllo<eos>"
            assert await engine.apply_chat_template([{"role": "user", "content": "x"}]) == [
                *b"user:x", 258, *b"assistant:"
            ]  # fmt: skip
            assert engine.model.vocab_size == 259

        ask(scenario)
