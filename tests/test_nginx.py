"""The proxy's configuration, run by a real nginx in front of two real servers."""

import os
import pwd
import shutil
import socket
import socketserver
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from server.app import AppSettings, create_app
from server.metrics import Metrics
from tests.fakes import FakeEngine
from tests.server.running import RunningServer, running_server

CONFIG = Path(__file__).parent.parent / "docker" / "nginx" / "nginx.conf"
NGINX = shutil.which("nginx", path=f"{os.environ['PATH']}:/usr/sbin:/usr/local/sbin")
BODY = {"model": "fake", "prompt": "hi", "max_tokens": 64}

pytestmark = pytest.mark.skipif(NGINX is None, reason="nginx is not installed (Debian: nginx-light)")


@dataclass(frozen=True, slots=True)
class Replica:
    """One server behind the proxy; `stop` ends it early."""

    server: RunningServer
    engine: FakeEngine
    stop: Callable[[], None]


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


@contextmanager
def nginx(folder: Path, ports: list[int]) -> Iterator[str]:
    """Runs nginx with the shipped configuration, its addresses and paths moved to this test's own."""
    port = free_port()
    text = CONFIG.read_text()
    moves = {
        "listen 8080;": f"listen 127.0.0.1:{port};",
        "outrider-1:8000": f"127.0.0.1:{ports[0]}",
        "outrider-2:8000": f"127.0.0.1:{ports[1]}",
        "/tmp/": f"{folder}/",
        "/dev/stdout": f"{folder}/access.log",
        "/dev/stderr": f"{folder}/error.log",
        "worker_processes auto;": "worker_processes 1;",
        # The replicas ask for unbuffered streams too; what is tested is that the configuration is enough.
        "http {\n": "http {\n    proxy_ignore_headers X-Accel-Buffering;\n",
    }
    for old, new in moves.items():
        assert old in text
        text = text.replace(old, new)
    moved = folder / "nginx.conf"
    moved.write_text(text)
    user = pwd.getpwuid(os.geteuid()).pw_name
    command = [str(NGINX), "-c", str(moved), "-p", str(folder), "-e", str(folder / "error.log")]
    command += ["-g", f"daemon off; user {user};"]
    accepted = subprocess.run([*command, "-t"], capture_output=True, text=True, check=False)
    assert accepted.returncode == 0, accepted.stderr
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    url = f"http://127.0.0.1:{port}"
    try:
        deadline = time.monotonic() + 10
        while not answers(f"{url}/nginx-health"):
            assert process.poll() is None
            assert time.monotonic() < deadline, "nginx did not start in time"
            time.sleep(0.02)
        yield url
    finally:
        process.terminate()
        process.wait(10)


def answers(url: str) -> bool:
    try:
        return httpx.get(url).status_code == 200
    except httpx.ConnectError:
        return False


@pytest.fixture
def replicas() -> Iterator[list[Replica]]:
    with ExitStack() as both:
        running = []
        for _ in range(2):
            engine = FakeEngine()
            metrics = Metrics(model_name="fake", method="ngram", max_draft_tokens=4)
            one = both.enter_context(ExitStack())
            settings = AppSettings(served_model_name="fake")
            server = one.enter_context(running_server(create_app(engine, settings, metrics)))
            running.append(Replica(server, engine, one.close))
        yield running


@pytest.fixture
def url(replicas: list[Replica], tmp_path: Path) -> Iterator[str]:
    with nginx(tmp_path, [replica.server.port for replica in replicas]) as address:
        yield address


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline, "waited for 10 s in vain"
        time.sleep(0.01)


def test_a_stream_comes_through_as_it_is_made(url: str, replicas: list[Replica]) -> None:
    for replica in replicas:
        replica.engine.step_seconds = 0.2
    with httpx.stream("POST", f"{url}/v1/completions", json=BODY | {"stream": True}) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        lines = (line for line in response.iter_lines() if line)
        first = next(lines)
        still_running = any(replica.engine.active for replica in replicas)
        rest = list(lines)
    assert first.startswith("data: {")
    assert still_running, "the first event came only when the answer was complete"
    assert rest[-1] == "data: [DONE]"


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_is_noticed_behind_the_proxy(
    url: str, replicas: list[Replica], stream: bool
) -> None:
    for replica in replicas:
        replica.engine.step_seconds = 0.1
        replica.engine.answer = b"x" * 300
    body = BODY | {"stream": stream, "max_tokens": 300}
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(f"{url}/v1/completions", json=body, timeout=httpx.Timeout(5, read=0.05))
    wait_until(lambda: any(replica.engine.aborted for replica in replicas))
    assert not any(replica.engine.active for replica in replicas)


def test_both_replicas_work_and_a_dead_one_is_skipped(url: str, replicas: list[Replica]) -> None:
    with httpx.Client(base_url=url) as client:
        for _ in range(6):
            assert client.post("/v1/completions", json=BODY).status_code == 200
        assert all(replica.engine.requests for replica in replicas)
        replicas[0].stop()
        before = len(replicas[1].engine.requests)
        for _ in range(6):
            assert client.post("/v1/completions", json=BODY).status_code == 200
        assert len(replicas[1].engine.requests) == before + 6


def test_a_conversation_goes_on_at_the_replica_that_keeps_it(url: str, replicas: list[Replica]) -> None:
    keys: list[dict[str, str]] = [{}]
    keys += [{"Authorization": f"Bearer {number}"} for number in range(12)]
    body = {"model": "fake", "input": "hi", "max_output_tokens": 4}
    with httpx.Client(base_url=url) as client:
        for headers in keys * 2:
            made = client.post("/v1/responses", json=body, headers=headers)
            follow_up = body | {"previous_response_id": made.json()["id"]}
            assert client.post("/v1/responses", json=follow_up, headers=headers).status_code == 200
            assert client.get(f"/v1/responses/{made.json()['id']}", headers=headers).status_code == 200
        assert all(len(replica.engine.requests) >= 4 for replica in replicas)
        replicas[0].stop()
        for headers in keys:
            assert client.post("/v1/responses", json=body, headers=headers).status_code == 200


def test_a_replica_that_stops_is_left_out(url: str, replicas: list[Replica]) -> None:
    replicas[0].server.app.state.outrider.admission.draining = True
    with httpx.Client(base_url=url) as client:
        for stream in (False, True) * 3:
            answer = client.post("/v1/completions", json=BODY | {"stream": stream})
            assert answer.status_code == 200, answer.text
        assert not replicas[0].engine.requests
        assert len(replicas[1].engine.requests) == 6
        replicas[1].server.app.state.outrider.admission.draining = True
        answer = client.post("/v1/completions", json=BODY)
        assert answer.status_code == 503
        assert answer.headers["retry-after"]


def test_no_replica_at_all_is_an_error_that_api_clients_can_read(url: str, replicas: list[Replica]) -> None:
    for replica in replicas:
        replica.stop()
    response = httpx.post(f"{url}/v1/completions", json=BODY)
    assert response.status_code == 503
    assert response.headers["retry-after"] == "2"
    assert response.json()["error"]["code"] == "no_answer"


def test_a_replicas_own_errors_pass_through(url: str) -> None:
    response = httpx.post(f"{url}/v1/completions", json=BODY | {"model": "nobody"})
    assert response.status_code == 404
    assert "nobody" in response.json()["error"]["message"]
    too_long = httpx.post(f"{url}/v1/completions", content=b"x" * (10 * 2**20))
    assert too_long.status_code == 413
    assert too_long.json()["error"]["message"]


def test_metrics_are_not_mixed_behind_one_address(url: str) -> None:
    assert httpx.get(f"{url}/metrics").status_code == 404


class HangingUp(socketserver.BaseRequestHandler):
    """Reads a request and ends the connection without a word."""

    def handle(self) -> None:
        received = self.request.recv(65536)
        self.server.seen.append(received)  # type: ignore[attr-defined]


def test_a_request_that_was_sent_is_not_sent_again(tmp_path: Path) -> None:
    with ExitStack() as stack:
        seen: list[bytes] = []
        ports = []
        for _ in range(2):
            upstream = stack.enter_context(socketserver.ThreadingTCPServer(("127.0.0.1", 0), HangingUp))
            upstream.seen = seen  # type: ignore[attr-defined]
            threading.Thread(target=upstream.serve_forever, args=(0.05,), daemon=True).start()
            stack.callback(upstream.shutdown)
            ports.append(upstream.server_address[1])
        url = stack.enter_context(nginx(tmp_path, ports))
        assert httpx.post(f"{url}/v1/completions", json=BODY).status_code == 503
        assert len(seen) == 1
