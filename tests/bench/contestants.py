"""Those who are compared in tests.bench.peers: servers behind HTTP, and engines in child processes."""

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import httpx

from server.bench.asking import CHAT, COMPLETIONS, Question
from server.bench.client import BenchClient, model_name
from server.bench.load import Timer, run_closed
from server.bench.local import end
from server.bench.prompts import Prompt

START_SECONDS = 600


@dataclass(frozen=True, slots=True)
class Timing:
    """What answers took.

    Attributes:
        first: Seconds to the first token; of several answers the longest.
        seconds: Seconds in all.
        tokens: Tokens written.
    """

    first: float
    seconds: float
    tokens: int

    @property
    def decode_speed(self) -> float:
        """Tokens per second after the first one."""
        return (self.tokens - 1) / (self.seconds - self.first)

    @property
    def total_speed(self) -> float:
        """Tokens per second, the reading of prompts included."""
        return self.tokens / self.seconds


class Contestant(Protocol):
    """Somebody who writes tokens."""

    name: str

    def answer(self, prompts: Sequence[Prompt], tokens: int) -> Timing:
        """Answers all prompts at once, greedily, with so many tokens each."""


class Failed(Exception):
    """A contestant did not start, or did not answer."""


class HttpContestant:
    """A server with OpenAI's API.

    Args:
        name: What tables call it.
        url: The API's root.
        extra: Keys of every request.
    """

    def __init__(self, name: str, url: str, extra: Mapping[str, Any]) -> None:
        self.name = name
        self._url = url
        self._extra = {"ignore_eos": True, "temperature": 0, **extra}

    def answer(self, prompts: Sequence[Prompt], tokens: int) -> Timing:
        """See Contestant."""
        return asyncio.run(self._answer(prompts, tokens))

    async def _answer(self, prompts: Sequence[Prompt], tokens: int) -> Timing:
        async with httpx.AsyncClient(base_url=self._url, timeout=600, trust_env=False) as http:
            client = BenchClient(http, self.name, await model_name(http), self._extra)
            questions = [Question(prompt, *_body(prompt, tokens)) for prompt in prompts]
            run = await run_closed(client, questions, len(questions), lambda record: None, Timer())
        for record in run.records:
            if record.error is not None:
                raise Failed(f"{self.name}: {record.error}")
        first = max(record.ttft or 0.0 for record in run.records)
        return Timing(first, run.seconds, sum(record.num_tokens for record in run.records))


class ChildContestant:
    """An engine behind tests/bench/peer_child.py.

    Args:
        name: What tables call it.
        process: The child, which has said that it is ready.
    """

    def __init__(self, name: str, process: "subprocess.Popen[bytes]") -> None:
        self.name = name
        self._process = process

    def answer(self, prompts: Sequence[Prompt], tokens: int) -> Timing:
        """See Contestant."""
        texts = [prompt.text if prompt.messages is None else list(prompt.messages) for prompt in prompts]
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None
        assert stdout is not None
        stdin.write(json.dumps({"prompts": texts, "tokens": tokens}).encode() + b"\n")
        stdin.flush()
        line = stdout.readline()
        if not line:
            raise Failed(f"{self.name}: the child process ended; its last words are above")
        return Timing(**json.loads(line))


def _body(prompt: Prompt, tokens: int) -> tuple[str, dict[str, Any]]:
    content: dict[str, Any] = {"max_tokens": tokens}
    if prompt.messages is None:
        return COMPLETIONS, {"prompt": prompt.text, **content}
    return CHAT, {"messages": list(prompt.messages), **content}


@contextmanager
def llama_server(binary: Path, model: Path, threads: int, slots: int, more: Sequence[str]) -> Iterator[str]:
    """llama.cpp's server with so many slots of 4096 tokens; yields its API's root.

    Raises:
        Failed: It does not start.
    """
    port = _free_port()
    command = [str(binary), "-m", str(model), "-t", str(threads), "-tb", str(threads)]
    command += ["--host", "127.0.0.1", "--port", str(port), "--alias", "m"]
    command += ["-np", str(slots), "-c", str(4096 * slots), *more]
    environment = os.environ | {"LD_LIBRARY_PATH": str(binary.parent)}
    process = subprocess.Popen(
        command,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        _wait_until_healthy(f"http://127.0.0.1:{port}/health", process, command)
        yield f"http://127.0.0.1:{port}/v1/"
    finally:
        end(process)


@contextmanager
def child(name: str, engine: str, python: str, model: Path, threads: int) -> Iterator[ChildContestant]:
    """An engine of another Python.

    Raises:
        Failed: It does not start.
    """
    script = Path(__file__).with_name("peer_child.py")
    process = subprocess.Popen(
        [python, str(script), engine, str(model), str(threads)],
        env=os.environ | {"OMP_NUM_THREADS": str(threads)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,
    )
    try:
        assert process.stdout is not None
        if not process.stdout.readline():
            raise Failed(f"{name}: {python} could not start it; its last words are above")
        yield ChildContestant(name, process)
    finally:
        end(process)


def own_python() -> str:
    """The Python that runs this, which has transformers."""
    return sys.executable


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port


def _wait_until_healthy(url: str, process: "subprocess.Popen[bytes]", command: Sequence[str]) -> None:
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise Failed(f"it ended with status {process.returncode} while it started: {' '.join(command)}")
        try:
            if httpx.get(url, trust_env=False).status_code == 200:
                return
        except httpx.TransportError:
            time.sleep(0.2)
    process.send_signal(signal.SIGKILL)
    raise Failed(f"it was not ready after {START_SECONDS} seconds: {' '.join(command)}")
