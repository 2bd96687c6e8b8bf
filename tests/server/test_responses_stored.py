"""Responses that are kept: continued, found, deleted, by whom, and for how long."""

import json
from collections.abc import Callable
from typing import Any

import pytest

from server.app import AppSettings
from server.services.response_store import ResponseStore, StoredResponse
from tests.fakes import FakeEngine
from tests.server.conftest import Served
from tests.server.test_responses import PATH, WEATHER, ask, events_of, post, text_of
from tests.server.test_tools import HERMES_TEMPLATE, TWO_CALLS, talking
from tests.server.test_validation import error_of

Serve = Callable[..., Served]
ANN, BOB = {"Authorization": "Bearer sk-ann"}, {"Authorization": "Bearer sk-bob"}


def response(size: int) -> StoredResponse:
    return StoredResponse(b"b" * size, b"")


def test_the_store_keeps_what_was_used_last() -> None:
    store = ResponseStore(max_responses=2, max_bytes=100)
    store.put("", "a", response(10))
    store.put("", "b", response(20))
    assert store.get("", "a") is not None
    store.put("", "c", response(30))
    assert (len(store), store.num_bytes) == (2, 40)
    assert store.get("", "b") is None
    store.put("", "d", response(75))
    assert [store.get("", name) is not None for name in "acd"] == [False, False, True]
    assert store.num_bytes == 75


def test_what_is_larger_than_the_store_drives_nobody_out() -> None:
    store = ResponseStore(max_responses=2, max_bytes=100)
    store.put("", "a", response(60))
    store.put("", "b", StoredResponse(b"b" * 60, b"c" * 60))
    assert (len(store), store.num_bytes) == (1, 60)
    assert store.get("", "a") is not None


def test_scopes_are_apart_in_the_store() -> None:
    store = ResponseStore(max_responses=2, max_bytes=100)
    store.put("ann", "a", response(10))
    assert store.get("bob", "a") is None
    assert not store.remove("bob", "a")
    assert store.remove("ann", "a")
    assert (len(store), store.num_bytes) == (0, 0)


def test_a_store_for_none() -> None:
    store = ResponseStore(max_responses=0, max_bytes=100)
    assert not store.is_open
    store.put("", "a", response(10))
    assert (len(store), store.num_bytes) == (0, 0)


@pytest.mark.parametrize("stream", [False, True])
def test_a_conversation_goes_on(serve: Serve, stream: bool) -> None:
    served = serve()

    def turn(**body: Any) -> str:
        if not stream:
            return str(ask(served, **body)["id"])
        return str(events_of(post(served, stream=True, **body))[-1]["response"]["id"])

    first = turn(input="one", instructions="Be brief")
    second = turn(input="two", previous_response_id=first)
    turn(input=[{"role": "user", "content": "three"}], previous_response_id=second, instructions="Be long")
    # Another way on from the first.
    turn(input="four", previous_response_id=first)
    said = {"role": "assistant", "content": "Hello, world!"}
    user = [{"role": "user", "content": text} for text in ("one", "two", "three", "four")]
    assert served.engine.conversations == [
        [{"role": "system", "content": "Be brief"}, user[0]],
        [user[0], said, user[1]],
        [{"role": "system", "content": "Be long"}, user[0], said, user[1], said, user[2]],
        [user[0], said, user[3]],
    ]


def test_calls_are_remembered_but_for_one_that_was_cut(serve: Serve) -> None:
    served = serve(talking(answer=TWO_CALLS.encode(), chat_template=HERMES_TEMPLATE))
    tools = [WEATHER, {"type": "function", "name": "clock"}]
    first = ask(served, tools=tools, max_output_tokens=len(TWO_CALLS) - 16)
    _, weather, clock = first["output"]
    assert (weather["status"], clock["status"]) == ("completed", "incomplete")
    results = [{"type": "function_call_output", "call_id": weather["call_id"], "output": "20"}]
    ask(served, tools=tools, input=results, previous_response_id=first["id"])
    _, said, result = served.engine.conversations[-1]
    calls: Any = said["tool_calls"]
    assert [call["function"]["name"] for call in calls] == ["weather"]
    assert calls[0]["function"]["arguments"] == json.loads(weather["arguments"])
    assert result == {"role": "tool", "content": "20", "tool_call_id": weather["call_id"], "name": "weather"}


def test_what_did_not_fit_is_not_kept(serve: Serve) -> None:
    served = serve(FakeEngine(max_model_len=128))
    first = ask(served, input="one " + "x" * 40)
    second = ask(
        served,
        input="two " + "x" * 60,
        previous_response_id=first["id"],
        truncation="auto",
        instructions="Be",
    )
    ask(served, input="three", previous_response_id=second["id"], truncation="auto", max_output_tokens=1)
    said = {"role": "assistant", "content": "Hello, world!"}
    two, three = ({"role": "user", "content": text} for text in ("two " + "x" * 60, "three"))
    assert served.engine.conversations[-1] == [two, said, three]


def test_it_is_found_as_it_was_answered(served: Served) -> None:
    answer = ask(served, metadata={"a": "b"})
    where = f"{PATH}/{answer['id']}"
    found = served.http.get(where)
    assert (found.status_code, found.headers["content-type"]) == (200, "application/json")
    assert found.json() == answer
    assert served.http.get(f"{where}?stream=false&include=message.output_text.logprobs").json() == answer
    for query in ("stream=true", "starting_after=3", "include=reasoning.encrypted_content", "include[]=x"):
        error = error_of(served.http.get(f"{where}?{query}"))
        assert error["param"] == query.partition("=")[0].removesuffix("[]")


def test_it_is_gone_when_it_is_deleted(served: Served) -> None:
    first = ask(served)
    second = ask(served, previous_response_id=first["id"])
    where = f"{PATH}/{first['id']}"
    gone = served.http.delete(where)
    assert gone.json() == {"id": first["id"], "object": "response", "deleted": True}
    for error in (error_of(served.http.get(where), 404), error_of(served.http.delete(where), 404)):
        assert (error["param"], error["code"]) == ("response_id", "response_not_found")
        assert first["id"] in error["message"]
    error = error_of(post(served, previous_response_id=first["id"]), 404)
    assert (error["param"], error["code"]) == ("previous_response_id", "previous_response_not_found")
    # What was said in it stays with the one that went on.
    ask(served, input="more", previous_response_id=second["id"])
    assert len(served.engine.conversations[-1]) == 5


def test_only_those_who_made_it_have_it(serve: Serve) -> None:
    served = serve()
    name = ask(served, ANN)["id"]
    where = f"{PATH}/{name}"
    for others in (BOB, {}, {"X-API-Key": "sk-ann"}):
        assert served.http.get(where, headers=others).status_code == 404
        assert served.http.delete(where, headers=others).status_code == 404
        assert post(served, others, previous_response_id=name).status_code == 404
    assert served.http.get(where, headers=ANN).status_code == 200
    ask(served, ANN, previous_response_id=name)
    scopes = [request.params.cache_scope for request in served.engine.requests]
    assert scopes[0] == scopes[1] != ""


def test_it_is_not_kept_unless_it_may_be(served: Served) -> None:
    for stream in (False, True):
        answer = post(served, store=False, stream=stream)
        response = events_of(answer)[-1]["response"] if stream else answer.json()
        assert response["store"] is False
        assert served.http.get(f"{PATH}/{response['id']}").status_code == 404


def test_a_server_that_keeps_none(serve: Serve) -> None:
    served = serve(settings=AppSettings(served_model_name="fake", max_stored_responses=0))
    answer = ask(served)
    assert answer["store"] is False
    assert served.http.get(f"{PATH}/{answer['id']}").status_code == 404
    assert error_of(post(served, store=True))["param"] == "store"
    assert text_of(ask(served, store=False)) == "Hello, world!"


@pytest.mark.parametrize(
    "settings",
    [
        AppSettings(served_model_name="fake", max_stored_responses=2),
        AppSettings(served_model_name="fake", max_stored_bytes=3000),
    ],
    ids=["by number", "by bytes"],
)
def test_old_ones_make_room(serve: Serve, settings: AppSettings) -> None:
    served = serve(FakeEngine(), settings=settings)
    names = [ask(served)["id"] for _ in range(3)]
    assert [served.http.get(f"{PATH}/{name}").status_code for name in names] == [404, 200, 200]
    # The second was used before the third, and then once more.
    ask(served, previous_response_id=names[1], store=False)
    ask(served)
    assert [served.http.get(f"{PATH}/{name}").status_code for name in names] == [404, 200, 404]
