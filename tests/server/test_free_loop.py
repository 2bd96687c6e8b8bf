"""Nothing that a client sends, or does not read, keeps the event loop from the others.

How long it is kept in milliseconds is measured by tests/bench/loop.py; here it is shown that the long work
happens elsewhere, and that the loop gets its turns in the meantime.
"""

import asyncio
import json
import socket
import threading
import time
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from itertools import pairwise
from typing import Any

import pytest
from starlette.requests import Request
from starlette.types import Message

from engine.chat_options import DEFAULT_CHAT, ChatOptions
from engine.client import MAX_BATCH, ChatMessage
from engine.outputs import RequestOutput
from engine.sampling_params import SamplingParams
from server.protocol.completion import CompletionRequest
from server.protocol.formats import MAX_CHARACTERS
from server.protocol.parsing import parse_in_pieces
from server.routes import bodies
from server.routes.bodies import BodyReader
from server.services.generation import generate, make_choices
from server.tools.plan import ToolPlanner
from tests.fakes import FakeEngine, FakeRequest
from tests.server.conftest import Served
from tests.server.sse import chunks

Serve = Callable[..., Served]
MEGABYTES = 5_000_000
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"


def body_of(text: bytes) -> Request:
    async def receive() -> Message:
        return {"type": "http.request", "body": text}

    return Request({"type": "http", "headers": [], "method": "POST"}, receive)


def turns_during(work: Callable[[], Coroutine[Any, Any, Any]]) -> int:
    """Turns the event loop has while a coroutine runs; a count, since times depend on the machine's load."""

    async def measure() -> int:
        turns = 0
        task = asyncio.ensure_future(work())
        while not task.done():
            await asyncio.sleep(0.001)
            turns += 1
        await task
        return turns

    return asyncio.run(measure())


BODIES = {
    "text": b'{"prompt": "' + b"some words " * (MEGABYTES // 11) + b'"}',
    "100k token ids": b'{"prompt": [' + b"54321, " * 100_000 + b"1]}",
    "token ids": b'{"prompt": [' + b"54321," * (MEGABYTES // 6) + b"1]}",
    "lists of token ids": b'{"prompt": [' + (b"[" + b"54321," * 400 + b"1],") * 2000 + b"[1]]}",
}


@pytest.mark.parametrize("kind", BODIES)
def test_a_large_body_is_read_elsewhere(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[int] = []
    truth = parse_in_pieces

    def watched(*given: Any) -> Any:
        threads.append(threading.get_ident())
        return truth(*given)

    monkeypatch.setattr(bodies, "parse_in_pieces", watched)
    monkeypatch.setattr(bodies, "parse", lambda *given: pytest.fail("read on the event loop"))
    turns = turns_during(lambda: BodyReader().read(body_of(BODIES[kind]), CompletionRequest))
    assert threads
    assert threading.get_ident() not in threads
    if kind in ("token ids", "lists of token ids"):  # The others take too little time to have turns in.
        assert turns > 4


def test_reading_on_the_loop_would_be_seen() -> None:
    """The measure itself has teeth."""
    reader = BodyReader(inline_bytes=10 * MEGABYTES)
    body = BODIES["lists of token ids"]
    turns = turns_during(lambda: reader.read(body_of(body), CompletionRequest))
    assert turns <= 2


def test_one_large_body_at_a_time_and_small_ones_beside_it() -> None:
    reader = BodyReader(inline_bytes=100)
    running, most = 0, 0
    truth = parse_in_pieces

    def watched(*given: Any) -> Any:
        nonlocal running, most
        running += 1
        most = max(most, running)
        time.sleep(0.005)
        running -= 1
        return truth(*given)

    async def read_all() -> list[Any]:
        large = b'{"prompt": "' + b"x" * 200 + b'"}'
        sent = [large] * 5 + [b'{"prompt": "x"}']
        return await asyncio.gather(*(reader.read(body_of(each), CompletionRequest) for each in sent))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bodies, "parse_in_pieces", watched)
        found = asyncio.run(read_all())
    assert [len(request.prompt[0]) for request in found] == [200] * 5 + [1]
    assert most == 1


def test_what_piled_up_is_handled_in_parts_with_turns_in_between() -> None:
    """A client that did not read for a while gets what it missed, and others are not kept waiting for it.

    Of one choice what piles up does so in the engine's inbox, whose own tests are with the engine's.
    """
    engine = FakeEngine(answer=b"x" * 3000, tokens_per_step=1, max_model_len=9999)

    async def run() -> tuple[list[int], list[int]]:
        sizes: list[int] = []
        turns_before: list[int] = []
        turns = 0

        async def tick() -> None:
            nonlocal turns
            while True:
                await asyncio.sleep(0)
                turns += 1

        choices = make_choices("call", 0, 2, (1, 2), SamplingParams())
        ticking = asyncio.ensure_future(tick())
        async for batch in generate(engine, choices):
            if not sizes:
                await asyncio.sleep(0.3)  # It does not read; the engine goes on.
            sizes.append(len(batch))
            turns_before.append(turns)
        ticking.cancel()
        return sizes, turns_before

    sizes, turns = asyncio.run(run())
    assert sum(sizes) == 6000
    assert max(sizes) == MAX_BATCH, "much has piled up, and none of it came in one go"
    assert all(later > earlier for earlier, later in pairwise(turns))


class FullEngine(FakeEngine):
    """Whatever is asked of it, it has said long ago."""

    async def generate(
        self, request_id: str, prompt_token_ids: Sequence[int], params: SamplingParams
    ) -> AsyncGenerator[list[RequestOutput], None]:
        request = FakeRequest(request_id, tuple(prompt_token_ids), params)
        outputs = list(self._outputs(request))
        for start in range(0, len(outputs), MAX_BATCH):
            yield outputs[start : start + MAX_BATCH]


def test_one_choice_gives_turns_as_well() -> None:
    engine = FullEngine(answer=b"x" * 1000, tokens_per_step=1, max_model_len=9999)
    [choice] = make_choices("call", 0, 1, (1, 2), SamplingParams())

    async def run() -> list[int]:
        ticks = 0

        def tick() -> None:
            nonlocal ticks
            ticks += 1
            loop.call_soon(tick)

        loop = asyncio.get_running_loop()
        loop.call_soon(tick)
        return [ticks async for _ in generate(engine, [choice])]

    turns = asyncio.run(run())
    assert len(turns) == 8
    assert all(later > earlier for earlier, later in pairwise(turns))


def test_a_client_that_reads_nothing_delays_nobody(serve: Serve) -> None:
    engine = FakeEngine(answer=b"y" * 60_000, tokens_per_step=1, max_model_len=100_000)
    served = serve(engine)
    body = json.dumps({"prompt": "x", "max_tokens": 60_000, "stream": True}).encode()
    with socket.create_connection(("127.0.0.1", served.server.port), timeout=10) as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        head = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
        connection.sendall(head.encode() + body)
        deadline = time.monotonic() + 10
        while not engine.active:
            assert time.monotonic() < deadline, "the request never came"
            time.sleep(0.005)
        assert served.http.get("/health").status_code == 200
        answer = served.http.post(COMPLETIONS, json={"prompt": "x", "max_tokens": 20, "stream": True})
        assert sum(len(chunk["choices"][0]["text"]) for chunk in chunks(answer)) == 20


class WatchedEngine(FakeEngine):
    """Notes on which thread messages are made ready for the template."""

    async def apply_chat_template(
        self,
        messages: Sequence[ChatMessage],
        tools: Sequence[ChatMessage] = (),
        options: ChatOptions = DEFAULT_CHAT,
    ) -> list[int]:
        self.loop_thread = threading.get_ident()
        return [1]


def test_conversations_are_made_ready_elsewhere(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = WatchedEngine()
    served = serve(engine)
    threads: list[int] = []
    truth = ToolPlanner.conversation

    def watched(self: ToolPlanner, *given: Any) -> Any:
        threads.append(threading.get_ident())
        return truth(self, *given)

    monkeypatch.setattr(ToolPlanner, "conversation", watched)
    messages = [{"role": "user", "content": "x"}] * 20_000
    answer = served.http.post(CHAT, json={"messages": messages, "max_tokens": 2})
    assert answer.status_code == 200
    assert threads
    assert engine.loop_thread not in threads


@pytest.mark.parametrize(
    ("endpoint", "field", "value", "param"),
    [
        (
            CHAT,
            "response_format",
            {"type": "json_schema", "json_schema": {"name": "s", "schema": {"enum": ["abc"] * 30_000}}},
            "response_format.json_schema.schema",
        ),
        (COMPLETIONS, "structured_outputs", {"choice": ["abc"] * 30_000}, "structured_outputs.choice"),
        (COMPLETIONS, "structured_outputs", {"regex": "a" * 140_000}, "structured_outputs.regex"),
        (COMPLETIONS, "structured_outputs", {"grammar": "a" * 140_000}, "structured_outputs.grammar"),
        (COMPLETIONS, "structured_outputs", {"json": {"const": "a" * 140_000}}, "structured_outputs.json"),
        (
            CHAT,
            "tools",
            [{"type": "function", "function": {"name": "f", "parameters": {"x": ["abc"] * 30_000}}}],
            "tools[0].function.parameters",
        ),
    ],
)
def test_formats_that_would_take_long_to_compile_are_refused(
    served: Served, endpoint: str, field: str, value: Any, param: str
) -> None:
    good = {"prompt": "x"} if endpoint == COMPLETIONS else {"messages": [{"role": "user", "content": "x"}]}
    answer = served.http.post(endpoint, json={**good, field: value})
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["param"] == param
    assert str(MAX_CHARACTERS) in error["message"]
