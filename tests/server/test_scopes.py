"""Whose text drafts for whom, through HTTP; and that the engine never sees a key."""

from collections.abc import Callable, Iterator
from contextlib import closing

import httpx
import pytest
from starlette.datastructures import Headers

from engine.async_engine import AsyncEngine
from server.app import AppSettings
from server.scopes import Scopes
from tests.engines import build_llm
from tests.fakes import FakeEngine
from tests.server.conftest import Served, StartServer

ANN, BOB = {"Authorization": "Bearer sk-ann"}, {"Authorization": "Bearer sk-bob"}
BODY = {
    "prompt": "the quick brown fox",
    "seed": 3,
    "temperature": 1.5,
    "max_tokens": 40,
    "ignore_eos": True,
}


@pytest.fixture
def url(start_server: StartServer) -> Iterator[str]:
    """A server that drafts from earlier answers."""
    llm = build_llm("suffix", num_draft_tokens=8)
    with closing(AsyncEngine(llm.core, llm.model, llm.tokenizer)) as engine:
        engine.start()
        yield start_server(engine, AppSettings()).url


def speculated(url: str, headers: dict[str, str], **fields: object) -> tuple[str, dict[str, float]]:
    answer = httpx.post(f"{url}/v1/completions", json={**BODY, **fields}, headers=headers, timeout=60)
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["text"], answer.json()["speculation"]


def test_a_keys_answers_draft_for_that_key_and_for_no_other(url: str) -> None:
    text, fresh = speculated(url, ANN)
    # Nobody else is drafted for by what ann was told: the counts are those of a fresh server.
    for other in (BOB, {}, {"Authorization": "Basic sk-ann"}, {"X-API-Key": "sk-ann"}):
        assert speculated(url, other) == (text, fresh)
    for headers in (ANN, BOB, {}):
        again, drafted = speculated(url, headers)
        assert again == text
        assert drafted["accepted_tokens"] > fresh["accepted_tokens"] + 20
        assert drafted["steps"] < fresh["steps"] / 3


def test_streams_and_chats_have_scopes_too(serve: Callable[..., Served]) -> None:
    served = serve(FakeEngine())
    chat = {"messages": [{"role": "user", "content": "hi"}]}
    for stream in (False, True):
        for headers in (ANN, BOB, {}):
            served.http.post("/v1/completions", json={"prompt": "hi", "stream": stream}, headers=headers)
            served.http.post("/v1/chat/completions", json={**chat, "stream": stream}, headers=headers)
    scopes = [request.params.cache_scope for request in served.engine.requests]
    ann, bob, nobody = scopes[0], scopes[2], scopes[4]
    assert scopes == [ann, ann, bob, bob, nobody, nobody] * 2
    assert len({ann, bob, nobody}) == 3
    assert nobody == ""
    assert not any("sk-" in scope for scope in scopes)


def test_a_name_is_opaque() -> None:
    headers = Headers(ANN)
    ours, theirs = Scopes(), Scopes()
    assert ours.name(headers) == ours.name(Headers(ANN)) != ours.name(Headers(BOB))
    # Who knows a key cannot find out its scope's name without the server's secret.
    assert ours.name(headers) != theirs.name(headers)
    assert "ann" not in ours.name(headers)


def test_credentials_that_are_moved_between_headers_are_others() -> None:
    names = {
        Scopes(b"s").name(Headers(raw=raw))
        for raw in (
            [(b"authorization", b"a")],
            [(b"api-key", b"a")],
            [(b"x-api-key", b"a")],
            [(b"authorization", b"a"), (b"x-api-key", b"b")],
            [(b"authorization", b"a"), (b"authorization", b"b")],
            [],
        )
    }
    assert len(names) == 6


@pytest.mark.parametrize("header", [b"authorization", b"api-key", b"x-api-key"])
@pytest.mark.parametrize("blank", [b"", b" ", b"\t "])
def test_a_blank_header_is_none(header: bytes, blank: bytes) -> None:
    scopes = Scopes()
    assert scopes.name(Headers(raw=[(header, blank)])) == ""
    key = [(b"authorization", b"Bearer sk-ann")]
    assert scopes.name(Headers(raw=[*key, (header, blank)])) == scopes.name(Headers(raw=key))
