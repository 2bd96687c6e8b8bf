"""An OpenAI-compatible server with its timing written down: its own clock, no socket, no waiting."""

import json
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx

from server.bench.asking import Question, Wishes, make_question
from server.bench.client import BenchClient
from server.bench.load import Timer
from server.bench.prompts import Prompt
from server.bench.records import Record


@dataclass(slots=True)
class ScriptedClock:
    """A clock that moves when something takes time."""

    now: float = 100.0

    def __call__(self) -> float:
        return self.now

    async def sleep(self, seconds: float) -> None:
        self.now += seconds

    @property
    def timer(self) -> Timer:
        return Timer(self, self.sleep)


@dataclass(frozen=True, slots=True)
class Answer:
    """What to say: after how many seconds which bytes."""

    parts: Sequence[tuple[float, bytes]]
    status: int = 200


Script = Callable[[dict[str, Any]], Answer]


@dataclass(slots=True)
class ScriptedServer(httpx.AsyncBaseTransport):
    """Answers POSTs by a script of the request's body, and lists one model.

    Attributes:
        script: From a request's body to the answer.
        clock: Moved by the parts' seconds.
        bodies: What was asked, in order, with the path under "path".
    """

    script: Script
    clock: ScriptedClock = field(default_factory=ScriptedClock)
    bodies: list[dict[str, Any]] = field(default_factory=list)

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        if request.method == "GET":
            return httpx.Response(200, json={"data": [{"id": "scripted"}]})
        body = json.loads(await request.aread())
        self.bodies.append({"path": request.url.path, **body})
        answer = self.script(body)
        return httpx.Response(answer.status, stream=_Stream(answer, self.clock))

    def client(self, label: str = "scripted", **extra: Any) -> BenchClient:
        http = httpx.AsyncClient(base_url="http://scripted/v1/", transport=self)
        return BenchClient(http, label, "scripted", extra, self.clock)


class _Stream(httpx.AsyncByteStream):
    def __init__(self, answer: Answer, clock: ScriptedClock) -> None:
        self._answer = answer
        self._clock = clock

    async def __aiter__(self) -> AsyncIterator[bytes]:
        for seconds, part in self._answer.parts:
            self._clock.now += seconds
            yield part


def event(value: object) -> bytes:
    return f"data: {json.dumps(value)}\n\n".encode()


def text(piece: str, finish_reason: str | None = None) -> bytes:
    """A chat chunk."""
    return event({"choices": [{"index": 0, "delta": {"content": piece}, "finish_reason": finish_reason}]})


def usage(completion_tokens: int, **more: object) -> bytes:
    return event(
        {"choices": [], "usage": {"prompt_tokens": 5, "completion_tokens": completion_tokens}, **more}
    )


DONE = b"data: [DONE]\n\n"


def steady(pieces: Sequence[str], first: float, gap: float, *after: bytes) -> Answer:
    """Pieces at even distances, the first one after `first` seconds."""
    parts = [(gap if index else first, text(piece)) for index, piece in enumerate(pieces)]
    return Answer([*parts, (0.0, text("", "length")), *((0.0, part) for part in after), (0.0, DONE)])


def question(name: str = "sky", kind: str = "chat", said: str = "why?", number: int = 0) -> Question:
    prompt = Prompt(name, kind, ({"role": "user", "content": said},), said)
    return make_question(prompt, number, Wishes(max_tokens=16))


def record(prompt: str = "sky", seconds: float = 1.0, **fields: Any) -> Record:
    given = {"kind": "chat", "sent": 0.0, "late": 0.0, **fields}
    return Record(prompt=prompt, seconds=seconds, **given)
