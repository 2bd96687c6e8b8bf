"""Where a request's outputs wait for their reader."""

import asyncio
import threading

import pytest

from engine.client import MAX_BATCH
from engine.errors import EngineDead
from engine.inbox import Inbox, Inboxes
from engine.outputs import FinishReason, RequestOutput


def output(number: int, reason: FinishReason | None = None) -> RequestOutput:
    return RequestOutput("a", token_ids=(number,), finish_reason=reason)


def numbers(outputs: list[RequestOutput]) -> list[int]:
    return [token for item in outputs for token in item.token_ids]


def test_what_has_come_is_taken_at_once_and_in_order() -> None:
    async def scenario() -> None:
        inbox = Inbox()
        for number in range(3):
            inbox.put(output(number))
        assert numbers(await inbox.take()) == [0, 1, 2]
        waiting = asyncio.create_task(inbox.take())
        await asyncio.sleep(0)
        assert not waiting.done()
        inbox.put(output(3))
        inbox.put(output(4))
        assert numbers(await waiting) == [3, 4]

    asyncio.run(scenario())


def test_no_more_than_a_batch_is_taken_in_one_go() -> None:
    async def scenario() -> None:
        inbox = Inbox()
        for number in range(MAX_BATCH + 2):
            inbox.put(output(number))
        assert len(await inbox.take()) == MAX_BATCH
        assert numbers(await inbox.take()) == [MAX_BATCH, MAX_BATCH + 1]

    asyncio.run(scenario())


def test_an_error_comes_behind_the_outputs_before_it_and_stays() -> None:
    async def scenario() -> None:
        inbox = Inbox()
        inbox.put(output(0))
        inbox.put(EngineDead("gone"))
        inbox.put(output(1))
        assert numbers(await inbox.take()) == [0]
        for _ in range(2):
            with pytest.raises(EngineDead, match="gone"):
                await inbox.take()

    asyncio.run(scenario())


def test_a_reader_that_was_cancelled_loses_nothing() -> None:
    async def scenario() -> None:
        inbox = Inbox()
        waiting = asyncio.create_task(inbox.take())
        await asyncio.sleep(0)
        waiting.cancel()
        inbox.put(output(0))
        with pytest.raises(asyncio.CancelledError):
            await waiting
        inbox.put(output(1))
        assert numbers(await inbox.take()) == [0, 1]

    asyncio.run(scenario())


def test_a_step_is_one_call_of_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = 0

    async def scenario() -> None:
        loop = asyncio.get_running_loop()
        truth = loop.call_soon_threadsafe

        def counted(*given: object) -> object:
            nonlocal calls
            calls += 1
            return truth(*given)  # type: ignore[arg-type]

        monkeypatch.setattr(loop, "call_soon_threadsafe", counted)
        inboxes = Inboxes()
        readers = {name: Inbox() for name in "abc"}
        for name, inbox in readers.items():
            inboxes.open(name, inbox)
        step = {
            "a": output(1),
            "b": output(2, FinishReason.LENGTH),
            "c": EngineDead("gone"),
            "unknown": output(3),
        }
        thread = threading.Thread(target=inboxes.deliver, args=(step,))
        thread.start()
        assert numbers(await readers["a"].take()) == [1]
        assert numbers(await readers["b"].take()) == [2]
        with pytest.raises(EngineDead):
            await readers["c"].take()
        thread.join()
        assert len(inboxes) == 1

    asyncio.run(scenario())
    assert calls == 1
