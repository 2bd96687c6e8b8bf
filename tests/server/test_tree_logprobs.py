"""Logprobs over HTTP with trees: those of a server without speculation, entry by entry."""

from collections.abc import Iterator
from contextlib import ExitStack, closing
from itertools import chain
from typing import Any

import httpx
import pytest

from engine.async_engine import AsyncEngine
from server.app import AppSettings, create_app
from tests.engines import build_llm, load_tiny
from tests.server.conftest import new_metrics
from tests.server.running import running_server
from tests.server.sse import chunks

METHODS = ("draft_model 3,2,1,1", "draft_model dynamic", "suffix")
TEXT = "abcabacabbcacba"
ROUTES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {
        "messages": [{"role": "user", "content": TEXT}],
        "logprobs": True,
        "top_logprobs": 4,
    },
    "/v1/completions": {"prompt": TEXT, "logprobs": 4},
}
# Answers of three letters, which lookups find again, with several continuations.
LETTERS = {str(letter): 15 for letter in b"abc"}
WISHES: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0, "logit_bias": LETTERS},
    "seeded": {"temperature": 0.8, "seed": 11, "top_p": 0.95, "logit_bias": LETTERS},
}


@pytest.fixture(scope="module")
def servers() -> Iterator[dict[str, httpx.Client]]:
    """A client of a server per method, and of one without speculation."""
    # Moderate weights: with the tests' usual ones float32 alone is off by 1e-5 from one batch to another.
    target, draft = load_tiny(initializer_range=0.2), load_tiny(initializer_range=0.2, noise=0.1)
    with ExitStack() as stack:
        clients = {}
        for method in ("none", *METHODS):
            llm = build_llm(method, target=target, draft=draft)
            engine = stack.enter_context(closing(AsyncEngine(llm.core, llm.model, llm.tokenizer)))
            engine.start()
            app = create_app(engine, AppSettings(), new_metrics(engine))
            server = stack.enter_context(running_server(app))
            clients[method] = stack.enter_context(httpx.Client(base_url=server.url, timeout=60))
        yield clients


def answered(http: httpx.Client, route: str, body: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """An answer's logprobs and its report of speculation."""
    response = http.post(route, json=body)
    assert response.status_code == 200, response.text
    answer = response.json()
    return answer["choices"][0]["logprobs"], answer["speculation"]


def streamed(http: httpx.Client, route: str, body: dict[str, Any]) -> tuple[Any, int]:
    """The logprobs of a stream put together, and the most entries that one piece had."""
    wishes = {**body, "stream": True}
    pieces = [
        choice["logprobs"]
        for chunk in chunks(http.post(route, json=wishes))
        for choice in chunk["choices"]
        if choice["logprobs"] is not None
    ]
    whole = {
        name: list(chain.from_iterable(piece[name] for piece in pieces))
        for name, entries in pieces[0].items()
        if entries is not None
    }
    first = next(iter(whole))
    return whole, max(len(piece[first]) for piece in pieces)


def assert_close(ours: object, theirs: object) -> None:
    """Equal throughout, numbers to 1e-5."""
    if isinstance(theirs, float):
        assert ours == pytest.approx(theirs, abs=1e-5)
    elif isinstance(theirs, dict):
        assert isinstance(ours, dict)
        assert ours.keys() == theirs.keys()
        for key in theirs:
            assert_close(ours[key], theirs[key])
    elif isinstance(theirs, list):
        assert isinstance(ours, list)
        assert len(ours) == len(theirs)
        for mine, other in zip(ours, theirs, strict=True):
            assert_close(mine, other)
    else:
        assert ours == theirs


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("wishes", WISHES.values(), ids=WISHES.keys())
@pytest.mark.parametrize("method", METHODS)
def test_logprobs_are_the_plain_servers(
    servers: dict[str, httpx.Client], method: str, wishes: dict[str, Any], route: str
) -> None:
    body = {**ROUTES[route], **wishes, "max_tokens": 24, "ignore_eos": True}
    expected, _ = answered(servers["none"], route, body)
    whole, report = answered(servers[method], route, body)
    pieces, most = streamed(servers[method], route, body)
    assert report["accepted_tokens"] > 0
    assert most > 1
    assert_close(whole, expected)
    assert_close(pieces, {name: entries for name, entries in expected.items() if entries is not None})
