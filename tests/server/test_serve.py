"""The whole command, from flags to tokens of a tiny model on disk, to its end."""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import httpx
import pytest

from tests.operators import share_operators
from tests.tiny import save_tiny

COMMAND = [sys.executable, "-c", "import sys; from server.cli import main; sys.exit(main())", "serve"]


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Settings that a start needs, from the environment; nothing else of ours is in it."""
    folder = tmp_path_factory.mktemp("serve")
    share_operators(folder / "cache")
    foreign = {name: value for name, value in os.environ.items() if not name.startswith("OUTRIDER_")}
    return foreign | {
        "OUTRIDER_MODEL": str(save_tiny(folder / "tiny")),
        "OUTRIDER_CACHE_DIR": str(folder / "cache"),
        "OUTRIDER_DEVICE": "cpu",
        "OUTRIDER_OFFLINE": "true",
        "OUTRIDER_NUM_KV_BLOCKS": "64",
        "OUTRIDER_DRAFT_REVISION": "main",
        "OMP_NUM_THREADS": "1",
    }


@contextmanager
def serving(
    environment: dict[str, str], *flags: str
) -> Iterator[tuple[subprocess.Popen[str], str, list[str]]]:
    """A running server, its address, and its log up to there."""
    process = subprocess.Popen([*COMMAND, *flags], env=environment, stderr=subprocess.PIPE, text=True)
    log = []
    try:
        assert process.stderr
        for line in process.stderr:
            log.append(line)
            found = re.search(r"listening on (http://127\.0\.0\.1:\d+)", line)
            if found:
                yield process, found[1], log
                break
        else:
            pytest.fail("the server did not start:\n" + "".join(log))
    finally:
        process.kill()
        process.communicate()


def test_a_server_starts_answers_counts_and_stops(environment: dict[str, str]) -> None:
    flags = ["--port", "0", "--served-model-name", "tiny", "--speculation", "ngram", "--max-choices", "2"]
    with serving(environment, *flags) as (process, url, log):
        assert "draft_revision from OUTRIDER_DRAFT_REVISION is left out" in "".join(log)
        with httpx.Client(base_url=url, timeout=30) as client:
            assert client.get("/ready").status_code == 200
            assert client.get("/v1/models").json()["data"][0]["id"] == "tiny"
            body = {"model": "tiny", "prompt": "abcabcabc", "max_tokens": 16, "ignore_eos": True}
            answer = client.post("/v1/completions", json=body).json()
            assert answer["usage"]["completion_tokens"] == 16
            assert client.post("/v1/completions", json=body | {"n": 3}).status_code == 400
            metrics = client.get("/metrics").text
        labels = '{method="ngram",model_name="tiny"}'
        assert f"outrider_committed_tokens_total{labels} 16.0" in metrics
        forwards = re.search(rf"outrider_target_forwards_total{re.escape(labels)} (\d+)", metrics)
        assert forwards
        assert 1 <= int(forwards[1]) <= 17
        process.send_signal(signal.SIGTERM)
        _, rest = process.communicate(timeout=20)
    assert process.returncode == 0
    assert "engine closed" in rest
    assert "Traceback" not in rest
