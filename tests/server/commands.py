"""The real command in a process of its own."""

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

LISTENING = re.compile(r"listening on (http://127\.0\.0\.1:\d+)")


@dataclass(slots=True)
class Command:
    """A running `outrider serve`.

    Attributes:
        process: The process.
        lines: What it has said on stderr so far.
        url: Where it listens, once it said so.
    """

    process: "subprocess.Popen[str]"
    lines: list[str] = field(default_factory=list)
    url: str = ""

    @property
    def log(self) -> str:
        return "".join(self.lines)

    def wait_until_listening(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while not (found := LISTENING.search(self.log)):
            assert self.process.poll() is None, f"the server ended:\n{self.log}"
            assert time.monotonic() < deadline, f"the server does not listen after {seconds} s:\n{self.log}"
            time.sleep(0.05)
        self.url = found.group(1)

    def end(self, seconds: float = 30) -> int:
        """Sends SIGTERM and waits for the end; the exit status."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        return self.process.wait(seconds)


@contextmanager
def outrider_serve(*flags: str, start_seconds: float = 120, **environment: str) -> Iterator[Command]:
    """Starts the command on a free port and waits until it listens."""
    process = subprocess.Popen(
        [sys.executable, "-c", "from server.cli import main; main()", "serve", "--port", "0", *flags],
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        text=True,
        env={**os.environ, **environment},
    )
    assert process.stderr is not None
    command = Command(process)
    reader = threading.Thread(target=command.lines.extend, args=(process.stderr,), daemon=True)
    reader.start()
    try:
        command.wait_until_listening(start_seconds)
        yield command
    finally:
        if process.poll() is None:
            process.kill()
        process.wait(20)
        reader.join(20)
        process.stderr.close()
