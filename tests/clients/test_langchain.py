"""LangChain's ChatOpenAI."""

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

import openai
import pytest

from tests.clients.asking import (
    MESSAGES,
    MODEL,
    QUESTION,
    TALK,
    TOLD,
    Point,
    Weather,
    asked_plainly,
    weather,
)

langchain_openai = pytest.importorskip(
    "langchain_openai", reason="langchain-openai is not installed; make test-clients does that"
)
from langchain_core.messages import HumanMessage, ToolMessage  # noqa: E402
from langchain_core.tools import StructuredTool  # noqa: E402

Make = Callable[..., Any]


@pytest.fixture
def make() -> Iterator[Make]:
    """Makes chat models whose connections end with the test."""
    with openai.DefaultHttpxClient() as http:

        def make(url: str, **fields: Any) -> Any:
            return langchain_openai.ChatOpenAI(
                model=MODEL,
                base_url=url,
                api_key="none",
                max_retries=0,
                use_responses_api=False,
                http_client=http,
                **fields,
            )

        yield make


def test_a_whole_answer_with_usage(make: Make, base_url: str) -> None:
    answer = make(base_url, **TALK).invoke(MESSAGES)
    expected = asked_plainly(base_url, **TALK)
    assert answer.content == expected["choices"][0]["message"]["content"] != ""
    assert answer.response_metadata["finish_reason"] == expected["choices"][0]["finish_reason"]
    assert answer.usage_metadata["input_tokens"] == expected["usage"]["prompt_tokens"] > 1
    assert answer.usage_metadata["output_tokens"] == expected["usage"]["completion_tokens"] > 1


def test_a_stream_is_the_whole_answer(make: Make, base_url: str) -> None:
    options = {"stream_usage": True, **TALK}
    expected = asked_plainly(base_url, **TALK)

    async def aloud() -> list[Any]:
        async with openai.DefaultAsyncHttpxClient() as http:
            model = make(base_url, http_async_client=http, **options)
            return [chunk async for chunk in model.astream(MESSAGES)]

    for chunks in (list(make(base_url, **options).stream(MESSAGES)), asyncio.run(aloud())):
        assert "".join(chunk.content for chunk in chunks) == expected["choices"][0]["message"]["content"]
        used = [chunk.usage_metadata["output_tokens"] for chunk in chunks if chunk.usage_metadata]
        assert sum(used) == expected["usage"]["completion_tokens"]


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
def test_structured_output(make: Make, base_url: str, method: str) -> None:
    model = make(base_url, seed=1).with_structured_output(Point, method=method)
    assert isinstance(model.invoke(QUESTION), Point)


@pytest.mark.parametrize("choice", ["any", "weather"])
def test_a_required_call(make: Make, base_url: str, choice: str) -> None:
    tool = StructuredTool.from_function(weather, args_schema=Weather)
    model = make(base_url, seed=1).bind_tools(
        [tool], tool_choice=choice, strict=True, parallel_tool_calls=False
    )
    whole = model.invoke(QUESTION)
    [call] = whole.tool_calls
    assert call["name"] == "weather"
    assert tool.invoke(call).content.startswith("warm in ")
    first, *rest = model.stream(QUESTION)
    assert sum(rest, start=first).tool_calls == whole.tool_calls


@pytest.mark.parametrize("streaming", [False, True])
def test_a_conversation_with_a_call(make: Make, scripted_url: str, streaming: bool) -> None:
    tool = StructuredTool.from_function(weather)
    model = make(scripted_url, streaming=streaming).bind_tools([tool])
    history: list[Any] = [HumanMessage(QUESTION)]
    history.append(model.invoke(history))
    result = tool.invoke(history[-1].tool_calls[0])
    assert isinstance(result, ToolMessage)
    assert model.invoke([*history, result]).content == TOLD


def test_what_is_wrong_is_the_clients_own_error(make: Make, base_url: str) -> None:
    with pytest.raises(openai.BadRequestError, match="temperature") as bad:
        make(base_url, temperature=9).invoke(QUESTION)
    assert bad.value.param == "temperature"
    with pytest.raises(openai.BadRequestError, match="top_p"):
        list(make(base_url, top_p=0).stream(QUESTION))
    with pytest.raises(langchain_openai.chat_models.base.OpenAIContextOverflowError, match="2048"):
        make(base_url).invoke("too long " * 300)
