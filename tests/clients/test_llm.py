"""Simon Willison's llm, told of the server the way its manual says: in extra-openai-models.yaml."""

import asyncio
from pathlib import Path
from typing import Any

import openai
import pytest
import yaml

from tests.clients.asking import MODEL, QUESTION, TALK, TOLD, Point, asked_plainly, weather

llm = pytest.importorskip("llm", reason="llm is not installed; make test-clients does that")

# It makes a client for each prompt and closes none.
pytestmark = [
    pytest.mark.usefixtures("untidy", "configured"),
    pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning"),
]

ASKED = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": QUESTION}]


@pytest.fixture
def configured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, base_url: str, scripted_url: str) -> None:
    served = {"ours": base_url, "scripted": scripted_url}
    models = [
        {
            "model_id": name,
            "model_name": MODEL,
            "api_base": url,
            "supports_schema": True,
            "supports_tools": True,
        }
        for name, url in served.items()
    ]
    models.append({"model_id": "wrong", "model_name": "gpt-9", "api_base": base_url})
    (tmp_path / "extra-openai-models.yaml").write_text(yaml.safe_dump(models))
    monkeypatch.setenv("LLM_USER_PATH", str(tmp_path))


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_with_usage(base_url: str, stream: bool) -> None:
    response = llm.get_model("ours").prompt(QUESTION, system="Be brief.", stream=stream, **TALK)
    expected = asked_plainly(base_url, messages=ASKED, **TALK)
    assert "".join(response) == response.text() == expected["choices"][0]["message"]["content"] != ""
    usage = response.usage()
    assert usage.input == expected["usage"]["prompt_tokens"] > 1
    assert usage.output == expected["usage"]["completion_tokens"] > 1


def test_an_async_answer(base_url: str) -> None:
    async def ask() -> Any:
        return await llm.get_async_model("ours").prompt(QUESTION, system="Be brief.", **TALK).text()

    expected = asked_plainly(base_url, messages=ASKED, **TALK)
    assert asyncio.run(ask()) == expected["choices"][0]["message"]["content"]


def test_structured_output(base_url: str) -> None:
    response = llm.get_model("ours").prompt(QUESTION, schema=Point, seed=1)
    Point.model_validate_json(response.text(), strict=True)
    # What a tiny model puts into an object has no end.
    response = llm.get_model("ours").prompt(QUESTION, system="Be brief.", json_object=True, **TALK)
    expected = asked_plainly(base_url, messages=ASKED, response_format={"type": "json_object"}, **TALK)
    assert response.text() == expected["choices"][0]["message"]["content"]
    assert response.text().startswith("{")


@pytest.mark.parametrize("stream", [False, True])
def test_it_runs_a_conversation_with_a_call(stream: bool) -> None:
    chain = llm.get_model("scripted").chain(QUESTION, tools=[weather], stream=stream)
    assert chain.text() == TOLD
    first, second = chain._responses
    assert [(call.name, call.arguments) for call in first.tool_calls()] == [
        ("weather", {"city": "Brno", "days": 2})
    ]
    assert second.tool_calls() == []


def test_what_is_wrong_is_the_clients_own_error() -> None:
    with pytest.raises(openai.BadRequestError, match="max_tokens") as bad:
        llm.get_model("ours").prompt(QUESTION, max_tokens=5000, stream=False).text()
    assert bad.value.code == "context_length_exceeded"
    with pytest.raises(openai.NotFoundError, match="gpt-9"):
        llm.get_model("wrong").prompt(QUESTION).text()
