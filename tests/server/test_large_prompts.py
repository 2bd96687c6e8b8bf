"""A prompt of megabytes is read beside everything else: neither probes nor streams wait for it."""

import threading
import time
from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

import httpx

from tests.engines import build_llm
from tests.server.engines import serving

BODY = b'{"prompt": "%b"}' % (b"one two " * 625_000)
STREAM = {"prompt": "one two", "max_tokens": 100, "ignore_eos": True, "stream": True}
# Reading the prompt takes seconds; some 0.2 of them are the interpreter's, to hand out millions of tokens.
LONGEST_GAP_SECONDS = 1.0


def probes(http: httpx.Client) -> Generator[object, None, None]:
    while True:
        time.sleep(0.05)
        yield http.get("/health").raise_for_status()


def pieces(http: httpx.Client) -> Generator[object, None, None]:
    """Pieces of one stream after the other."""
    while True:
        with http.stream("POST", "/v1/completions", json=STREAM) as response:
            yield from response.raise_for_status().iter_raw()


def longest_gap(ticks: Generator[object, None, None], done: threading.Event) -> float:
    """Seconds between one tick and the next, at most, until something is done."""
    longest, last = 0.0, time.perf_counter()
    with closing(ticks):
        for _ in ticks:
            now = time.perf_counter()
            longest, last = max(longest, now - last), now
            if done.is_set():
                break
    return longest


def test_five_megabytes_hold_up_neither_health_nor_a_stream() -> None:
    done = threading.Event()
    with (
        serving(build_llm("ngram")) as server,
        httpx.Client(base_url=server.url, timeout=60) as http,
        ThreadPoolExecutor(2) as pool,
    ):
        gaps = [pool.submit(longest_gap, ticks(http), done) for ticks in (probes, pieces)]
        try:
            answer = http.post("/v1/completions", content=BODY, headers={"content-type": "application/json"})
        finally:
            done.set()
        probing, streaming = (gap.result() for gap in gaps)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "prompt"
    assert probing < LONGEST_GAP_SECONDS
    assert streaming < LONGEST_GAP_SECONDS
