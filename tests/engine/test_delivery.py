"""When outputs go out: at once, or beside the next pass where a device runs it by itself."""

import asyncio
from collections.abc import Mapping
from typing import Any

import pytest
import torch

from engine.async_engine import AsyncEngine
from engine.errors import RequestFailed
from engine.inbox import Inbox, Inboxes
from engine.model.model_runner import ModelRunner
from engine.outputs import FinishReason, RequestOutput
from tests.engine.answers import PROMPT, essence, plain_answer
from tests.engine.async_engines import ENDLESS, WISHES, Gate, answer_of, ask, is_empty, running, until
from tests.engines import build_llm

METHODS = {
    "none": True,
    "ngram": True,
    "suffix": True,
    "draft_model": False,
    "eagle3": False,
    "medusa": False,
}


def note_order(engine: AsyncEngine) -> list[str]:
    """What the engine's thread does, from now on: launches a pass, waits for its results, delivers."""
    core, seen = engine._core, list[str]()
    forward, sampler, deliver = core._runner.forward, core._sampler, engine._inboxes._deliver

    def launch(*args: Any) -> torch.Tensor:
        seen.append("launch")
        return forward(*args)

    def wait(*args: Any) -> Any:
        seen.append("wait")
        return sampler(*args)

    def hand_over(deliveries: Mapping[str, Any]) -> None:
        if deliveries:
            seen.append("deliver")
        deliver(deliveries)

    core._runner.forward = launch  # type: ignore[method-assign, assignment]
    core._sampler = wait  # type: ignore[assignment]
    engine._inboxes._deliver = hand_over  # type: ignore[method-assign]
    return seen


@pytest.mark.parametrize("is_early", [False, True])
def test_outputs_go_out_beside_the_next_pass_if_a_device_runs_it(is_early: bool) -> None:
    """The last ones at once, since no pass follows."""
    with running() as engine:
        assert not engine._core.launches_early, "a CPU runs passes itself"
        engine._core.launches_early = is_early
        seen = note_order(engine)

        async def scenario() -> None:
            assert essence(await answer_of(engine, "a")) == essence(plain_answer(WISHES))

        ask(scenario)
        num_steps = seen.count("launch")
        assert num_steps > 5
        if is_early:
            assert seen == ["launch", "wait", *["launch", "deliver", "wait"] * (num_steps - 1), "deliver"]
        else:
            assert seen == ["launch", "wait", "deliver"] * num_steps
        assert is_empty(engine)


def test_an_end_from_outside_comes_behind_what_was_put_off() -> None:
    with running() as engine:
        core = engine._core
        core.launches_early = True
        gate = Gate(core)
        gate.open.clear()

        async def read() -> list[RequestOutput]:
            return [output async for batch in engine.generate("a", PROMPT, ENDLESS) for output in batch]

        async def scenario() -> None:
            reading = asyncio.create_task(read())
            await until(lambda: bool(core._in_step))
            await engine.abort("a")
            gate.open.set()
            first, last = await reading
            assert (len(first.token_ids), first.finish_reason) == (1, None)
            assert (last.num_output_tokens, last.finish_reason) == (1, FinishReason.ABORT)

        ask(scenario)
        assert is_empty(engine)


def test_a_failure_comes_behind_what_was_put_off() -> None:
    """Every token that was committed before the step that fails."""
    with running() as engine:
        core = engine._core
        core.launches_early = True
        gate, abandon = Gate(core), core.abandon_step
        committed: list[int] = []

        def note() -> list[str]:
            committed.append(core._requests["a"].num_output_tokens)
            return abandon()

        core.abandon_step = note  # type: ignore[method-assign]

        async def read() -> None:
            async for batch in engine.generate("a", PROMPT, ENDLESS):
                received.extend(token for output in batch for token in output.token_ids)
                if not committed:
                    gate.num_failures = 1

        async def scenario() -> None:
            with pytest.raises(RequestFailed):
                await read()
            gate.num_failures = 0
            assert [len(received)] == committed
            assert essence(await answer_of(engine, "b")) == essence(plain_answer(WISHES))

        received: list[int] = []
        ask(scenario)
        assert is_empty(engine)


def test_what_is_held_goes_first() -> None:
    """Whatever is delivered or held behind it."""

    async def scenario() -> None:
        inboxes, inbox = Inboxes(), Inbox()
        inboxes.open("a", inbox)
        numbered = [
            RequestOutput("a", token_ids=(number,), text="", num_prompt_tokens=1, num_output_tokens=1)
            for number in range(4)
        ]
        inboxes.hold({"a": numbered[0]})
        inboxes.hold({"a": numbered[1]})
        inboxes.deliver({"a": numbered[2]})
        inboxes.hold({"a": numbered[3]})
        await asyncio.sleep(0)
        assert await inbox.take() == numbered[:3]
        inboxes.deliver_held()
        inboxes.deliver_held()
        assert await inbox.take() == numbered[3:]

    ask(scenario)


@pytest.mark.parametrize("method", METHODS)
def test_drafts_that_are_computed_have_outputs_go_out_before(
    monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    """They would be waited for, pass by pass, before the target's is launched."""
    llm = build_llm(method)
    assert not llm.core.launches_early
    monkeypatch.setattr(ModelRunner, "device", torch.device("cuda"))
    assert build_llm(method).core.launches_early is METHODS[method]
