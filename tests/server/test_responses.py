"""/v1/responses: what comes back, whole and as events, and what the engine is told."""

import json
import re
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from pydantic_core import PydanticSerializationError

from engine.chat_options import ChatOptions
from engine.errors import Overloaded, RequestFailed
from engine.sampling_params import ConstraintKind
from server.protocol.response_events import ArgumentsDelta, ResponseEvent, TextDelta
from server.services.item_writers import Place
from server.sse import TextEvent, TextEvents, named_frame
from tests.fakes import FakeEngine
from tests.server.conftest import Served
from tests.server.test_disconnect import eventually, expect_all_aborted, send, slow_engine
from tests.server.test_reasoning import TEMPLATE as THINK_TEMPLATE
from tests.server.test_tools import HERMES_TEMPLATE, TWO_CALLS, talking
from tests.server.test_validation import error_of

Serve = Callable[..., Served]

PATH = "/v1/responses"
WEATHER = {
    "type": "function",
    "name": "weather",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
}
CLOCK = {"type": "function", "name": "clock"}


def post(served: Served, headers: dict[str, str] | None = None, **body: Any) -> httpx.Response:
    return served.http.post(PATH, json={"input": "hi", **body}, headers=headers)


def ask(served: Served, headers: dict[str, str] | None = None, **body: Any) -> dict[str, Any]:
    response = post(served, headers, **body)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


def events_of(response: httpx.Response) -> list[dict[str, Any]]:
    """The events of a stream, of which each frame says the type twice."""
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    assert response.text.endswith("\n\n")
    events = []
    for frame in response.text.removesuffix("\n\n").split("\n\n"):
        name, data = frame.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        events.append(event)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    return events


def text_of(answer: dict[str, Any]) -> str:
    return "".join(
        part["text"] for item in answer["output"] if item["type"] == "message" for part in item["content"]
    )


def essence(answer: dict[str, Any]) -> dict[str, Any]:
    """A response without what differs from call to call."""
    items = [{key: value for key, value in item.items() if key != "id"} for item in answer["output"]]
    return {**answer, "id": None, "created_at": None, "output": items}


def folded(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The output put together from deltas alone, each item checked against what the stream calls done."""
    items: list[dict[str, Any]] = []
    num_done = 0
    for event in events:
        kind = event["type"].removeprefix("response.")
        if kind == "output_item.added":
            assert event["output_index"] == len(items) == num_done, "one is complete before the next begins"
            items.append(event["item"])
        elif kind == "output_item.done":
            num_done += 1
            items[-1]["status"] = event["item"]["status"]
            assert items[-1] == event["item"]
        elif "item_id" in event:
            assert (event["item_id"], event["output_index"]) == (items[-1]["id"], len(items) - 1)
            fold(items[-1], kind, event)
    assert num_done == len(items)
    return items


def fold(item: dict[str, Any], kind: str, event: dict[str, Any]) -> None:
    """Adds an event to its item, or checks it."""
    part = item["content"][event["content_index"]] if item.get("content") else {}
    match kind:
        case "content_part.added":
            item["content"].append(event["part"])
        case "output_text.delta":
            part["text"] += event["delta"]
            part["logprobs"] += event["logprobs"]
        case "reasoning_text.delta":
            part["text"] += event["delta"]
        case "function_call_arguments.delta":
            item["arguments"] += event["delta"]
        case "output_text.done":
            assert (event["text"], event["logprobs"]) == (part["text"], part["logprobs"])
        case "reasoning_text.done":
            assert event["text"] == part["text"]
        case "function_call_arguments.done":
            assert (event["name"], event["arguments"]) == (item["name"], item["arguments"])
        case "content_part.done":
            assert event["part"] == part
        case _:
            pytest.fail(f"an event of its own making: {kind}")


def test_a_response_says_what_was_asked_and_what_came(serve: Serve) -> None:
    served = serve(FakeEngine(num_cached_tokens=4))
    answer = ask(
        served, instructions="Be brief", metadata={"a": "b"}, temperature=0.5, user="me", model="fake"
    )
    assert answer["id"].startswith("resp_")
    [message] = answer["output"]
    assert message["id"].startswith("msg_")
    assert message["content"] == [
        {"type": "output_text", "text": "Hello, world!", "annotations": [], "logprobs": []}
    ]
    assert answer["usage"] == {
        "input_tokens": len("system:Be brief\nuser:hi\nassistant:"),
        "input_tokens_details": {"cached_tokens": 4},
        "output_tokens": 13,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": 47,
    }
    assert answer["speculation"]["steps"] == 5
    expected: dict[str, Any] = {
        "object": "response",
        "status": "completed",
        "error": None,
        "incomplete_details": None,
        "model": "fake",
        "instructions": "Be brief",
        "metadata": {"a": "b"},
        "temperature": 0.5,
        "user": "me",
        "store": True,
        "truncation": "disabled",
        "tool_choice": "auto",
        "tools": [],
        "text": {"format": {"type": "text"}},
    }
    assert {key: answer[key] for key in expected} == expected


def test_a_stream_is_these_events(served: Served) -> None:
    events = events_of(post(served, stream=True))
    names = [event["type"].removeprefix("response.") for event in events]
    assert names == [
        *("created", "in_progress", "output_item.added", "content_part.added"),
        *["output_text.delta"] * 5,
        *("output_text.done", "content_part.done", "output_item.done", "completed"),
    ]
    first, last = events[0]["response"], events[-1]["response"]
    assert (first["status"], first["output"], first["usage"]) == ("in_progress", [], None)
    assert events[1]["response"] == first
    assert first["id"] == last["id"]
    assert folded(events) == last["output"]


CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "text": ({"answer": "Žluť 👩‍👩‍👧 e\u0301".encode()}, {}),
    "logprobs": ({}, {"include": ["message.output_text.logprobs"], "top_logprobs": 2}),
    "cut": ({}, {"max_output_tokens": 4}),
    "nothing": ({"answer": b""}, {}),
    "calls": ({"answer": TWO_CALLS.encode(), "chat_template": HERMES_TEMPLATE}, {"tools": [WEATHER, CLOCK]}),
    "a call, then text": (
        {
            "answer": b'<tool_call>\n{"name": "clock", "arguments": {}}\n</tool_call>\nNow wait.',
            "chat_template": HERMES_TEMPLATE,
        },
        {"tools": [CLOCK]},
    ),
    "a call that is cut": (
        {"answer": TWO_CALLS.encode(), "chat_template": HERMES_TEMPLATE},
        {"tools": [WEATHER, CLOCK], "max_output_tokens": 75},
    ),
    "a call, whole when it is cut": (
        {"answer": TWO_CALLS.encode(), "chat_template": HERMES_TEMPLATE},
        {"tools": [WEATHER, CLOCK], "max_output_tokens": TWO_CALLS.index("}}") + 4},
    ),
    "thoughts": (
        {"answer": "<think>hm, é</think>\n\nYes.".encode(), "chat_template": THINK_TEMPLATE},
        {"include": ["message.output_text.logprobs"]},
    ),
    "thoughts without an end": (
        {"answer": b"<think>and on and on", "chat_template": THINK_TEMPLATE},
        {"max_output_tokens": 15},
    ),
    "thoughts and nothing else": ({"answer": b"<think>a</think>", "chat_template": THINK_TEMPLATE}, {}),
}


@pytest.mark.parametrize("case", CASES)
def test_the_stream_is_the_whole_response_however_many_tokens_come_at_once(serve: Serve, case: str) -> None:
    engine, body = CASES[case]
    body = {"input": "hi", "seed": 1, **body}
    answers = []
    for per_step in (1, 3, 100):
        served = serve(talking(**engine, tokens_per_step=per_step))
        whole = ask(served, **body)
        events = events_of(post(served, stream=True, **body))
        assert folded(events) == events[-1]["response"]["output"]
        assert essence(events[-1]["response"]) == essence(whole)
        assert events[-1]["type"] == f"response.{whole['status']}"
        answers.append({**essence(whole), "speculation": None})
    assert answers[0] == answers[1] == answers[2]


ODD_TEXTS = (
    *("", "a", '"', "\\", "\\u0000", '\\"', '"sequence_number":0', '"delta":"', "}", "{}", "%d", "%b"),
    *(chr(code) for code in (*range(33), *range(0x7F, 0xA0), 0xAD, 0x2028, 0x2029, 0xFEFF, 0xFFFD, 0xFFFF)),
    *(
        "é",
        "e\u0301",
        "好",
        "🙂",
        "👩‍👩‍👧",
        "\U0010ffff",
        "</script>",
        "\r\n\n",
        "data: x\n\n",
        "\0\0",
        "a\0b",
    ),
)


def test_odd_texts_are_written_as_the_models_write_them() -> None:
    """Of each kind of event that adds text, with numbers of any length."""

    def message(number: int, text: str) -> ResponseEvent:
        return TextDelta(
            type="response.output_text.delta",
            sequence_number=number,
            item_id="msg_0",
            output_index=0,
            content_index=0,
            delta=text,
            logprobs=[],
        )

    def call(number: int, text: str) -> ResponseEvent:
        return ArgumentsDelta(
            type="response.function_call_arguments.delta",
            sequence_number=number,
            item_id="fc_0",
            output_index=10,
            delta=text,
        )

    for make in (message, call):
        events = TextEvents(make)
        for number, text in enumerate(ODD_TEXTS, 5):
            event = TextEvent(events, number, text)
            assert named_frame(event) == named_frame(make(number, text)), repr(text)
        # Half of a pair is no text: a server that sent it would send what no client can read.
        for text in ("\ud83d", "a\ude42"):
            for written in (TextEvent(events, 1, text), make(1, text)):
                with pytest.raises(PydanticSerializationError):
                    named_frame(written)


ODD = "".join(ODD_TEXTS)
CALL = json.dumps({"name": "clock", "arguments": {"a": ODD}}, ensure_ascii=False)


@pytest.mark.parametrize(
    ("engine", "body"),
    [
        ({"answer": ODD.encode()}, {}),
        ({"answer": f"<think>{ODD}</think>\n\n{ODD}".encode(), "chat_template": THINK_TEMPLATE}, {}),
        (
            {
                "answer": f"<tool_call>\n{CALL}\n</tool_call>\n{ODD}".encode(),
                "chat_template": HERMES_TEMPLATE,
            },
            {"tools": [CLOCK]},
        ),
        CASES["logprobs"],
    ],
    ids=["text", "thoughts", "calls", "logprobs"],
)
def test_a_stream_has_the_bytes_that_models_of_all_its_events_make(
    engine: dict[str, Any], body: dict[str, Any], serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    served = serve(talking(**engine, tokens_per_step=7))

    def written() -> bytes:
        answer = post(served, stream=True, **body)
        assert answer.status_code == 200
        return re.sub(rb'(resp|msg|rs|fc|call)_\w+|"created_at":\d+', b"", answer.content)

    short = written()
    assert b".delta" in short
    calls = []

    def whole(self: Place, events: TextEvents, text: str) -> ResponseEvent:
        calls.append(text)
        return makers[events](next(self.numbers), text)

    makers: dict[TextEvents, Callable[[int, str], ResponseEvent]] = {}

    def remember(self: TextEvents, make: Callable[[int, str], ResponseEvent]) -> None:
        makers[self] = make

    monkeypatch.setattr(TextEvents, "__init__", remember)
    monkeypatch.setattr(Place, "text", whole)
    assert short == written()
    assert bool(calls) is ("include" not in body)


def one(serve: Serve, case: str) -> dict[str, Any]:
    engine, body = CASES[case]
    return ask(serve(talking(**engine)), **body)


def test_a_limit_makes_it_incomplete(serve: Serve) -> None:
    answer = one(serve, "cut")
    assert (answer["status"], text_of(answer)) == ("incomplete", "Hell")
    assert answer["incomplete_details"] == {"reason": "max_output_tokens"}
    assert answer["output"][-1]["status"] == "incomplete"


def test_calls_are_items(serve: Serve) -> None:
    message, weather, clock = one(serve, "calls")["output"]
    assert message["content"][0]["text"] == "Let me see."
    assert (weather["type"], weather["name"]) == ("function_call", "weather")
    assert json.loads(weather["arguments"]) == {"city": 'Brno{"', "days": 2}
    assert clock["call_id"] != weather["call_id"]
    assert clock["id"].startswith("fc_")
    call, after = one(serve, "a call, then text")["output"]
    assert (call["type"], after["content"][0]["text"]) == ("function_call", "Now wait.")
    *_, cut = one(serve, "a call that is cut")["output"]
    assert cut["status"] == "incomplete"
    assert TWO_CALLS[:75].endswith(cut["arguments"])
    assert cut["arguments"]
    whole = one(serve, "a call, whole when it is cut")
    assert whole["status"] == "incomplete"
    assert [item["status"] for item in whole["output"]] == ["completed", "completed"]
    assert json.loads(whole["output"][1]["arguments"]) == {"city": 'Brno{"', "days": 2}


def test_thoughts_are_an_item_and_their_tokens_are_counted(serve: Serve) -> None:
    answer = one(serve, "thoughts")
    thoughts, message = answer["output"]
    assert thoughts["content"] == [{"type": "reasoning_text", "text": "hm, é"}]
    assert (thoughts["type"], thoughts["summary"]) == ("reasoning", [])
    assert message["content"][0]["text"] == "Yes."
    # A fake token is a byte.
    num_thought = len("<think>hm, é</think>".encode())
    assert answer["usage"]["output_tokens_details"] == {"reasoning_tokens": num_thought}
    tokens = "".join(entry["token"] for entry in message["content"][0]["logprobs"])
    assert tokens == "\n\nYes."
    endless = one(serve, "thoughts without an end")
    assert [item["type"] for item in endless["output"]] == ["reasoning"]
    assert endless["usage"]["output_tokens_details"] == {"reasoning_tokens": 15}


def test_items_become_a_conversation(serve: Serve) -> None:
    served = serve(talking(chat_template=HERMES_TEMPLATE))
    parts = [{"type": "input_text", "text": text} for text in ("Be", "brief")]
    thoughts = [{"type": "reasoning_text", "text": "hm"}]
    said = [{"type": "output_text", "text": "Let me see.", "annotations": []}]
    brno, clock = {"name": "weather", "arguments": '{"city": "Brno"}'}, {"name": "clock", "arguments": "{}"}
    noon = [{"type": "input_text", "text": "noon"}]
    items = [
        {"role": "developer", "content": parts},
        {"type": "message", "role": "user", "content": "How warm?"},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": thoughts},
        {"type": "message", "id": "msg_1", "status": "completed", "role": "assistant", "content": said},
        {"type": "function_call", "id": "fc_1", "call_id": "a", "status": "completed", **brno},
        {"type": "function_call", "call_id": "b", **clock},
        {"type": "function_call_output", "call_id": "a", "output": "20"},
        {"type": "function_call_output", "call_id": "b", "output": noon},
        {"type": "function_call", "call_id": "c", **clock},
        {"type": "function_call_output", "call_id": "c", "output": ""},
    ]
    ask(served, input=items, tools=[WEATHER, CLOCK], instructions="Answer")
    call = {"type": "function", "function": {"name": "clock", "arguments": {}}}
    weather = {"id": "a", "type": "function", "function": {"name": "weather", "arguments": {"city": "Brno"}}}
    assert served.engine.conversations == [
        [
            {"role": "system", "content": "Answer"},
            {"role": "developer", "content": "Be\nbrief"},
            {"role": "user", "content": "How warm?"},
            {"role": "assistant", "content": "Let me see.", "tool_calls": [weather, {"id": "b", **call}]},
            {"role": "tool", "content": "20", "tool_call_id": "a", "name": "weather"},
            {"role": "tool", "content": "noon", "tool_call_id": "b", "name": "clock"},
            {"role": "assistant", "content": "", "tool_calls": [{"id": "c", **call}]},
            {"role": "tool", "content": "", "tool_call_id": "c", "name": "clock"},
        ]
    ]
    described = {key: value for key, value in WEATHER.items() if key != "type"}
    assert served.engine.tools[0][0] == {"type": "function", "function": described}


def test_what_the_model_made_can_be_sent_back(serve: Serve) -> None:
    """As clients do that keep the conversation themselves."""
    for case in ("calls", "a call, then text", "thoughts", "text"):
        engine, body = CASES[case]
        served = serve(talking(**engine))
        output = ask(served, **body)["output"]
        question: list[dict[str, Any]] = [{"role": "user", "content": "hi"}]
        results = [
            {"type": "function_call_output", "call_id": item["call_id"], "output": "1"}
            for item in output
            if item["type"] == "function_call"
        ]
        more = [*results, {"role": "user", "content": "And?"}]
        ask(served, **{**body, "input": [*question, *output, *more]})
        by_hand = served.engine.conversations[-1]
        kept = ask(served, **{**body, "input": "hi"})["id"]
        ask(served, **{**body, "input": more, "previous_response_id": kept})
        # The ids of calls depend on the seed, which is drawn.
        assert json.dumps(anonymous(served.engine.conversations[-1])) == json.dumps(anonymous(by_hand))


def anonymous(conversation: Any) -> Any:
    return [
        {key: value for key, value in message.items() if key not in ("tool_calls", "tool_call_id", "name")}
        | {"calls": [call["function"] for call in message.get("tool_calls", ())]}
        for message in conversation
    ]


def test_options_reach_the_engine(serve: Serve) -> None:
    served = serve()
    ask(served, temperature=0.25, top_p=0.5, max_output_tokens=7, seed=3, top_k=4, stop=["x"], min_tokens=1)
    params = served.engine.requests[0].params
    assert (params.temperature, params.top_p, params.max_tokens, params.seed) == (0.25, 0.5, 7, 3)
    assert (params.top_k, params.stop, params.min_tokens, params.logprobs) == (4, ("x",), 1, None)
    ask(
        served,
        include=["message.output_text.logprobs"],
        top_logprobs=3,
        logit_bias={"65": -100},
        prediction={"type": "content", "content": "Hello"},
        speculation={"enabled": False},
        bad_words=["no"],
    )
    params = served.engine.requests[1].params
    assert (params.logprobs, params.logit_bias, params.speculation.enabled) == (3, ((65, -100.0),), False)
    assert params.speculation.prediction == tuple(b"Hello")
    assert params.bad_words == ((*b"no",), (*b" no",))
    assert served.engine.requests[1].request_id.startswith("resp_")


def test_formats_are_constraints(serve: Serve) -> None:
    served = serve()
    schema = {"type": "object", "properties": {"x": {"type": "integer"}}}
    named = {"type": "json_schema", "name": "point", "schema": schema, "strict": True}
    answer = ask(served, text={"format": named, "verbosity": "medium"})
    assert answer["text"]["format"] == named
    ask(served, text={"format": {"type": "json_object"}})
    ask(served, text={"format": {"type": "text"}})
    ask(served, structured_outputs={"choice": ["a", "b"]})
    exact, any_object, nothing, choice = [request.params.constraint for request in served.engine.requests]
    assert exact is not None
    assert (exact.kind, json.loads(exact.source), exact.param) == (ConstraintKind.JSON, schema, "text.format")
    assert any_object is not None
    assert json.loads(any_object.source) == {"type": "object"}
    assert nothing is None
    assert choice is not None
    assert choice.kind is ConstraintKind.CHOICE


def test_tools_are_chosen(serve: Serve) -> None:
    served = serve(talking(chat_template=HERMES_TEMPLATE))

    def grammar(**fields: Any) -> tuple[str, list[str]]:
        choice = ask(served, tools=[WEATHER, CLOCK], **fields)["tool_choice"]
        assert choice == fields.get("tool_choice", "auto")
        constraint = served.engine.requests[-1].params.constraint
        told = [str(tool["function"]["name"]) for tool in served.engine.tools[-1]]  # type: ignore[index]
        return constraint.source if constraint else "", told

    assert grammar() == ("", ["weather", "clock"])
    assert grammar(tool_choice="none") == ("", [])
    required, _ = grammar(tool_choice="required")
    assert "weather" in required
    assert "call)*" in required
    assert "call)*" not in grammar(tool_choice="required", parallel_tool_calls=False)[0]
    named, told = grammar(tool_choice={"type": "function", "name": "clock"})
    assert ("weather" in named, told) == (False, ["weather", "clock"])
    some = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "clock"}]}
    allowed, told = grammar(tool_choice=some)
    assert ("weather" in allowed, told) == (False, ["clock"])


def test_a_conversation_that_is_too_long_loses_its_oldest_turns(serve: Serve) -> None:
    served = serve(FakeEngine(max_model_len=128))
    turns = [
        {"role": role, "content": f"{number} " + "x" * 20}
        for number in range(6)
        for role in ("user", "assistant")
    ]
    items = [*turns, {"role": "user", "content": "last"}]
    assert error_of(post(served, input=items))["code"] == "context_length_exceeded"
    answer = ask(served, input=items, instructions="Be", truncation="auto", max_output_tokens=20)
    assert answer["truncation"] == "auto"
    conversation = served.engine.conversations[-1]
    assert conversation == [{"role": "system", "content": "Be"}, *turns[-2:], items[-1]]
    # One turn more and there is no room for the answer.
    assert len(served.engine.requests[-1].prompt_token_ids) + 20 <= 128
    assert len("".join(f"{m['role']}:{m['content']}\n" for m in turns[-4:-2])) + 20 > 128 - len(
        served.engine.requests[-1].prompt_token_ids
    )
    ask(served, input="short", truncation="auto")
    assert served.engine.conversations[-1] == [{"role": "user", "content": "short"}]
    error = error_of(post(served, input=[*turns, {"role": "user", "content": "x" * 200}], truncation="auto"))
    assert error["param"] == "input"


@pytest.mark.parametrize(
    ("template", "effort", "variables"),
    [
        ("{{ reasoning_effort }}", "high", {"reasoning_effort": "high"}),
        ("{{ enable_thinking }}</think>", "none", {"enable_thinking": False}),
        ("", "none", {}),
        ("", None, {}),
        ("", "high", None),
        ("</think>", "none", None),
        ("{{ enable_thinking }}</think>", "low", None),
    ],
)
def test_effort_is_what_the_template_can_be_told(
    serve: Serve, template: str, effort: str | None, variables: dict[str, object] | None
) -> None:
    served = serve(FakeEngine(chat_template=template))
    response = post(served, reasoning={"effort": effort, "summary": "auto"})
    if variables is None:
        assert error_of(response)["param"] == "reasoning.effort"
        return
    assert response.json()["reasoning"] == {"effort": effort, "summary": None}
    assert served.engine.chat_options == [ChatOptions(template_kwargs=variables)]


def test_an_error_before_the_first_event_is_a_status(serve: Serve) -> None:
    served = serve(FakeEngine(admission_error=Overloaded("32 run and 1024 wait")))
    for stream in (False, True):
        response = post(served, stream=stream)
        assert (response.status_code, response.json()["error"]["code"]) == (503, "overloaded")


def test_an_error_after_it_is_the_last_event(serve: Serve) -> None:
    served = serve(FakeEngine(error_after=2, error=RequestFailed("no luck")))
    *events, last = events_of(post(served, stream=True))
    assert [event["type"] for event in events[-2:]] == ["response.output_text.delta"] * 2
    assert last["type"] == "response.failed"
    assert last["response"]["status"] == "failed"
    assert last["response"]["error"] == {"code": "server_error", "message": "no luck"}
    assert served.http.get(f"{PATH}/{last['response']['id']}").status_code == 404
    assert post(served).status_code == 500


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_ends_the_request(serve: Serve, stream: bool) -> None:
    served = serve(slow_engine())
    with send(served, PATH, {"input": "hi", "stream": stream}):
        eventually(lambda: bool(served.engine.active), "the request never started")
    expect_all_aborted(served.engine, 1)
