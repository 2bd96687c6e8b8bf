"""LiteLLM, which takes the server for one of its providers."""

import asyncio
import json
from collections.abc import Iterator
from typing import Any

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

litellm = pytest.importorskip("litellm", reason="litellm is not installed; make test-clients does that")

# It trips over pydantic's newer rules, and keeps clients without closing them.
pytestmark = [
    pytest.mark.filterwarnings("ignore:Items? .* on TypedDict class:UserWarning"),
    pytest.mark.filterwarnings(
        "ignore:Accessing the 'model_(computed_)?fields' attribute:DeprecationWarning"
    ),
    pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning"),
]


@pytest.fixture(autouse=True)
def forget(untidy: None) -> Iterator[None]:
    """It forgets its clients before the garbage collector comes."""
    yield
    litellm.in_memory_llm_clients_cache.flush_cache()


def asked(url: str, **fields: Any) -> dict[str, Any]:
    return {
        "model": f"openai/{MODEL}",
        "messages": MESSAGES,
        "api_base": url,
        "api_key": "none",
        "max_retries": 0,
        **fields,
    }


def test_a_whole_answer_with_usage(base_url: str) -> None:
    answer = litellm.completion(**asked(base_url, **TALK))
    expected = asked_plainly(base_url, **TALK)
    assert answer.choices[0].message.content == expected["choices"][0]["message"]["content"] != ""
    assert answer.choices[0].finish_reason == expected["choices"][0]["finish_reason"]
    assert answer.usage.prompt_tokens == expected["usage"]["prompt_tokens"] > 1
    assert answer.usage.completion_tokens == expected["usage"]["completion_tokens"] > 1


def test_a_stream_is_the_whole_answer(base_url: str) -> None:
    options = asked(base_url, **TALK, stream=True, stream_options={"include_usage": True})

    async def aloud() -> list[Any]:
        return [chunk async for chunk in await litellm.acompletion(**options)]

    expected = asked_plainly(base_url, **TALK)
    for chunks in (list(litellm.completion(**options)), asyncio.run(aloud())):
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
        assert text == expected["choices"][0]["message"]["content"]
        [usage] = [chunk.usage for chunk in chunks if getattr(chunk, "usage", None)]
        assert usage.completion_tokens == expected["usage"]["completion_tokens"]


def test_a_text_completion(base_url: str) -> None:
    options = {**asked(base_url, **TALK), "model": f"text-completion-openai/{MODEL}", "prompt": "one two"}
    del options["messages"]
    whole = litellm.text_completion(**options).choices[0].text
    streamed = litellm.text_completion(**options, stream=True)
    assert "".join(chunk.choices[0].text or "" for chunk in streamed) == whole != ""


def test_structured_output(base_url: str) -> None:
    answer = litellm.completion(**asked(base_url, response_format=Point, seed=1))
    Point.model_validate_json(answer.choices[0].message.content, strict=True)


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "weather"}}])
def test_a_required_call(base_url: str, choice: Any) -> None:
    options = asked(base_url, tools=[WEATHER], tool_choice=choice, parallel_tool_calls=False, seed=1)
    whole = litellm.completion(**options)
    streamed = litellm.stream_chunk_builder(list(litellm.completion(**options, stream=True)))
    for answer in (whole, streamed):
        [call] = answer.choices[0].message.tool_calls
        assert answer.choices[0].finish_reason == "tool_calls"
        assert call.function.name == "weather"
        Weather.model_validate_json(call.function.arguments, strict=True)
        assert call.function.arguments == whole.choices[0].message.tool_calls[0].function.arguments


def test_a_conversation_with_a_call(scripted_url: str) -> None:
    message = litellm.completion(**asked(scripted_url, tools=[WEATHER])).choices[0].message
    [call] = message.tool_calls
    result = weather(**json.loads(call.function.arguments))
    history = [*MESSAGES, message, {"role": "tool", "tool_call_id": call.id, "content": result}]
    answer = litellm.completion(**asked(scripted_url, tools=[WEATHER], messages=history))
    assert answer.choices[0].message.content == TOLD


def test_what_is_wrong_is_the_clients_own_error(base_url: str) -> None:
    with pytest.raises(litellm.BadRequestError, match="temperature"):
        litellm.completion(**asked(base_url, temperature=9))
    with pytest.raises(litellm.BadRequestError, match="top_p"):
        list(litellm.completion(**asked(base_url, top_p=0, stream=True)))
    with pytest.raises(litellm.ContextWindowExceededError):
        litellm.completion(**asked(base_url, max_tokens=4000))
    with pytest.raises(litellm.NotFoundError, match="gpt-9"):
        litellm.completion(**{**asked(base_url), "model": "openai/gpt-9"})
