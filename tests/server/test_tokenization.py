"""POST /tokenize and /detokenize, GET /version, and what a server of text does not have."""

from collections.abc import Callable
from typing import Any

import httpx
import openai
import pytest

from server import __version__
from server.errors import OTHER_KINDS
from tests.fakes import BOS, FakeEngine
from tests.server.conftest import Served
from tests.server.test_validation import error_of

Serve = Callable[..., Served]


def ask(served: Served, path: str, body: dict[str, Any]) -> httpx.Response:
    return served.http.post(path, json=body)


def test_a_text_and_its_tokens(serve: Serve) -> None:
    served = serve(FakeEngine(add_bos=True))
    answer = ask(served, "/tokenize", {"prompt": "h\u00e9", "return_token_strs": True}).json()
    assert answer == {
        "count": 4,
        "max_model_len": 512,
        "tokens": [BOS, *"h\u00e9".encode()],
        "token_strs": ["<s>", "h", "\ufffd", "\ufffd"],
    }
    plain = ask(
        served, "/tokenize", {"prompt": "h\u00e9", "add_special_tokens": False, "model": "fake"}
    ).json()
    assert plain["tokens"] == list("h\u00e9".encode())
    assert "token_strs" not in plain
    assert ask(served, "/tokenize", {"prompt": ""}).json()["tokens"] == [BOS]
    assert ask(served, "/detokenize", {"tokens": answer["tokens"]}).json() == {"prompt": "<s>h\u00e9"}
    assert ask(served, "/detokenize", {"tokens": []}).json() == {"prompt": ""}


def test_a_conversation_is_what_the_chat_endpoint_would_read(served: Served) -> None:
    messages = [{"role": "user", "content": [{"type": "text", "text": "hi"}]}]
    tokens = ask(served, "/tokenize", {"messages": messages}).json()["tokens"]
    chat = served.http.post("/v1/chat/completions", json={"messages": messages, "return_token_ids": True})
    assert tokens == chat.json()["prompt_token_ids"] == list(b"user:hi\nassistant:")


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": [{"role": "user", "content": "a"}]}, "prompt"),
        ("/tokenize", {"prompt": ["a"]}, "prompt"),
        ("/tokenize", {"messages": []}, "messages"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens"),
        ("/detokenize", {"tokens": [259]}, "tokens"),
        ("/detokenize", {"tokens": ["1"]}, "tokens"),
    ],
)
def test_bad_requests(served: Served, path: str, body: dict[str, Any], param: str) -> None:
    assert error_of(ask(served, path, body))["param"] == param


@pytest.mark.parametrize(("path", "body"), [("/tokenize", {"prompt": "a"}), ("/detokenize", {"tokens": [1]})])
def test_another_models_tokens_are_not_to_be_had(served: Served, path: str, body: dict[str, Any]) -> None:
    assert error_of(ask(served, path, {**body, "model": "other"}), 404)["code"] == "model_not_found"


def test_the_version(served: Served) -> None:
    assert served.http.get("/version").json() == {"version": __version__}


@pytest.mark.parametrize("kind", OTHER_KINDS)
def test_other_kinds_of_model_are_404s_that_say_so(served: Served, kind: str) -> None:
    for path in (f"/v1/{kind}", f"/v1/{kind}/more"):
        error = error_of(served.http.post(path, json={}), 404)
        assert "this server's model generates text" in error["message"]
        assert error["code"] == "not_found"


def test_the_official_client_is_told(served: Served) -> None:
    with openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as client:
        with pytest.raises(openai.NotFoundError, match="no model of embeddings"):
            client.embeddings.create(model="fake", input="x")
        with pytest.raises(openai.NotFoundError, match="no model of moderation"):
            client.moderations.create(input="x")
        with pytest.raises(openai.NotFoundError, match="there is no model 'other' here"):
            client.models.retrieve("other")
        assert client.models.retrieve("fake").id == "fake"
