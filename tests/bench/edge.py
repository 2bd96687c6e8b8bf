"""Does the server stay awake while many streams run? Latency of /health under a load of made-up tokens.

    python -m tests.bench.edge [--streams 64] [--tokens-per-second 2000] [--seconds 10]
                               [--python-share 0.2] [--switch-ms 1]

Three processes, so that nobody measures himself: a server whose engine is a thread that hands every stream a
token per step, all at once as a batch does; a client that reads the streams; and this one, which asks for
/health every 10 ms. `--python-share` is the part of a step in which the engine's thread runs Python, and so
holds the interpreter's lock against the event loop; `--switch-ms` is how soon it has to give it up (Python's
default is 5).
"""

import argparse
import asyncio
import http.client
import json
import subprocess
import sys
import threading
import time
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from engine.outputs import RequestOutput
from engine.sampling_params import SamplingParams
from server.app import AppSettings, create_app
from server.bench.statistics import Distribution
from server.listening import SWITCH_SECONDS
from tests.fakes import FakeEngine, FakeRequest
from tests.server.conftest import new_metrics
from tests.server.running import running_server

_PROBE_SECONDS = 0.01
_MANY_TOKENS = 1_000_000


@dataclass
class SteppedEngine(FakeEngine):
    """A fake engine with a thread: a step brings a token for every stream, in one call to the event loop."""

    python_share: float = 0.0
    inboxes: "dict[str, asyncio.Queue[None]]" = field(default_factory=dict)

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        threading.Thread(target=self._steps, args=(loop,), daemon=True).start()

    def _steps(self, loop: asyncio.AbstractEventLoop) -> None:
        due = time.perf_counter()
        while True:
            due += self.step_seconds
            busy_until = time.perf_counter() + self.python_share * self.step_seconds
            while time.perf_counter() < busy_until:
                pass
            time.sleep(max(0.0, due - time.perf_counter()))
            loop.call_soon_threadsafe(self._deliver)

    def _deliver(self) -> None:
        for inbox in self.inboxes.values():
            inbox.put_nowait(None)

    async def generate(
        self, request_id: str, prompt_token_ids: Sequence[int], params: SamplingParams
    ) -> AsyncGenerator[list[RequestOutput], None]:
        if not self.inboxes:
            self.start(asyncio.get_running_loop())
        inbox = self.inboxes[request_id] = asyncio.Queue()
        for output in self._outputs(FakeRequest(request_id, tuple(prompt_token_ids), params)):
            await inbox.get()
            yield [output]


def main() -> None:
    options = parse()
    if options.role == "serve":
        serve(options)
    elif options.role == "load":
        asyncio.run(load(options))
    else:
        report(options)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.edge", description=__doc__.split("\n")[0])
    parser.add_argument("role", nargs="?", choices=("report", "serve", "load"), default="report")
    parser.add_argument("--url", default="")
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--tokens-per-second", type=float, default=2000, help="of all streams together")
    parser.add_argument("--seconds", type=float, default=10)
    parser.add_argument("--python-share", type=float, default=0.0)
    parser.add_argument("--switch-ms", type=float, default=1000 * SWITCH_SECONDS)
    return parser.parse_args()


def serve(options: argparse.Namespace) -> None:
    """Serves until its input closes; says its URL, and at the end the processor time it took."""
    engine = SteppedEngine(
        answer=b"tokens and " * (_MANY_TOKENS // 11),
        tokens_per_step=1,
        step_seconds=options.streams / options.tokens_per_second,
        max_model_len=2 * _MANY_TOKENS,
        python_share=options.python_share,
    )
    sys.setswitchinterval(options.switch_ms / 1000)
    app = create_app(engine, AppSettings(), new_metrics(engine))
    with running_server(app) as server:
        sys.stdout.write(f"{server.url}\n")
        sys.stdout.flush()
        sys.stdin.readline()
        before = time.process_time()
        sys.stdin.readline()
        sys.stdout.write(f"{time.process_time() - before}\n")
        sys.stdout.flush()
        sys.stdin.read()


async def load(options: argparse.Namespace) -> None:
    """Reads the streams until killed; says how many events came, once a second."""
    address = urlsplit(options.url)
    host, port = str(address.hostname), address.port
    body = json.dumps({"messages": [{"role": "user", "content": "go on"}], "stream": True}).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n".encode()
    num_events = 0

    async def read() -> None:
        nonlocal num_events
        reader, writer = await asyncio.open_connection(host, port)
        writer.write(head + body)
        while part := await reader.read(65536):
            num_events += part.count(b"data:")

    streams = [asyncio.create_task(read()) for _ in range(options.streams)]
    while not any(stream.done() for stream in streams):
        before, began = num_events, time.perf_counter()
        await asyncio.sleep(1)
        sys.stdout.write(f"{(num_events - before) / (time.perf_counter() - began)}\n")
        sys.stdout.flush()
    raise SystemExit("a stream ended")


def report(options: argparse.Namespace) -> None:
    flags = [
        f"--streams={options.streams}",
        f"--tokens-per-second={options.tokens_per_second}",
        f"--python-share={options.python_share}",
        f"--switch-ms={options.switch_ms}",
    ]
    server = start("edge", "serve", *flags)
    loader = None
    try:
        url = line(server)
        idle = probe(url, 2)
        loader = start("edge", "load", *flags, f"--url={url}")
        for _ in range(3):
            line(loader)
        tell(server)
        began = time.perf_counter()
        times = probe(url, options.seconds)
        tell(server)
        busy = float(line(server)) / (time.perf_counter() - began)
        rates = [float(line(loader)) for _ in range(int(options.seconds))]
    finally:
        for process in filter(None, (loader, server)):
            process.kill()
            process.communicate()
    show("idle", idle)
    show(f"{options.streams} streams", times)
    sys.stdout.write(
        f"{sum(rates) / len(rates):.0f} tokens/s read, {busy:.0%} of a core taken by the server\n"
    )


def start(module: str, *flags: str) -> "subprocess.Popen[str]":
    """A module of this folder in a process of its own."""
    command = [sys.executable, "-m", f"tests.bench.{module}", *flags]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def tell(process: "subprocess.Popen[str]") -> None:
    assert process.stdin
    process.stdin.write("\n")
    process.stdin.flush()


def line(process: "subprocess.Popen[str]") -> str:
    assert process.stdout
    said = process.stdout.readline().strip()
    if not said:
        raise SystemExit(f"{process.args!r} ended")
    return said


def probe(url: str, seconds: float) -> list[float]:
    """Round trips of GET /health on a kept connection."""
    connection = http.client.HTTPConnection(str(urlsplit(url).netloc))
    times = []
    end = time.perf_counter() + seconds
    while (began := time.perf_counter()) < end:
        connection.request("GET", "/health")
        answer = connection.getresponse()
        answer.read()
        assert answer.status == 200
        times.append(time.perf_counter() - began)
        time.sleep(_PROBE_SECONDS)
    connection.close()
    return times


def show(name: str, times: Sequence[float]) -> None:
    found = Distribution.of(times)
    assert found is not None
    sys.stdout.write(
        f"{name:>12}: /health p50 {1000 * found.p50:.1f} ms, p90 {1000 * found.p90:.1f} ms, "
        f"p99 {1000 * found.p99:.1f} ms, at most {1000 * found.largest:.1f} ms ({found.count} probes)\n"
    )


if __name__ == "__main__":
    main()
