"""The server's resident memory while it answers many short requests, and its peak, against what it should be.

    python -m tests.bench.memory [--requests 2000] [--model M] [--kv-cache-gb 0.5]

Starts the server twice: the first start packs the weights if no earlier one did, the second reads them as
they are kept and answers the requests. The bound of both is packed weights + KV pool + 1 GB. Linux only.

What is resident grows until every block of the pool has held something; from there on it has to be flat.
"""

import argparse
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx

from engine.config import ModelConfig

GB = 10**9
CONCURRENCY = 8
_LISTENING = re.compile(r"listening on (http://127\.0\.0\.1:\d+)")
_PACKED = re.compile(r"packed weights (?:read from|kept in) (\S+)")


@dataclass(slots=True)
class Server:
    """A server that answers.

    Attributes:
        pid: Its process.
        url: Its address.
        packed: Where its packed weights are kept.
        seconds: How long it took to start.
    """

    pid: int
    url: str
    packed: Path
    seconds: float

    def memory(self, field: str) -> int:
        """VmRSS or VmHWM, in bytes."""
        for line in Path(f"/proc/{self.pid}/status").read_text().splitlines():
            if line.startswith(f"{field}:"):
                return int(line.split()[1]) * 1024
        raise ValueError(f"the system does not tell {field}")


def main() -> None:
    """Prints resident memory along the way, and whether the peak keeps within its bound."""
    options = parse()
    pool = round(options.kv_cache_gb * 2**30)
    with running(options) as server:
        first, seconds = server.memory("VmHWM"), server.seconds
        say(f"first start: {seconds:.1f} s, peak {first / GB:.2f} GB (it packs, if no earlier start did)")
    with running(options) as server:
        weights = sum(file.stat().st_size for file in server.packed.iterdir())
        say(f"second start: {server.seconds:.1f} s, peak {server.memory('VmHWM') / GB:.2f} GB")
        for done in ask(server, options.requests):
            say(f"{done:6} requests  resident {server.memory('VmRSS') / 1e6:7.1f} MB")
        peak = server.memory("VmHWM")
    bound = weights + pool + GB
    say(
        f"packed weights {weights / GB:.2f} GB + KV pool {pool / GB:.2f} GB + 1 GB = {bound / GB:.2f} GB; "
        f"peak of the first start {verdict(first, bound)}, of the second {verdict(peak, bound)}"
    )


def verdict(peak: int, bound: int) -> str:
    """A peak, and whether it keeps within its bound."""
    return f"{peak / GB:.2f} GB, {'within' if peak <= bound else 'BEYOND'}"


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench.memory", description=__doc__.split("\n")[0])
    parser.add_argument("--model", default=ModelConfig().model)
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--kv-cache-gb", type=float, default=0.5)
    parser.add_argument("--max-model-len", type=int, default=2048)
    return parser.parse_args()


@contextmanager
def running(options: argparse.Namespace) -> Iterator[Server]:
    """A server of the model, until the block ends."""
    settings = {
        "--model": options.model,
        "--kv-cache-gb": str(options.kv_cache_gb),
        "--max-model-len": str(options.max_model_len),
        "--port": "0",
    }
    command = [sys.executable, "-c", "from server.cli import main; main()", "serve", "--offline"]
    began = time.monotonic()
    with subprocess.Popen(
        [*command, *(part for setting in settings.items() for part in setting)],
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"OUTRIDER_LOG_LEVEL": "info"},
    ) as process:
        try:
            url, packed = wait(process)
            # What it says from here on would fill the pipe and stop it.
            with ThreadPoolExecutor(1) as reader:
                assert process.stderr is not None
                reader.submit(process.stderr.read)
                yield Server(process.pid, url, packed, time.monotonic() - began)
                process.send_signal(signal.SIGTERM)
                process.wait(60)
        finally:
            if process.poll() is None:
                process.kill()


def wait(process: "subprocess.Popen[str]") -> tuple[str, Path]:
    """Where a server listens, and where its packed weights lie."""
    packed: Path | None = None
    log = []
    assert process.stderr is not None
    for line in process.stderr:
        log.append(line)
        if (found := _PACKED.search(line)) is not None:
            packed = Path(found[1])
        if (found := _LISTENING.search(line)) is not None and packed is not None:
            return found[1], packed
        if found is not None:
            break
    sys.exit("the server did not start, or packs no weights here:\n" + "".join(log))


def ask(server: Server, count: int) -> Iterator[int]:
    """Sends requests, several at a time, and yields after each tenth of them how many are done."""
    with httpx.Client(base_url=server.url, timeout=600) as client, ThreadPoolExecutor(CONCURRENCY) as pool:

        def one(index: int) -> None:
            text = f"Question {index}: what is {index * 7919 % 1000} plus {index * 31 % 777}?"
            answer = client.post("/v1/completions", json={"prompt": text, "max_tokens": 4, "seed": index})
            answer.raise_for_status()

        share = max(count // 10, 1)
        for begin in range(0, count, share):
            list(pool.map(one, range(begin, min(begin + share, count))))
            yield min(begin + share, count)


def say(line: str) -> None:
    """One line of the report."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
