"""What do large bodies, long prompts and clients that do not read cost everybody else?

    python -m tests.bench.loop [--megabytes 5] [--rounds 3] [--only ids]

A server in a process of its own, with a tokenizer and a chat template at work but no model: a stream hands
out a token every 10 ms. This process reads that stream and asks for /health all the time, while one thing
after the other happens. Said are the longest round trip of /health and the longest time without a token, per
event. The bound is 100 ms.
"""

import argparse
import asyncio
import contextlib
import gc
import http.client
import json
import random
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from urllib.parse import urlsplit

from engine.chat_options import DEFAULT_CHAT, ChatOptions
from engine.client import ChatMessage
from engine.tokenizer import Tokenizer
from server.app import AppSettings, create_app
from server.listening import SWITCH_SECONDS
from tests.bench.edge import line
from tests.fakes import FakeEngine
from tests.server.conftest import new_metrics
from tests.server.running import running_server
from tests.tiny import byte_tokenizer

_TOKENS_PER_SECOND = 100
_COMPLETIONS, _CHAT = "/v1/completions", "/v1/chat/completions"


@dataclass
class TokenizingEngine(FakeEngine):
    """A fake engine with a tokenizer, used in worker threads as AsyncEngine does."""

    tokenizer: Tokenizer = field(default_factory=lambda: Tokenizer(byte_tokenizer()))

    async def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return await asyncio.to_thread(self.tokenizer.encode, text, add_special_tokens=add_special_tokens)

    async def apply_chat_template(
        self,
        messages: Sequence[ChatMessage],
        tools: Sequence[ChatMessage] = (),
        options: ChatOptions = DEFAULT_CHAT,
    ) -> list[int]:
        return await asyncio.to_thread(self.tokenizer.apply_chat_template, messages, tools, options)


def serve() -> None:
    """Serves until its input closes."""
    engine = TokenizingEngine(
        answer=b"tokens and " * 10_000,
        tokens_per_step=1,
        step_seconds=1 / _TOKENS_PER_SECOND,
        max_model_len=200_000,
    )
    sys.setswitchinterval(SWITCH_SECONDS)
    gc.freeze()
    with running_server(create_app(engine, AppSettings(), new_metrics(engine))) as server:
        sys.stdout.write(f"{server.url}\n")
        sys.stdout.flush()
        sys.stdin.read()


class Watch:
    """Asks for /health and reads a stream, in threads; remembers the longest waits."""

    def __init__(self, url: str) -> None:
        self._address = str(urlsplit(url).netloc)
        self._ends = threading.Event()
        self.health = self.stream = 0.0
        self._threads = [threading.Thread(target=work) for work in (self._ask, self._read)]

    def __enter__(self) -> "Watch":
        for thread in self._threads:
            thread.start()
        time.sleep(0.3)
        self.health = self.stream = 0.0
        return self

    def __exit__(self, *_: object) -> None:
        self._ends.set()
        for thread in self._threads:
            thread.join()

    def _ask(self) -> None:
        connection = http.client.HTTPConnection(self._address)
        while not self._ends.is_set():
            began = time.perf_counter()
            connection.request("GET", "/health")
            connection.getresponse().read()
            self.health = max(self.health, time.perf_counter() - began)
            time.sleep(0.005)
        connection.close()

    def _read(self) -> None:
        connection = http.client.HTTPConnection(self._address)
        connection.request(
            "POST", _COMPLETIONS, json.dumps({"prompt": "x", "max_tokens": 90000, "stream": True})
        )
        answer = connection.getresponse()
        last = time.perf_counter()
        while not self._ends.is_set():
            answer.readline()
            now = time.perf_counter()
            self.stream, last = max(self.stream, now - last), now
        connection.close()


def post(url: str, path: str, body: bytes) -> None:
    """Sends a request and waits for its answer, whatever it is."""
    connection = http.client.HTTPConnection(str(urlsplit(url).netloc))
    connection.request("POST", path, body)
    connection.getresponse().read()
    connection.close()


def read_late(url: str) -> None:
    """Streams from an engine, reads nothing for a while and then all of it."""
    address = urlsplit(url)
    asked = {"prompt": ["x"] * 8, "n": 128, "max_tokens": 200, "stream": True}
    body = json.dumps(asked).encode()
    with socket.create_connection((str(address.hostname), int(address.port or 0))) as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        head = f"POST {_COMPLETIONS} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
        connection.sendall(head.encode() + body)
        time.sleep(4)
        rest = b""
        while b"[DONE]" not in rest:
            rest = rest[-8:] + connection.recv(1 << 16)


def events(megabytes: float) -> Iterator[tuple[str, Callable[[str], None]]]:
    """What may happen, by name."""
    size = int(megabytes * 2**20)
    chance = random.Random(0)

    def ids(count: int) -> str:
        return ",".join(str(chance.randrange(256)) for _ in range(count))

    def messages(count: int, text: str) -> str:
        return ",".join([json.dumps({"role": "user", "content": text})] * count)

    prompts = ",".join([f"[{ids(size // 3600)}]"] * 1000)
    keys = ",".join(f'"k{number}":1' for number in range(size // 12))
    biases = ",".join(f'"{number}":1' for number in range(size // 11))
    bodies = {
        "nothing": '"prompt": "x"',
        "a body of text": f'"prompt": "{"some words " * (size // 11)}"',
        "100k tokens as text": f'"prompt": "{"some words " * 9091}"',
        "100k tokens as ids": f'"prompt": [{ids(100_000)}]',
        "100k tokens in a chat": f'"messages": [{messages(1, "words " * 16667)}]',
        "a body of ids": f'"prompt": [{ids(size * 2 // 7)}]',
        "a body of prompts": f'"prompt": [{prompts}]',
        "60k messages": f'"messages": [{messages(60_000, "hello")}]',
        "a body of messages": f'"messages": [{messages(size // 36, "x")}]',
        "a body of empty lists": f'"prompt": "x", "x": [{",".join(["[]"] * (size // 3))}]',
        "a body of keys": f'"prompt": "x", {keys}',
        "a body of biases": f'"prompt": "x", "logit_bias": {{{biases}}}',
        "a body of broken JSON": f'"prompt": [{",".join("1" * (size // 2))},',
    }
    for name, fields in bodies.items():
        path = _CHAT if "messages" in fields[:12] else _COMPLETIONS
        yield name, partial(post, path=path, body=f'{{"max_tokens": 1, {fields}}}'.encode())
    yield "a client that reads late", read_late


def report(options: argparse.Namespace) -> None:
    command = [sys.executable, "-m", "tests.bench.loop", "--serve"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as server:
        url = line(server)
        for name, happen in events(options.megabytes):
            if options.only not in name:
                continue
            health = stream = seconds = 0.0
            for _ in range(options.rounds):
                with Watch(url) as watch:
                    began = time.perf_counter()
                    happen(url)
                    seconds = max(seconds, time.perf_counter() - began)
                health, stream = max(health, watch.health), max(stream, watch.stream)
            sys.stdout.write(
                f"{name:>26}: {seconds:5.1f} s, /health at most {1000 * health:4.0f} ms, "
                f"a stream's token after at most {1000 * stream:4.0f} ms\n"
            )
            sys.stdout.flush()
        with contextlib.suppress(BrokenPipeError):
            server.kill()


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.loop", description=__doc__.split("\n")[0])
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--megabytes", type=float, default=5)
    parser.add_argument("--only", default="", help="events whose names have this in them")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    if options.serve:
        serve()
    else:
        report(options)


if __name__ == "__main__":
    main()
