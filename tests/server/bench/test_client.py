"""The client against a server with a script: what it asks, what it times, what it takes for an error."""

import asyncio
from collections.abc import Callable

import httpx
import pytest

from engine.errors import StartupError
from server.bench.client import TokenChoice, api_root, model_name
from server.bench.records import Acceptance, DraftCounts, Record
from tests.server.bench.scripted import (
    DONE,
    Answer,
    ScriptedServer,
    event,
    question,
    record,
    steady,
    text,
    usage,
)

Ask = Callable[[Answer], Record]


def ask(answer: Answer) -> Record:
    return asyncio.run(ScriptedServer(lambda _: answer).client().ask(question(), began=98.0, due=99.5))


def test_times_of_an_answer_of_single_tokens() -> None:
    got = ask(steady(["a", "b", "c"], 0.5, 0.25, usage(3)))
    assert (got.error, got.text, got.num_tokens, got.finish_reason) == (None, "abc", 3, "length")
    assert (got.sent, got.late, got.ttft, got.seconds) == (2.0, 0.5, 0.5, 1.0)
    assert got.gaps == [0.25, 0.25]
    assert got.tpot == 0.25
    assert got.seconds_per_token == pytest.approx(1 / 3)


def test_tokens_that_come_together_share_their_wait() -> None:
    """Three chunks of 2, 4 and 1 tokens as their lengths tell: the first one's are no part of the pace."""
    got = ask(steady(["ab", "cdef", "g"], 0.5, 0.2, usage(7)))
    assert got.tokens_per_chunk == [2, 4, 1]
    assert got.gaps == pytest.approx([0.05] * 4 + [0.2])
    assert got.tpot == pytest.approx(0.4 / 5)


def test_without_usage_a_chunk_is_a_token() -> None:
    got = ask(steady(["ab", "cdef"], 0.5, 0.2))
    assert (got.num_output_tokens, got.num_tokens, got.tokens_per_chunk) == (None, 2, [1, 1])


def test_an_answer_of_one_chunk_has_no_pace_and_an_empty_one_no_first_token() -> None:
    one = ask(steady(["abc"], 0.5, 0.2, usage(3)))
    assert (one.ttft, one.tpot, one.gaps) == (0.5, None, [])
    none = ask(steady([], 0.5, 0.2, usage(1)))
    assert (none.error, none.ttft, none.tpot, none.gaps, none.num_tokens) == (None, None, None, [], 1)


def test_events_may_be_cut_anywhere() -> None:
    whole = b": a comment\n\n" + text("a\u2028\u00fc") + text("b", "stop") + usage(2) + DONE
    for size in (1, 7, 1000):
        parts = [(0.125, whole[at : at + size]) for at in range(0, len(whole), size)]
        got = ask(Answer(parts))
        assert (got.error, got.text, got.num_tokens) == (None, "a\u2028\u00fcb", 2)


def test_bare_separators_and_both_line_ends_are_read() -> None:
    said = 'data: {"choices": [{"text": "a\u2028b", "finish_reason": "stop"}]}\r\n\r\ndata: [DONE]\r\n\r\n'
    got = ask(Answer([(0.1, said.encode())]))
    assert (got.error, got.text) == (None, "a\u2028b")


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (Answer([(0.1, b'{"error": {"message": "too long"}}')], 400), "HTTP 400: too long"),
        (Answer([(0.1, b"<html>")], 502), "HTTP 502: b'<html>'"),
        (
            Answer([(0.1, text("a")), (0.1, event({"error": {"message": "the engine died"}}))]),
            "error in the stream: the engine died",
        ),
        (Answer([(0.1, text("a"))]), "the stream ended without a finish_reason"),
        (Answer([(0.1, text("a")), (0.1, DONE)]), "the stream ended without a finish_reason"),
        (Answer([(0.1, b"data: {oops\n\n")]), "JSONDecodeError: "),
        (Answer([(0.1, b"data: [1]\n\n")]), "an event is no object"),
        (Answer([(0.1, event({"choices": [7]}))]), "an event that is no chunk of an answer"),
    ],
)
def test_what_goes_wrong_is_in_the_record(answer: Answer, error: str) -> None:
    got = ask(answer)
    assert got.error is not None
    assert got.error.startswith(error)
    assert got.seconds > 0


def test_a_server_that_hangs_up_is_an_error_too() -> None:
    def script(_: object) -> Answer:
        raise httpx.ReadTimeout("600 s without a sign")

    got = asyncio.run(ScriptedServer(script).client().ask(question()))
    assert got.error == "ReadTimeout: 600 s without a sign"


def test_the_request_asks_for_a_stream_with_usage() -> None:
    server = ScriptedServer(lambda _: steady(["a"], 0.1, 0.1))
    asyncio.run(server.client(speculation={"enabled": False}).ask(question(said="why?", number=3)))
    assert server.bodies == [
        {
            "path": "/v1/chat/completions",
            "model": "scripted",
            "messages": [{"role": "user", "content": "why?"}],
            "max_tokens": 16,
            "temperature": 0.0,
            "seed": 3,
            "stream": True,
            "stream_options": {"include_usage": True},
            "speculation": {"enabled": False},
        }
    ]


@pytest.mark.parametrize(
    ("last", "expected"),
    [
        (
            usage(8, speculation={"drafted_tokens": 10, "accepted_tokens": 6, "steps": 2}),
            DraftCounts(10, 6, 2),
        ),
        (
            event(
                {
                    "choices": [],
                    "usage": {
                        "completion_tokens": 8,
                        "completion_tokens_details": {
                            "accepted_prediction_tokens": 6,
                            "rejected_prediction_tokens": 4,
                        },
                    },
                }
            ),
            DraftCounts(10, 6, None),
        ),
        (usage(8, timings={"draft_n": 10, "draft_n_accepted": 6}), DraftCounts(10, 6, None)),
        (usage(8), None),
        (usage(8, speculation={"on": True}), None),
    ],
)
def test_drafts_are_read_as_servers_tell_of_them(last: bytes, expected: DraftCounts | None) -> None:
    got = ask(steady(["abcdefgh"], 0.1, 0.1, last))
    assert (got.error, got.drafts, got.num_tokens) == (None, expected, 8)


def test_acceptance_is_that_of_the_answers_whose_server_reports_it() -> None:
    told = record(num_output_tokens=8, drafts=DraftCounts(10, 6, 2))
    vague = record(num_output_tokens=5, drafts=DraftCounts(10, 2, None))
    silent = record(num_output_tokens=50)
    one = Acceptance.of([told, silent])
    assert one == Acceptance(10, 6, 2, 8)
    assert (one.rate, one.tokens_per_forward) == (0.6, 4.0)
    both = Acceptance.of([told, vague])
    assert both == Acceptance(20, 8, None, 13)
    assert (both.rate, both.tokens_per_forward) == (0.4, None)
    assert Acceptance.of([silent]) is None
    assert Acceptance(0, 0, 3, 3).rate is None


def test_token_choices_of_a_chat_answer() -> None:
    best = [{"token": "b", "logprob": -0.5}, {"token": "c", "logprob": -0.75}]
    body = {"choices": [{"logprobs": {"content": [{"token": "b", "top_logprobs": best}]}}]}
    server = ScriptedServer(lambda _: Answer([(0.1, event(body).removeprefix(b"data: "))]))
    assert asyncio.run(server.client().token_choices(question())) == [
        TokenChoice("b", (("b", -0.5), ("c", -0.75)))
    ]
    assert server.bodies[0]["top_logprobs"] == 2
    assert "stream" not in server.bodies[0]


def test_a_server_without_logprobs_has_no_token_choices() -> None:
    for answer in (Answer([(0.1, b'{"choices": [{"logprobs": null}]}')]), Answer([(0.1, b"{}")], 400)):
        server = ScriptedServer(lambda _, answer=answer: answer)  # type: ignore[misc]
        assert asyncio.run(server.client().token_choices(question())) == []


@pytest.mark.parametrize(
    ("url", "root"),
    [
        ("http://h:8000", "http://h:8000/v1/"),
        ("http://h:8000/", "http://h:8000/v1/"),
        ("http://h/v1", "http://h/v1/"),
        ("https://h/api/v3/", "https://h/api/v3/"),
    ],
)
def test_the_api_root_is_v1_unless_there_is_a_path(url: str, root: str) -> None:
    assert api_root(url) == root


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (httpx.Response(404), "http://h/v1/models does not answer: HTTPStatusError"),
        (httpx.Response(200, text="<html>"), "http://h/v1/models does not answer: JSONDecodeError"),
        (
            httpx.Response(200, json={"data": []}),
            "http://h/v1/models lists no model: name one with --api-model",
        ),
    ],
)
def test_a_server_without_a_model_is_refused(answer: httpx.Response, message: str) -> None:
    async def ask_name() -> str:
        transport = httpx.MockTransport(lambda _: answer)
        async with httpx.AsyncClient(base_url="http://h/v1/", transport=transport) as http:
            return await model_name(http)

    with pytest.raises(StartupError) as refused:
        asyncio.run(ask_name())
    assert str(refused.value).startswith(message)
