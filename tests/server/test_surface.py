"""Fields beside OpenAI's own: what reaches the engine, and what comes back."""

from collections.abc import Callable
from typing import Any

import openai
import pytest

from engine.chat_options import ChatOptions
from tests.fakes import BOS, END_OF_TURN, EOS, FakeEngine
from tests.server.conftest import Served
from tests.server.sse import chunks
from tests.server.test_validation import GOOD, PATHS, refused

Serve = Callable[..., Served]
BOTH = pytest.mark.parametrize("endpoint", PATHS)
IGNORED = "x-outrider-ignored-fields"


def post(served: Served, endpoint: str, **fields: Any) -> Any:
    response = served.http.post(PATHS[endpoint], json={**GOOD[endpoint], **fields})
    assert response.status_code == 200, response.text
    return response


@BOTH
def test_bad_words_are_spelt_alone_and_behind_a_space(serve: Serve, endpoint: str) -> None:
    served = serve()
    post(served, endpoint, bad_words=["no", " no", "x"])
    assert served.engine.requests[0].params.bad_words == ((*b"no",), (*b" no",), (*b"x",), (*b" x",))
    post(served, endpoint, bad_words=[])
    assert served.engine.requests[1].params.bad_words == ()


@BOTH
@pytest.mark.parametrize("wrong", ["no", [""], [1], [["a"]], ["a"] * 257, {}])
def test_what_are_no_bad_words_is_refused(served: Served, endpoint: str, wrong: object) -> None:
    assert refused(served, endpoint, {"bad_words": wrong})["param"].startswith("bad_words")


@BOTH
def test_allowed_token_ids(serve: Serve, endpoint: str) -> None:
    served = serve()
    post(served, endpoint, allowed_token_ids=[5, 6])
    assert served.engine.requests[0].params.allowed_token_ids == (5, 6)
    for wrong in ([], [-1], [259], ["5"], 5):
        assert refused(served, endpoint, {"allowed_token_ids": wrong})["param"] == "allowed_token_ids"


@BOTH
@pytest.mark.parametrize("n", [1, 2])
def test_token_ids_come_if_asked_for(served: Served, endpoint: str, n: int) -> None:
    answer = post(served, endpoint, return_token_ids=True, n=n, max_tokens=50).json()
    prompt = list(b"x") if endpoint == "completions" else list(b"user:hi\nassistant:")
    where = answer["choices"] if endpoint == "completions" else [answer]
    assert [part["prompt_token_ids"] for part in where] == [prompt] * len(where)
    assert [choice["token_ids"] for choice in answer["choices"]] == [list(b"Hello, world!")] * n
    events = chunks(post(served, endpoint, return_token_ids=True, n=n, max_tokens=50, stream=True))
    for index in range(n):
        deltas = [c for event in events for c in event["choices"] if c["index"] == index]
        assert [token for delta in deltas for token in delta["token_ids"]] == list(b"Hello, world!")
    told = [
        e for e in events for e in ([e] if endpoint == "chat" else e["choices"]) if "prompt_token_ids" in e
    ]
    assert [part["prompt_token_ids"] for part in told] == [prompt] * len(where)
    plain = post(served, endpoint).text
    assert "token_ids" not in plain


@BOTH
def test_usage_so_far_in_every_chunk(served: Served, endpoint: str) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    *events, last = chunks(post(served, endpoint, stream=True, stream_options=options, max_tokens=50))
    counts = [event["usage"]["completion_tokens"] for event in events]
    assert counts == sorted(counts)
    assert counts[0] == 3
    assert counts[-1] == 13 == last["usage"]["completion_tokens"]
    assert events[-1]["usage"] == last["usage"]
    error = refused(served, endpoint, {"stream": True, "stream_options": {"continuous_usage_stats": True}})
    assert error["param"] == "stream_options.continuous_usage_stats"
    post(served, endpoint, stream_options={"continuous_usage_stats": True})


def test_the_beginning_of_an_answer_is_continued(serve: Serve) -> None:
    served = serve()
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "Well"}]
    for more in ({}, {"add_generation_prompt": False}):
        post(served, "chat", messages=messages, continue_final_message=True, **more)
    assert served.engine.chat_options == [ChatOptions(continues=True)] * 2
    assert served.engine.requests[0].prompt_token_ids == (*b"user:hi\nassistant:Well",)
    error = refused(served, "chat", {"continue_final_message": True})
    assert error["param"] == "continue_final_message"
    assert "not of role 'user'" in error["message"]
    assert refused(served, "chat", {"add_generation_prompt": False})["param"] == "add_generation_prompt"


def test_template_variables_reach_the_template(serve: Serve) -> None:
    served = serve()
    post(served, "chat", chat_template_kwargs={"enable_thinking": False, "depth": {"a": [1]}})
    assert served.engine.chat_options[0].template_kwargs == {"enable_thinking": False, "depth": {"a": [1]}}
    for name in ("messages", "tools", "chat_template", "add_generation_prompt", "tokenize"):
        error = refused(served, "chat", {"chat_template_kwargs": {name: 1}})
        assert error["param"] == "chat_template_kwargs"
        assert name in error["message"]


@BOTH
def test_fields_without_effect_are_listed(served: Served, endpoint: str) -> None:
    assert IGNORED not in post(served, endpoint, user="me", temperature=0.5, logit_bias=None).headers
    response = post(served, endpoint, store=True, x_trace=1, metadata={"a": "b"}, unset=None)
    assert response.headers[IGNORED] == "store, x_trace, metadata"
    assert post(served, endpoint, stream=True, store=True).headers[IGNORED] == "store"
    # Known, and asking for nothing.
    assert IGNORED not in post(served, endpoint, typical_p=1.0, use_beam_search=False).headers


@BOTH
def test_names_that_no_header_takes_are_counted(served: Served, endpoint: str) -> None:
    strange = {"a\r\nset-cookie: b": 1, "schl\u00fcssel": 1, "n" * 65: 1, "fine": 1}
    assert post(served, endpoint, **strange).headers[IGNORED] == "fine, and 3 more"
    many = {f"x{n}": n for n in range(99)}
    listed = post(served, endpoint, **many).headers[IGNORED].split(", ")
    assert listed == [*(f"x{n}" for n in range(32)), "and 67 more"]


def test_the_official_client_reads_it_all(serve: Serve) -> None:
    served = serve(FakeEngine(num_cached_tokens=4))
    with openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as client:
        raw = client.chat.completions.with_raw_response.create(
            model="fake",
            messages=[{"role": "user", "content": "hi"}, {"role": "assistant", "content": "We"}],
            metadata={"a": "b"},
            logit_bias={"65": -100},
            extra_headers={"x-request-id": "mine"},
            extra_body={
                "continue_final_message": True,
                "bad_words": ["no"],
                "return_token_ids": True,
                "chat_template_kwargs": {"enable_thinking": False},
            },
        )
    answer = raw.parse()
    assert raw.headers[IGNORED] == "metadata"
    assert raw.headers["x-request-id"] == "mine"
    assert answer.system_fingerprint is not None
    assert answer.usage is not None
    assert answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens == 4
    assert answer.choices[0].model_extra is not None
    assert answer.choices[0].model_extra["token_ids"] == list(b"Hello, world!")


def test_a_suffix_makes_a_gap(serve: Serve) -> None:
    served = serve()
    post(served, "completions", prompt=["a", "b"], suffix="z", stop_token_ids=[7])
    sent = [(request.prompt_token_ids, request.params.stop_token_ids) for request in served.engine.requests]
    assert sent == [((BOS, ord(text), EOS, ord("z"), END_OF_TURN), (7, 33)) for text in "ab"]
    post(served, "completions", suffix="")
    assert served.engine.requests[-1].params.stop_token_ids == ()
    assert refused(served, "completions", {"prompt": [1, 2], "suffix": "z"})["param"] == "suffix"
    assert refused(served, "completions", {"suffix": "z", "echo": True})["param"] == "echo"
    assert refused(served, "chat", {"suffix": "z"})["param"] == "suffix"


@BOTH
def test_priority(serve: Serve, endpoint: str) -> None:
    served = serve()
    post(served, endpoint, priority=-3)
    assert served.engine.requests[0].params.priority == -3
    for wrong in (2**31, -(2**31) - 1, "1", 1.5):
        assert refused(served, endpoint, {"priority": wrong})["param"] == "priority"
