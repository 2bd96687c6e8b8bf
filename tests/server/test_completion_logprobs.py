"""POST /v1/completions: logprobs in OpenAI's older format, and those of an echoed prompt."""

from collections.abc import Callable
from typing import Any

import pytest

from tests.fakes import BOS, FakeEngine
from tests.server.conftest import Served
from tests.server.test_completions import complete

Serve = Callable[..., Served]


def test_echo_shows_special_tokens_only_where_the_client_sent_them(serve: Serve) -> None:
    served = serve(FakeEngine(add_bos=True))
    of_text, of_ids = (
        complete(served, prompt=prompt, echo=True, max_tokens=1, logprobs=0)["choices"][0]
        for prompt in ("hé", [BOS, *"hé".encode()])
    )
    assert of_text["text"] == "héH"
    assert of_text["logprobs"]["tokens"][0] == "<s>"
    assert of_text["logprobs"]["text_offset"] == [0, 0, 1, 1, 2]
    assert of_ids["text"] == "<s>héH"
    assert of_ids["logprobs"]["text_offset"] == [0, 3, 4, 4, 5]


def test_echo_of_a_prompt_that_begins_within_a_character(serve: Serve) -> None:
    served = serve(FakeEngine(answer="é".encode()))
    choice = complete(served, prompt="😀 ř", echo=True, max_tokens=2, logprobs=1)["choices"][0]
    assert choice["text"] == "😀 řé"
    assert choice["logprobs"]["tokens"] == [
        *("bytes:\\xf0", "bytes:\\x9f", "bytes:\\x98", "bytes:\\x80", " "),
        *("bytes:\\xc5", "bytes:\\x99", "bytes:\\xc3", "bytes:\\xa9"),
    ]
    assert choice["logprobs"]["text_offset"] == [0, 0, 0, 0, 1, 2, 2, 3, 3]


def test_echo_with_no_tokens_only_reads_the_prompt(serve: Serve) -> None:
    served = serve()
    answer = complete(served, prompt=[97, 98], echo=True, logprobs=1, max_tokens=0)
    assert answer["choices"] == [
        {
            "index": 0,
            "text": "ab",
            "logprobs": {
                "tokens": ["a", "b"],
                "token_logprobs": [None, -0.125],
                "top_logprobs": [None, {"b": -0.125}],
                "text_offset": [0, 1],
            },
            "finish_reason": "length",
            "stop_reason": None,
        }
    ]
    assert answer["usage"]["completion_tokens"] == 0
    assert answer["speculation"]["tokens_per_forward"] is None
    assert served.engine.requests[0].params.prompt_logprobs == 1


def test_prompt_logprobs_are_asked_for_with_echo_only(serve: Serve) -> None:
    served = serve()
    for echo in (True, False):
        complete(served, prompt="x", logprobs=2, echo=echo)
    complete(served, prompt="x", echo=True)
    wanted = [(r.params.logprobs, r.params.prompt_logprobs) for r in served.engine.requests]
    assert wanted == [(2, 2), (2, None), (None, None)]


@pytest.mark.parametrize("absent", [{}, {"logprobs": None}])
def test_no_logprobs_unless_asked(served: Served, absent: dict[str, Any]) -> None:
    assert complete(served, prompt="x", **absent)["choices"][0]["logprobs"] is None


def test_logprobs_0_is_the_chosen_token_alone(served: Served) -> None:
    logprobs = complete(served, prompt="x", logprobs=0, max_tokens=4)["choices"][0]["logprobs"]
    assert logprobs == {
        "tokens": ["H", "e", "l", "l"],
        "token_logprobs": [-0.125, -0.25, -0.375, -0.5],
        "top_logprobs": None,
        "text_offset": [0, 1, 2, 3],
    }


def test_logprobs_2_has_two_alternatives_per_token(served: Served) -> None:
    logprobs = complete(served, prompt="x", logprobs=2, max_tokens=2)["choices"][0]["logprobs"]
    assert logprobs["top_logprobs"] == [{"H": -0.125, "I": -1.125}, {"e": -0.25, "f": -1.25}]


def test_logprobs_of_split_characters_keep_bytes_and_places(serve: Serve) -> None:
    served = serve(FakeEngine(answer="é!".encode(), tokens_per_step=1))
    choice = complete(served, prompt="x", logprobs=0)["choices"][0]
    assert choice["text"] == "é!"
    assert choice["logprobs"]["tokens"] == ["bytes:\\xc3", "bytes:\\xa9", "!"]
    assert choice["logprobs"]["text_offset"] == [0, 0, 1]
