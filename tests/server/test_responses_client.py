"""/v1/responses through the official client: a written-down engine, and a tiny model with a draft model."""

import asyncio
import json
from collections.abc import Callable, Iterator
from typing import Any, Literal

import openai
import pytest
from pydantic import BaseModel, Field

from engine.errors import RequestFailed
from engine.model.loaded_model import LoadedModel
from engine.model.loader import wrap_model
from tests.engines import add_noise, build_llm
from tests.fakes import FakeEngine
from tests.operators import operators
from tests.server.conftest import Served
from tests.server.engines import serving
from tests.server.test_reasoning import TEMPLATE as THINK_TEMPLATE
from tests.server.test_tools import HERMES_TEMPLATE, SHOW_MESSAGES, TWO_CALLS, client_of, talking
from tests.tiny import byte_tokenizer, tiny_model

Serve = Callable[..., Served]

PLACES = 4096


class Plan(BaseModel):
    """Where to go."""

    direction: Literal["up", "down"]
    steps: int = Field(ge=0, le=99)


class Weather(BaseModel):
    """Tells the weather."""

    city: Literal["Brno", "Praha"]
    days: int = Field(ge=1, le=7)


def test_a_response(served: Served) -> None:
    with client_of(served) as client:
        answer = client.responses.create(
            model="fake",
            instructions="Be brief",
            input="hi",
            include=["message.output_text.logprobs"],
            top_logprobs=2,
            metadata={"a": "b"},
            extra_body={"seed": 1, "top_k": 5},
        )
    assert (answer.output_text, answer.status) == ("Hello, world!", "completed")
    assert answer.output[0].type == "message"
    part = answer.output[0].content[0]
    assert part.type == "output_text"
    assert part.logprobs is not None
    assert [len(entry.top_logprobs) for entry in part.logprobs] == [2] * 13
    assert answer.usage is not None
    assert answer.usage.total_tokens == answer.usage.input_tokens + 13
    assert answer.usage.output_tokens_details.reasoning_tokens == 0
    assert answer.metadata == {"a": "b"}
    assert answer.model_extra is not None
    assert answer.model_extra["speculation"]["steps"] == 5


def test_a_stream(served: Served) -> None:
    with client_of(served) as client:
        events = list(client.responses.create(model="fake", input="hi", stream=True))
        assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == (
            "Hello, world!"
        )
        assert events[-1].type == "response.completed"
        assert events[-1].response.output_text == "Hello, world!"
        assert client.responses.retrieve(events[-1].response.id).output_text == "Hello, world!"


def test_the_stream_helper_reads_thoughts_text_and_calls(serve: Serve) -> None:
    said = f"<think>Which one?</think>\n{TWO_CALLS}"
    engine = talking(answer=said.encode(), chat_template=HERMES_TEMPLATE + THINK_TEMPLATE)
    tools: Any = [
        {"type": "function", "name": name, "parameters": {"type": "object"}, "strict": False}
        for name in ("weather", "clock")
    ]
    asked: Any = {"model": "fake", "input": "hi", "tools": tools, "extra_body": {"seed": 1}}
    with client_of(serve(engine)) as client:
        whole = client.responses.create(**asked)
        with client.responses.stream(**asked) as stream:
            snapshots = [
                event.snapshot for event in stream if event.type == "response.function_call_arguments.delta"
            ]
            final = stream.get_final_response()
    assert [item.type for item in whole.output] == ["reasoning", "message", "function_call", "function_call"]
    assert final.output_text == whole.output_text == "Let me see."
    calls = [item for item in final.output if item.type == "function_call"]
    assert [(call.name, call.call_id) for call in calls] == [
        (item.name, item.call_id) for item in whole.output if item.type == "function_call"
    ]
    assert json.loads(calls[0].arguments) == {"city": 'Brno{"', "days": 2}
    assert calls[1].arguments == snapshots[-1]
    assert len(snapshots) > 4


def test_the_async_client(served: Served) -> None:
    async def talk() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as client:

            async def whole() -> str:
                return (await client.responses.create(model="fake", input="hi")).output_text

            async def streamed() -> str:
                stream = await client.responses.create(model="fake", input="hi", stream=True)
                return "".join(
                    [event.delta async for event in stream if event.type == "response.output_text.delta"]
                )

            async def helped() -> str:
                async with client.responses.stream(model="fake", input="hi") as stream:
                    return (await stream.get_final_response()).output_text

            return list(await asyncio.gather(whole(), streamed(), helped()))

    assert asyncio.run(talk()) == ["Hello, world!"] * 3


def test_a_conversation_that_the_server_keeps(serve: Serve) -> None:
    served = serve()
    with client_of(served) as client:
        first = client.responses.create(model="fake", input="one")
        second = client.responses.create(model="fake", input="two", previous_response_id=first.id)
        assert second.previous_response_id == first.id
        assert len(served.engine.conversations[-1]) == 3
        client.responses.delete(first.id)
        with pytest.raises(openai.NotFoundError) as gone:
            client.responses.retrieve(first.id)
        assert gone.value.code == "response_not_found"
        with pytest.raises(openai.NotFoundError) as missing:
            client.responses.create(model="fake", input="two", previous_response_id=first.id)
        assert missing.value.param == "previous_response_id"
        with pytest.raises(openai.BadRequestError) as bad:
            client.responses.create(model="fake", input="x", tools=[{"type": "web_search"}])
        assert bad.value.param == "tools[0].type"


def test_limits_and_failures_are_events(serve: Serve) -> None:
    with client_of(serve()) as client:
        cut = client.responses.create(model="fake", input="hi", max_output_tokens=4)
        assert cut.incomplete_details is not None
        assert (cut.output_text, cut.incomplete_details.reason) == ("Hell", "max_output_tokens")
    with client_of(serve(FakeEngine(error_after=1, error=RequestFailed("no luck")))) as client:
        *_, last = client.responses.create(model="fake", input="hi", stream=True)
        assert last.type == "response.failed"
        assert last.response.error is not None
        assert last.response.error.message == "no luck"


@pytest.fixture(scope="module")
def client() -> Iterator[openai.OpenAI]:
    """A model that obeys grammars alone, behind a template that knows tools."""
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = HERMES_TEMPLATE + SHOW_MESSAGES

    def load(noise: float = 0.0) -> LoadedModel:
        module = tiny_model(vocab_size=len(tokenizer), max_position_embeddings=PLACES)
        add_noise(module, noise)
        return wrap_model(module, tokenizer, name="tiny", max_model_len=PLACES, operators=operators())

    llm = build_llm("draft_model 2,1,1", target=load(), draft=load(0.1), num_kv_blocks=2048)
    with (
        serving(llm) as server,
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client,
    ):
        yield client


def test_it_says_what_chat_says(client: openai.OpenAI) -> None:
    options: Any = {"model": "tiny", "temperature": 0.8}
    extra = {"seed": 5}
    chat = client.chat.completions.create(
        **options,
        messages=[{"role": "system", "content": "Be"}, {"role": "user", "content": "one two one two"}],
        max_tokens=40,
        extra_body=extra,
    )
    text = chat.choices[0].message.content
    asked: Any = {**options, "instructions": "Be", "input": "one two one two", "max_output_tokens": 40}
    for enabled in (True, False):
        own = {**extra, "speculation": {"enabled": enabled}}
        whole = client.responses.create(**asked, extra_body=own)
        assert whole.output_text == text
        events = client.responses.create(**asked, stream=True, extra_body=own)
        assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == text
    assert chat.usage is not None
    assert whole.usage is not None
    assert whole.usage.input_tokens == chat.usage.prompt_tokens
    assert whole.usage.output_tokens == chat.usage.completion_tokens


def test_the_parse_helper(client: openai.OpenAI) -> None:
    asked: Any = {"model": "tiny", "input": "Where to?", "text_format": Plan}
    for seed in (1, 2):
        whole = client.responses.parse(**asked, extra_body={"seed": seed})
        assert isinstance(whole.output_parsed, Plan)
        plain = client.responses.parse(**asked, extra_body={"seed": seed, "speculation": {"enabled": False}})
        assert plain.output_text == whole.output_text
        with client.responses.stream(**asked, extra_body={"seed": seed}) as stream:
            assert stream.get_final_response().output_parsed == whole.output_parsed


def test_the_loop_of_an_agent(client: openai.OpenAI) -> None:
    """A call that is required, its result, and an answer: kept by the server and kept by the client alike."""
    tools: Any = [openai.pydantic_function_tool(Weather, name="weather")]
    asked: Any = {"model": "tiny", "tools": tools, "parallel_tool_calls": False, "extra_body": {"seed": 3}}
    first = client.responses.parse(**asked, input="How warm is it?", tool_choice="required")
    [call] = first.output
    assert call.type == "function_call"
    assert isinstance(call.parsed_arguments, Weather)
    result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "20 degrees"}
    rest: Any = {"tool_choice": "none", "max_output_tokens": 20}
    kept = client.responses.parse(**asked, **rest, input=[result], previous_response_id=first.id)
    spoken: Any = {"role": "user", "content": "How warm is it?"}
    sent: Any = call.model_dump(exclude={"parsed_arguments"}, exclude_none=True)
    by_hand = client.responses.parse(**asked, **rest, input=[spoken, sent, result])
    assert kept.output_text == by_hand.output_text
    assert kept.usage is not None
    assert by_hand.usage is not None
    assert kept.usage.input_tokens == by_hand.usage.input_tokens
    assert by_hand.usage.input_tokens_details.cached_tokens > by_hand.usage.input_tokens // 2
