"""The official client for Python, sync and async."""

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from tests.clients.asking import (
    MESSAGES,
    MODEL,
    TALK,
    TOLD,
    WEATHER,
    Point,
    Weather,
    asked_plainly,
    weather,
)


@pytest.fixture
def client(base_url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=base_url, api_key="none", max_retries=0) as client:
        yield client


def test_a_whole_answer_with_usage(client: openai.OpenAI, base_url: str) -> None:
    answer = client.chat.completions.create(model=MODEL, messages=MESSAGES, **TALK)
    expected = asked_plainly(base_url, **TALK)
    assert answer.choices[0].message.content == expected["choices"][0]["message"]["content"] != ""
    assert answer.choices[0].finish_reason == expected["choices"][0]["finish_reason"]
    assert answer.usage is not None
    assert answer.usage.completion_tokens == expected["usage"]["completion_tokens"] > 1
    assert answer.usage.prompt_tokens == expected["usage"]["prompt_tokens"] > 1
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


def test_a_stream_is_the_whole_answer(client: openai.OpenAI, base_url: str) -> None:
    options: Any = {"stream": True, "stream_options": {"include_usage": True}}
    *chunks, last = client.chat.completions.create(model=MODEL, messages=MESSAGES, **TALK, **options)
    expected = asked_plainly(base_url, **TALK)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert text == expected["choices"][0]["message"]["content"]
    assert chunks[-1].choices[0].finish_reason == expected["choices"][0]["finish_reason"]
    assert last.choices == []
    assert last.usage.completion_tokens == expected["usage"]["completion_tokens"]


def test_completions_with_logprobs(client: openai.OpenAI) -> None:
    options: Any = {"prompt": "one two", "logprobs": 2, "n": 2, **TALK}
    answer = client.completions.create(model=MODEL, **options)
    chunks = list(client.completions.create(model=MODEL, **options, stream=True))
    for choice in answer.choices:
        deltas = [c.choices[0] for c in chunks if c.choices and c.choices[0].index == choice.index]
        assert "".join(delta.text for delta in deltas) == choice.text
        assert choice.logprobs is not None
        streamed = [token for delta in deltas if delta.logprobs for token in delta.logprobs.tokens or ()]
        assert streamed == choice.logprobs.tokens


def test_the_stream_helper_tells_of_events(client: openai.OpenAI, base_url: str) -> None:
    # The helper takes an answer that a limit cut for an error.
    form = {"structured_outputs": {"regex": "[a-z ]{12}"}}
    with client.chat.completions.stream(
        model=MODEL, messages=MESSAGES, seed=3, stream_options={"include_usage": True}, extra_body=form
    ) as stream:
        deltas = [event.delta for event in stream if event.type == "content.delta"]
        final = stream.get_final_completion()
    expected = asked_plainly(base_url, seed=3, **form)
    text = expected["choices"][0]["message"]["content"]
    assert "".join(deltas) == final.choices[0].message.content == text
    assert final.usage is not None
    assert final.usage.completion_tokens == expected["usage"]["completion_tokens"] > 1


def test_parse_gives_an_object(client: openai.OpenAI) -> None:
    asked: Any = {"model": MODEL, "messages": MESSAGES, "response_format": Point, "seed": 1}
    answer = client.chat.completions.parse(**asked)
    parsed = answer.choices[0].message.parsed
    assert isinstance(parsed, Point)
    assert client.beta.chat.completions.parse(**asked).choices[0].message.parsed == parsed
    with client.chat.completions.stream(**asked) as stream:
        assert stream.get_final_completion().choices[0].message.parsed == parsed


def test_parse_says_that_the_limit_cut_it(client: openai.OpenAI) -> None:
    with pytest.raises(openai.LengthFinishReasonError):
        client.chat.completions.parse(model=MODEL, messages=MESSAGES, response_format=Point, max_tokens=3)


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "Weather"}}])
def test_parse_gives_arguments(client: openai.OpenAI, choice: Any) -> None:
    asked: Any = {"model": MODEL, "messages": MESSAGES, "tool_choice": choice, "seed": 2}
    asked |= {"tools": [openai.pydantic_function_tool(Weather)], "parallel_tool_calls": False}
    [call] = client.chat.completions.parse(**asked).choices[0].message.tool_calls or []
    assert isinstance(call.function.parsed_arguments, Weather)
    with client.chat.completions.stream(**asked) as stream:
        streamed = stream.get_final_completion().choices[0].message.tool_calls or ()
    assert [(each.id, each.function.arguments) for each in streamed] == [(call.id, call.function.arguments)]


@pytest.mark.parametrize("stream", [False, True])
def test_a_conversation_with_a_call(scripted_url: str, stream: bool) -> None:
    with openai.OpenAI(base_url=scripted_url, api_key="none", max_retries=0) as client:

        def say(messages: Any) -> Any:
            asked: Any = {"model": MODEL, "messages": messages, "tools": [WEATHER]}
            if not stream:
                return client.chat.completions.create(**asked).choices[0]
            with client.chat.completions.stream(**asked) as events:
                return events.get_final_completion().choices[0]

        choice = say(MESSAGES)
        assert choice.finish_reason == "tool_calls"
        [call] = choice.message.tool_calls
        result = weather(**json.loads(call.function.arguments))
        history = [choice.message, {"role": "tool", "tool_call_id": call.id, "content": result}]
        assert say([*MESSAGES, *history]).message.content == TOLD


def test_what_is_wrong_is_the_clients_own_error(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="temperature") as bad:
        client.chat.completions.create(model=MODEL, messages=MESSAGES, temperature=9)
    assert (bad.value.param, bad.value.code) == ("temperature", "invalid_value")
    assert bad.value.type == "invalid_request_error"
    with pytest.raises(openai.BadRequestError, match="messages"):
        client.chat.completions.create(model=MODEL, messages=[], stream=True)
    with pytest.raises(openai.NotFoundError, match="gpt-9"):
        client.chat.completions.create(model="gpt-9", messages=MESSAGES)
    with pytest.raises(openai.NotFoundError, match="embeddings"):
        client.embeddings.create(model=MODEL, input="x")


def test_many_async_answers_are_what_each_is_alone(base_url: str) -> None:
    async def ask(client: openai.AsyncOpenAI, seed: int) -> str:
        stream = await client.chat.completions.create(
            model=MODEL, messages=MESSAGES, **{**TALK, "seed": seed}, stream=True
        )
        return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

    async def talk() -> list[str]:
        async with openai.AsyncOpenAI(base_url=base_url, api_key="none", max_retries=0) as client:
            texts = asyncio.gather(*(ask(client, seed) for seed in range(4)))
            answer = await client.chat.completions.parse(
                model=MODEL, messages=MESSAGES, response_format=Point
            )
            assert isinstance(answer.choices[0].message.parsed, Point)
            return list(await texts)

    alone = [asked_plainly(base_url, **{**TALK, "seed": seed}) for seed in range(4)]
    assert asyncio.run(talk()) == [answer["choices"][0]["message"]["content"] for answer in alone]


def test_the_model_is_listed(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).id == MODEL
