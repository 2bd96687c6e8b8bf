"""The engine on its thread: outputs, early exits and refusals."""

import asyncio
import threading
from dataclasses import replace
from typing import Any

import pytest

from engine.async_engine import AsyncEngine
from engine.errors import ContextTooLong, InvalidRequest, Overloaded, RequestFailed
from engine.llm import Completion
from engine.outputs import FinishReason, StepStats
from engine.sampling_params import SamplingParams
from engine.tokenizer import Tokenizer
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
from tests.engine.vocabularies import sentencepiece_tokenizer


def test_an_answer_comes_piece_by_piece() -> None:
    with running() as engine:

        async def scenario() -> None:
            outputs = [output async for batch in engine.generate("a", PROMPT, WISHES) for output in batch]
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


def test_whoever_has_an_answer_finds_it_counted() -> None:
    with running() as engine:
        counted: list[int] = []
        engine.subscribe(lambda stats: counted.append(stats.num_generation_tokens))
        deliver, seen = engine._inboxes.deliver, list[int]()

        def watched(deliveries: Any) -> None:
            if any(getattr(each, "finish_reason", None) for each in deliveries.values()):
                seen.append(sum(counted))
            deliver(deliveries)

        engine._inboxes.deliver = watched  # type: ignore[method-assign]

        async def scenario() -> None:
            await answer_of(engine, "a")

        ask(scenario)
    assert seen == [24]


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
            await outputs.aclose()
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
            async for outputs in engine.generate("a", PROMPT, ENDLESS):
                for output in outputs:
                    answer.add(output)
                if answer.finish_reason is None:
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


def test_text_goes_both_ways() -> None:
    with running() as engine:

        async def scenario() -> None:
            ids = await engine.encode("héllo")
            assert ids == list("héllo".encode())
            assert await engine.decode([*ids, 257]) == "héllo<eos>"
            assert await engine.token_bytes([0xC3, 0xA9, 257]) == [b"\xc3", b"\xa9", b"<eos>"]
            assert await engine.token_bytes([]) == []
            assert await engine.apply_chat_template([{"role": "user", "content": "x"}]) == [
                *b"user:x", 258, *b"assistant:"
            ]  # fmt: skip
            assert engine.model.vocab_size == 259

        ask(scenario)


def test_bytes_of_tokens_make_up_the_text_even_where_a_beginning_loses_its_space() -> None:
    wrapped = sentencepiece_tokenizer()
    parts = build_core()
    engine = AsyncEngine(parts.core, parts.model, Tokenizer(wrapped))
    hello = wrapped.convert_tokens_to_ids("▁Hello")

    async def scenario() -> None:
        found = await engine.token_bytes([hello, hello])
        assert found == [b"Hello", b" Hello"]
        assert b"".join(found).decode() == await engine.decode([hello, hello])

    ask(scenario)
