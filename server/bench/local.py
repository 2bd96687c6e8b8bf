"""A server of the benchmark's own, in a process of its own."""

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import IO, NoReturn

import httpx

from engine.errors import StartupError
from server.options import flag_of

SERVE = (sys.executable, "-c", "import sys; from server.cli import main; sys.exit(main())", "serve")
_POLL_SECONDS = 0.2
END_SECONDS = 30
_LOG_LINES = 20


@contextmanager
def local_server(
    settings: Mapping[str, object], config: str | None, say: Callable[[str], None]
) -> Iterator[str]:
    """Runs `outrider serve` on a free port of 127.0.0.1 while the block runs.

    Args:
        settings: Settings by flat name.
        config: Path of a YAML file with more.
        say: Told what goes on.

    Yields:
        Its address, once it takes requests.

    Raises:
        StartupError: It ended before that; the message has the end of its log.
    """
    port = _free_port()
    flags = {**settings, "host": "127.0.0.1", "port": port}
    command = [*SERVE, *([] if config is None else ["--config", config]), *_arguments(flags)]
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as log:
        # A session of its own: Ctrl+C is for the benchmark, which then ends the server.
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
        )
        previous = signal.signal(signal.SIGTERM, _leave)
        try:
            say(f"starting outrider serve {' '.join(_arguments(settings))}".rstrip())
            url = f"http://127.0.0.1:{port}"
            _wait_until_ready(url, process, log)
            yield url
        finally:
            signal.signal(signal.SIGTERM, previous)
            end(process)


def _leave(number: int, _: object) -> NoReturn:
    """Ends the benchmark by an exception, so that it takes its server along."""
    sys.exit(128 + number)


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port


def _arguments(settings: Mapping[str, object]) -> list[str]:
    """Settings as flags."""
    arguments = []
    for name, value in settings.items():
        if isinstance(value, bool):
            arguments.append(flag_of(name) if value else flag_of(f"no_{name}"))
        else:
            arguments.append(f"{flag_of(name)}={value}")
    return arguments


def _wait_until_ready(url: str, process: "subprocess.Popen[bytes]", log: IO[str]) -> None:
    with httpx.Client(trust_env=False) as http:
        while True:
            if process.poll() is not None:
                log.seek(0)
                tail = "".join(log.readlines()[-_LOG_LINES:]).rstrip()
                raise StartupError(f"the server ended while it started:\n{tail}")
            # While it is loading nobody listens.
            with suppress(httpx.TransportError):
                if http.get(f"{url}/ready").status_code == 200:
                    return
            time.sleep(_POLL_SECONDS)


def end(process: "subprocess.Popen[bytes]") -> None:
    """Asks a process to end, and after a while no longer asks."""
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(END_SECONDS)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
