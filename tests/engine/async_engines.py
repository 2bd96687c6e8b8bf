"""Engines on their threads, clients that do not wait for ever, and a gate for the target's passes."""

import asyncio
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

from engine.async_engine import AsyncEngine
from engine.config import CacheConfig, EngineConfig, NgramSpeculation, SchedulerConfig
from engine.engine_core import EngineCore
from engine.factory import assemble
from engine.llm import Completion
from engine.model.input_batch import InputBatch
from engine.sampling_params import SamplingParams
from engine.speculation.base import Speculator
from tests.engine.answers import PROMPT, target

WISHES = SamplingParams(temperature=0.9, seed=1, max_tokens=24, ignore_eos=True)
ENDLESS = replace(WISHES, max_tokens=100)
PATIENCE = 20.0


def build_core(speculator: Speculator | None = None, **room: int) -> Any:
    """An engine core, its model's description and its tokenizer."""
    config = EngineConfig(
        cache=CacheConfig(block_size=4, num_kv_blocks=256),
        scheduler=SchedulerConfig(**{"max_num_seqs": 8, "max_num_batched_tokens": 128, **room}),
        speculation=NgramSpeculation(num_draft_tokens=4, ngram_min=1, planner="fixed"),
    )
    return assemble(config, target(), (), speculator)


@contextmanager
def running(
    speculator: Speculator | None = None, step_timeout_seconds: float = 600, **room: int
) -> Iterator[AsyncEngine]:
    """An engine on its thread, ended afterwards."""
    parts = build_core(speculator, **room)
    engine = AsyncEngine(parts.core, parts.model, parts.tokenizer, step_timeout_seconds)
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
    async for outputs in engine.generate(request_id, prompt, params):
        for output in outputs:
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
