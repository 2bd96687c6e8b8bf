"""Formats over HTTP, asked for through the official client: a tiny model with a draft model beside it."""

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from enum import StrEnum
from typing import Any, Literal

import httpx
import openai
import pytest
from pydantic import BaseModel, ConfigDict, Field

from tests.engine.answers import build_scripted
from tests.engines import build_llm, load_tiny
from tests.scripted import fixed
from tests.server.engines import serving

MESSAGES: Any = [{"role": "user", "content": "one two one two"}]
POINT = {
    "type": "object",
    "properties": {"x": {"type": "integer", "minimum": 0, "maximum": 99}, "y": {"enum": ["up", "down"]}},
    "required": ["x", "y"],
    "additionalProperties": False,
}
AS_POINT: Any = {"type": "json_schema", "json_schema": {"name": "point", "schema": POINT, "strict": True}}


@pytest.fixture(scope="module")
def client() -> Iterator[openai.OpenAI]:
    llm = build_llm("draft_model 2,1,1", target=load_tiny(max_model_len=512), num_kv_blocks=1024)
    with (
        serving(llm) as server,
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client,
    ):
        yield client


def refusal(client: openai.OpenAI, **fields: Any) -> openai.BadRequestError:
    with pytest.raises(openai.BadRequestError) as error:
        client.chat.completions.create(model="tiny", messages=MESSAGES, **fields)
    return error.value


def test_a_schema_whole_streamed_and_without_speculation(client: openai.OpenAI) -> None:
    def ask(seed: int, stream: bool, enabled: bool) -> str:
        answer = client.chat.completions.create(
            model="tiny",
            messages=MESSAGES,
            seed=seed,
            response_format=AS_POINT,
            stream=stream,
            extra_body={"speculation": {"enabled": enabled}},
        )
        if not isinstance(answer, openai.Stream):
            assert answer.choices[0].finish_reason == "stop"
            return answer.choices[0].message.content or ""
        return "".join(chunk.choices[0].delta.content or "" for chunk in answer)

    for seed in range(4):
        text = ask(seed, False, True)
        assert ask(seed, True, True) == ask(seed, False, False) == text
        value = json.loads(text)
        assert list(value) == ["x", "y"]
        assert 0 <= value["x"] <= 99
        assert value["y"] in ("up", "down")


@pytest.mark.parametrize("draft", [b"```", b'{"?', b'{"x": up'])
def test_drafts_that_the_format_forbids_harm_nobody_in_a_full_batch(draft: bytes) -> None:
    llm, _ = build_scripted(fixed(draft), load_tiny(max_model_len=512), num_kv_blocks=1024, max_num_seqs=10)
    with (
        serving(llm) as server,
        httpx.Client(base_url=f"{server.url}/v1", timeout=60) as http,
        ThreadPoolExecutor(10) as pool,
    ):

        def ask(seed: int, enabled: bool) -> tuple[int, str]:
            body = {
                "messages": MESSAGES,
                "seed": seed,
                "max_tokens": 40,
                "response_format": AS_POINT if seed % 2 else {"type": "json_object"},
                "speculation": {"enabled": enabled},
            }
            answer = http.post("/chat/completions", json=body)
            return answer.status_code, json.dumps(answer.json()["choices"])

        plain = [ask(seed, False) for seed in range(10)]
        drafted = list(pool.map(lambda seed: ask(seed, True), range(10)))
    assert {status for status, _ in plain} == {200}
    assert drafted == plain


class Colour(StrEnum):
    RED = "red"
    GREEN = "green"


class Step(BaseModel):
    model_config = ConfigDict(extra="forbid")
    text: str = Field(max_length=6)
    number: int = Field(ge=1, le=9)


class Plan(BaseModel):
    model_config = ConfigDict(extra="forbid")
    kind: Literal["short", "long"]
    colour: Colour | None
    steps: list[Step] = Field(min_length=1, max_length=3)
    done: bool


def test_the_parse_helper_of_the_official_client(client: openai.OpenAI) -> None:
    answer = client.chat.completions.parse(
        model="tiny", messages=MESSAGES, response_format=Plan, seed=3, n=3, temperature=1.0
    )
    plans = [choice.message.parsed for choice in answer.choices]
    assert all(isinstance(plan, Plan) for plan in plans)
    assert len({plan.model_dump_json() for plan in plans if plan is not None}) == 3
    with client.chat.completions.stream(
        model="tiny", messages=MESSAGES, response_format=Plan, seed=3
    ) as stream:
        final = stream.get_final_completion()
    assert final.choices[0].message.parsed == plans[0]


@pytest.mark.parametrize(
    ("wanted", "fits"),
    [
        ({"choice": ["yes", 'no "\\\n', "ěž"]}, lambda text: text in ("yes", 'no "\\\n', "ěž")),
        ({"regex": "[ab]{3,5}-[0-9]"}, lambda text: text[-2] == "-" and set(text[:-2]) <= {"a", "b"}),
        ({"grammar": 'root ::= "<" ("x" | "y") ">"'}, lambda text: text in ("<x>", "<y>")),
        ({"grammar": 'start: "<" ("x" | "y") ">"'}, lambda text: text in ("<x>", "<y>")),
        ({"json": POINT}, lambda text: list(json.loads(text)) == ["x", "y"]),
        ({"json": json.dumps(POINT)}, lambda text: list(json.loads(text)) == ["x", "y"]),
    ],
)
def test_every_notation_on_both_endpoints(client: openai.OpenAI, wanted: Any, fits: Any) -> None:
    extra = {"structured_outputs": wanted}
    for seed in range(3):
        answer = client.completions.create(
            model="tiny", prompt="one two", seed=seed, max_tokens=100, extra_body=extra
        )
        assert answer.choices[0].finish_reason == "stop"
        assert fits(answer.choices[0].text)
    chat = client.chat.completions.create(model="tiny", messages=MESSAGES, extra_body=extra)
    assert fits(chat.choices[0].message.content)


def test_json_object_and_text(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="tiny", messages=MESSAGES, response_format={"type": "json_object"}, seed=1, max_tokens=40
    )
    content = answer.choices[0].message.content or ""
    assert content.startswith("{")
    if answer.choices[0].finish_reason == "stop":
        assert isinstance(json.loads(content), dict)
    free = client.chat.completions.create(
        model="tiny", messages=MESSAGES, response_format={"type": "text"}, seed=1, max_tokens=5
    )
    assert free.usage is not None
    assert free.usage.completion_tokens == 5


@pytest.mark.parametrize(
    ("schema", "named"),
    [
        ({"type": "array", "uniqueItems": True}, "uniqueItems"),
        ({"not": {"type": "string"}}, "'not'"),
        ({"type": "object", "properties": {"a": {"if": {}}}}, "'if'"),
        ({"type": "string", "format": "haiku"}, "haiku"),
        ({"type": "string", "pattern": "(?=a)b"}, "look-around"),
        ({"type": "thing"}, "thing"),
        ({"$ref": "#/$defs/none"}, "/$defs/none"),
        ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "oneOf"),
        ({"type": "array", "minItems": 3, "maxItems": 2}, "minItems"),
        ({"type": "array", "uniqueItems": True, "x-guidance": {"lenient": True}}, "uniqueItems"),
    ],
)
def test_schemas_that_cannot_be_honoured(client: openai.OpenAI, schema: Any, named: str) -> None:
    wanted = {"type": "json_schema", "json_schema": {"name": "s", "schema": schema}}
    for stream in (False, True):
        error = refusal(client, response_format=wanted, stream=stream)
        assert error.param == "response_format"
        assert named in error.message


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        (
            {"response_format": {"type": "text", "json_schema": {"name": "x", "schema": {}}}},
            "response_format.json_schema",
        ),
        ({"response_format": {"type": "structural_tag"}}, "response_format.type"),
        ({"extra_body": {"structured_outputs": {}}}, "structured_outputs"),
        ({"extra_body": {"structured_outputs": {"regex": "a", "choice": ["b"]}}}, "structured_outputs"),
        ({"extra_body": {"structured_outputs": {"regexp": "a"}}}, "structured_outputs.regexp"),
        ({"extra_body": {"structured_outputs": {"choice": []}}}, "structured_outputs.choice"),
        ({"extra_body": {"structured_outputs": {"regex": "(a"}}}, "structured_outputs.regex"),
        ({"extra_body": {"structured_outputs": {"grammar": "start: nobody"}}}, "structured_outputs.grammar"),
        ({"extra_body": {"structured_outputs": {"json": "[1"}}}, "structured_outputs.json"),
        ({"extra_body": {"structured_outputs": {"json": 3}}}, "structured_outputs.json"),
        ({"response_format": AS_POINT, "extra_body": {"ignore_eos": True}}, "ignore_eos"),
        (
            {"response_format": AS_POINT, "extra_body": {"structured_outputs": {"regex": "a"}}},
            "structured_outputs",
        ),
        ({"extra_body": {"guided_regex": "a"}}, "guided_regex"),
    ],
)
def test_requests_that_make_no_sense(client: openai.OpenAI, fields: Any, param: str) -> None:
    assert refusal(client, **fields).param == param
