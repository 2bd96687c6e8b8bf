"""The web server around the app: addresses, signals, the end."""

import asyncio
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import httpx
import pytest

from engine.errors import StartupError
from server import listening
from server.listening import LAST_WORDS_SECONDS, SWITCH_SECONDS, Stopping, bind, run_app

# A server whose answer comes in two parts, a pause between them; `closed` is printed after uvicorn's end.
SCRIPT = """
import asyncio, sys
from server.listening import Stopping, bind, run_app
from server.log_setup import configure_logging

async def app(scope, receive, send):
    if scope["type"] == "lifespan":
        await receive()
        await send({"type": f"lifespan.startup.{sys.argv[2]}"})
        await receive()
        await send({"type": "lifespan.shutdown.complete"})
        return
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"first ", "more_body": True})
    try:
        await asyncio.wait_for(ended.wait(), float(scope["path"].strip("/") or 0))
        last = b"cut"
    except TimeoutError:
        last = b"last"
    await send({"type": "http.response.body", "body": last})

def refuse():
    print("stopping", flush=True)

def end():
    print("ending", flush=True)
    if sys.argv[3] == "obey":
        ended.set()

configure_logging("info")
ended = asyncio.Event()
with bind("127.0.0.1", 0) as listener:
    print(listener.getsockname()[1], flush=True)
    try:
        run_app(app, listener, Stopping(int(sys.argv[1]), refuse, end))
    except KeyboardInterrupt:
        print("interrupted", flush=True)
print("closed", flush=True)
"""


@contextmanager
def running(grace_seconds: int, ending: str = "obey") -> Iterator[tuple[subprocess.Popen[str], str]]:
    process = subprocess.Popen(
        [sys.executable, "-c", SCRIPT, str(grace_seconds), "complete", ending],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout
        port = int(process.stdout.readline())
        deadline = time.monotonic() + 20
        while time.monotonic() < deadline:
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    break
            time.sleep(0.02)
        yield process, f"http://127.0.0.1:{port}"
    finally:
        if process.poll() is None:
            process.kill()
        process.communicate()


def stream_while_stopping(process: subprocess.Popen[str], url: str, stop: signal.Signals) -> list[bytes]:
    """The parts of one streamed answer, the signal being sent after the first of them."""
    parts: list[bytes] = []
    with httpx.stream("GET", url, timeout=10) as response:
        for part in response.iter_raw():
            if not parts:
                process.send_signal(stop)
            parts.append(part)
    return parts


@pytest.mark.parametrize("stop", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_lets_running_answers_finish_and_what_follows_is_still_done(stop: signal.Signals) -> None:
    with running(grace_seconds=10) as (process, url):
        assert b"".join(stream_while_stopping(process, f"{url}/0.5", stop)) == b"first last"
        out, err = process.communicate(timeout=10)
    assert process.returncode == 0
    assert out == "stopping\nclosed\n"
    assert "INFO    server.listening: listening on http://127.0.0.1:" in err
    assert "Traceback" not in err


def test_the_grace_time_has_an_end_and_running_requests_hear_of_it() -> None:
    with running(grace_seconds=1) as (process, url):
        start = time.monotonic()
        assert b"".join(stream_while_stopping(process, f"{url}/60", signal.SIGTERM)) == b"first cut"
        out, err = process.communicate(timeout=10)
    assert 0.9 < time.monotonic() - start < 8
    assert process.returncode == 0
    assert out == "stopping\nending\nclosed\n"
    assert "the grace time is over: 1 requests are ended" in err
    assert "Traceback" not in err


def test_a_request_that_does_not_listen_is_cut_off() -> None:
    with running(grace_seconds=0, ending="ignore") as (process, url):
        start = time.monotonic()
        with pytest.raises(httpx.RemoteProtocolError):
            stream_while_stopping(process, f"{url}/60", signal.SIGTERM)
        out, err = process.communicate(timeout=10)
    assert LAST_WORDS_SECONDS < time.monotonic() - start < 8
    assert process.returncode == 0
    assert out == "stopping\nending\nclosed\n"
    assert "Traceback" not in err


def stop_twice(
    process: subprocess.Popen[str], url: str, first: signal.Signals, second: signal.Signals
) -> None:
    """Two signals during one streamed answer, and new requests between them."""
    assert process.stdout
    with httpx.stream("GET", f"{url}/60", timeout=10) as response:
        for _ in response.iter_raw():
            process.send_signal(first)
            assert process.stdout.readline() == "stopping\n"
            time.sleep(0.3)
            # The app goes on answering, if only to refuse.
            assert httpx.get(url).text == "first last"
            process.send_signal(second)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (signal.SIGINT, signal.SIGINT),
        (signal.SIGTERM, signal.SIGTERM),
        (signal.SIGTERM, signal.SIGINT),
    ],
)
def test_a_second_signal_does_not_wait(first: signal.Signals, second: signal.Signals) -> None:
    with running(grace_seconds=60) as (process, url):
        start = time.monotonic()
        with pytest.raises(httpx.RemoteProtocolError):
            stop_twice(process, url, first, second)
        out, err = process.communicate(timeout=10)
    assert time.monotonic() - start < 8
    assert out == "interrupted\nclosed\n"
    assert "Traceback" not in err
    assert [line for line in err.splitlines() if "WARNING" in line or "ERROR" in line] == [
        line
        for line in err.splitlines()
        if "stopped by a second signal: 1 running requests are cut off" in line
    ]
    assert "cut off" in err


def test_an_app_that_does_not_start_is_a_startup_error() -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, "0", "failed", "obey"],
        capture_output=True,
        text=True,
        check=False,
        timeout=20,
    )
    assert "StartupError: the web application did not start" in done.stderr
    assert "listening on" not in done.stderr


def test_a_taken_address_is_a_startup_error() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(StartupError, match=rf"cannot listen on 127\.0\.0\.1:{port}: .*--port"):
            bind("127.0.0.1", port)


def test_an_unknown_host_is_a_startup_error() -> None:
    with pytest.raises(StartupError, match=r"cannot listen on 203\.0\.113\.1:0"):
        bind("203.0.113.1", 0)


def test_small_writes_are_not_held_back() -> None:
    """Each event of a stream is a small write: with Nagle's algorithm it waits for the last one's ACK."""

    async def accept() -> int:
        accepted: asyncio.Future[int] = asyncio.get_running_loop().create_future()

        class Accepting(asyncio.Protocol):
            def connection_made(self, transport: asyncio.BaseTransport) -> None:
                connection = transport.get_extra_info("socket")
                accepted.set_result(connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
                transport.close()

        with bind("127.0.0.1", 0) as listener, socket.socket() as client:
            server = await asyncio.get_running_loop().create_server(Accepting, sock=listener)
            async with server:
                client.connect(listener.getsockname())
                return await accepted

    assert asyncio.run(accept())


def test_the_engine_yields_the_interpreter_soon_while_the_server_runs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen = []
    monkeypatch.setattr(listening._Server, "run", lambda *_, **__: seen.append(sys.getswitchinterval()))
    before = sys.getswitchinterval()
    with bind("127.0.0.1", 0) as listener:
        run_app(None, listener, Stopping(0, lambda: None, lambda: None))
    assert seen == [pytest.approx(SWITCH_SECONDS)]
    assert before > 2 * SWITCH_SECONDS
    assert sys.getswitchinterval() == before


def test_a_bound_socket_refuses_until_the_server_is_up() -> None:
    with bind("127.0.0.1", 0) as listener, socket.socket() as client:
        assert client.connect_ex(listener.getsockname()) != 0
