"""The official client against a running server."""

import asyncio
from collections.abc import Callable, Iterator

import openai
import pytest

from engine.errors import Overloaded
from tests.fakes import FakeEngine
from tests.server.conftest import Served

Serve = Callable[..., Served]


@pytest.fixture(scope="module")
def client(served: Served) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def async_client(served: Served) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0)


def test_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["fake"]
    assert client.models.retrieve("org/fake-model").owned_by == "outrider"


def test_completion(client: openai.OpenAI) -> None:
    answer = client.completions.create(model="fake", prompt="hi", n=2, logprobs=1, echo=True, max_tokens=3)
    assert [choice.text for choice in answer.choices] == ["hiHel", "hiHel"]
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.tokens == list("hiHel")
    assert logprobs.text_offset == [0, 1, 2, 3, 4]
    assert answer.usage is not None
    assert answer.usage.total_tokens == 8


def test_completion_stream(client: openai.OpenAI) -> None:
    stream = client.completions.create(model="fake", prompt="hi", stream=True)
    assert "".join(chunk.choices[0].text for chunk in stream) == "Hello, world!"


def test_chat(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="fake",
        messages=[{"role": "developer", "content": "Be brief"}, {"role": "user", "content": "hi"}],
        logprobs=True,
        top_logprobs=2,
        seed=1,
        prediction={"type": "content", "content": "Hello, moon!"},
        extra_body={"speculation": {"enabled": True}, "top_k": 5},
    )
    assert answer.choices[0].message.content == "Hello, world!"
    assert answer.choices[0].finish_reason == "stop"
    assert answer.choices[0].logprobs is not None
    assert answer.choices[0].logprobs.content is not None
    assert len(answer.choices[0].logprobs.content[0].top_logprobs) == 2
    assert answer.usage is not None
    assert answer.usage.completion_tokens_details is not None
    assert answer.usage.completion_tokens_details.accepted_prediction_tokens == 7
    assert answer.usage.completion_tokens_details.rejected_prediction_tokens == 5
    assert answer.model_extra is not None
    assert answer.model_extra["speculation"]["steps"] == 5


def test_chat_stream_helper(client: openai.OpenAI) -> None:
    with client.chat.completions.stream(
        model="fake",
        messages=[{"role": "user", "content": "hi"}],
        n=2,
        stream_options={"include_usage": True},
    ) as stream:
        final = stream.get_final_completion()
    assert [choice.message.content for choice in final.choices] == ["Hello, world!"] * 2
    assert final.usage is not None
    assert final.usage.completion_tokens == 26


def test_errors_are_the_clients_own_classes(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="gpt-9") as missing:
        client.completions.create(model="gpt-9", prompt="x")
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as bad:
        client.completions.create(model="fake", prompt="x", temperature=9)
    assert bad.value.param == "temperature"
    with pytest.raises(openai.BadRequestError) as long:
        client.completions.create(model="fake", prompt="x" * 600)
    assert long.value.code == "context_length_exceeded"


def test_an_overloaded_server_is_tried_again(serve: Serve) -> None:
    served = serve(FakeEngine(admission_error=Overloaded("full")))
    with (
        openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=1) as client,
        pytest.raises(openai.InternalServerError) as busy,
    ):
        client.completions.create(model="fake", prompt="x")
    assert busy.value.status_code == 503
    assert len(served.engine.requests) == 2


def test_an_error_frame_raises_in_the_client(serve: Serve) -> None:
    served = serve(FakeEngine(error_after=1))
    with openai.OpenAI(base_url=f"{served.url}/v1", api_key="none") as client:
        stream = client.completions.create(model="fake", prompt="x", stream=True)
        assert next(stream).choices[0].text == "Hel"
        with pytest.raises(openai.APIError, match="the engine loop has ended"):
            next(stream)


def test_async_client_whole_and_streamed_at_once(served: Served) -> None:
    async def talk() -> list[str]:
        async with async_client(served) as client:

            async def whole() -> str:
                answer = await client.chat.completions.create(
                    model="fake", messages=[{"role": "user", "content": "hi"}]
                )
                return answer.choices[0].message.content or ""

            async def streamed() -> str:
                stream = await client.chat.completions.create(
                    model="fake", messages=[{"role": "user", "content": "hi"}], stream=True
                )
                return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

            return list(await asyncio.gather(whole(), streamed(), whole(), streamed()))

    assert asyncio.run(talk()) == ["Hello, world!"] * 4


def test_async_stream_left_early_aborts(serve: Serve) -> None:
    served = serve(FakeEngine(answer=b"x" * 400, step_seconds=0.02))

    async def leave() -> None:
        async with async_client(served) as client:
            stream = await client.completions.create(model="fake", prompt="x", max_tokens=400, stream=True)
            async with stream:
                await anext(aiter(stream))
            for _ in range(200):
                if not served.engine.active:
                    return
                await asyncio.sleep(0.02)

    asyncio.run(leave())
    assert len(served.engine.aborted) == 1
