"""`prompt_logprobs`: what the model thought of the prompt, in vLLM's shape, whatever engine it is read by."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import httpx
import pytest
import torch

from server.app import AppSettings
from server.services.limits import Limits
from tests.engines import build_llm
from tests.fakes import FakeEngine
from tests.server.conftest import Served
from tests.server.engines import serving
from tests.server.sse import chunks
from tests.server.test_validation import error_of
from tests.tiny import IM_END, tiny_model

Serve = Callable[..., Served]
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
TEXT = "one two one two ž one two one"
MESSAGES = [{"role": "user", "content": TEXT}]
# Prompts in chunks of five tokens, drafts beside them, trees beside them, everything at once.
ENGINES: dict[str, dict[str, Any]] = {
    "plain": {},
    "chunks": {"max_num_batched_tokens": 5, "max_num_seqs": 4},
    "ngram": {"method": "ngram"},
    "suffix in chunks": {"method": "suffix", "max_num_batched_tokens": 13},
    "draft_model 3,2,1,1": {"method": "draft_model 3,2,1,1"},
    "eagle 2,2,1": {"method": "eagle 2,2,1", "max_num_batched_tokens": 17},
    "no prefix cache": {"prefix_caching": False},
}


@pytest.fixture(scope="module")
def clients() -> Iterator[Callable[[str], httpx.Client]]:
    with ExitStack() as stack:
        started: dict[str, httpx.Client] = {}

        def client(name: str) -> httpx.Client:
            if name not in started:
                server = stack.enter_context(serving(build_llm(**ENGINES[name])))
                started[name] = stack.enter_context(httpx.Client(base_url=server.url, timeout=60))
            return started[name]

        yield client


def ask(client: httpx.Client, path: str, **options: Any) -> dict[str, Any]:
    body: dict[str, Any] = {"temperature": 0, "max_tokens": 8, "prompt_logprobs": 3, **options}
    body |= {"prompt": TEXT} if path == COMPLETIONS else {"messages": MESSAGES}
    if not body.get("stream"):
        answer = client.post(path, json=body)
        assert answer.status_code == 200, answer.text
        whole: dict[str, Any] = answer.json()
        return whole
    first, *rest = chunks(client.post(path, json=body))
    assert not any("prompt_logprobs" in place for chunk in rest for place in (chunk, *chunk["choices"]))
    return first


def of(answer: dict[str, Any]) -> list[dict[str, Any] | None]:
    found: list[dict[str, Any] | None]
    found = (
        answer
        if "message" in answer["choices"][0] or "delta" in answer["choices"][0]
        else answer["choices"][0]
    )["prompt_logprobs"]
    return found


def prompt_ids(path: str) -> list[int]:
    return list(TEXT.encode()) if path == COMPLETIONS else [*f"user:{TEXT}".encode(), IM_END, *b"assistant:"]


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_they_are_the_models_own(clients: Callable[[str], httpx.Client], path: str) -> None:
    ids = prompt_ids(path)
    logits = tiny_model(attention="eager")(torch.tensor([ids])).logits[0]
    expected = logits.log_softmax(-1)
    first, *others = of(ask(clients("plain"), path))
    assert first is None
    assert len(others) == len(ids) - 1
    for place, (token, found) in enumerate(zip(ids[1:], others, strict=True)):
        assert found is not None
        order = expected[place].argsort(descending=True, stable=True).tolist()
        wanted = dict.fromkeys([token, *order[:3]])
        assert list(found) == [str(each) for each in wanted]
        for each in wanted:
            entry = found[str(each)]
            assert set(entry) == {"logprob", "rank", "decoded_token"}
            assert entry["rank"] == order.index(each) + 1
            assert entry["logprob"] == pytest.approx(expected[place, each].item(), abs=1e-4)
        assert found[str(token)]["decoded_token"] == (
            bytes([token]).decode("utf-8", "replace") if token < 256 else "<|im_end|>"
        )


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.parametrize("engine", ENGINES)
def test_no_engine_changes_them(clients: Callable[[str], httpx.Client], path: str, engine: str) -> None:
    expected = of(ask(clients("plain"), path))
    client = clients(engine)
    before = ask(client, path)
    # The second time the whole prompt is in the prefix cache, and a neighbour has left its drafts.
    again = ask(client, path)
    for answer in (
        before,
        again,
        ask(client, path, stream=True),
        ask(client, path, n=2, seed=1, temperature=1),
    ):
        assert_near(of(answer), expected)
    assert of(again) == of(ask(client, path, stream=True))


def assert_near(found: list[dict[str, Any] | None], expected: list[dict[str, Any] | None]) -> None:
    """The same tokens and ranks; floats may be summed in another order in chunks."""
    assert found[0] is None
    for ours, theirs in zip(found[1:], expected[1:], strict=True):
        assert ours is not None
        assert theirs is not None
        assert list(ours) == list(theirs)
        for token, entry in ours.items():
            assert entry["rank"] == theirs[token]["rank"]
            assert entry["logprob"] == pytest.approx(theirs[token]["logprob"], abs=1e-5)


def test_the_first_choice_of_each_prompt_has_them(clients: Callable[[str], httpx.Client]) -> None:
    body = {"prompt": ["one", "two 2"], "n": 2, "max_tokens": 3, "prompt_logprobs": 0, "seed": 1}
    choices = clients("ngram").post(COMPLETIONS, json=body).json()["choices"]
    assert [len(choice.get("prompt_logprobs") or ()) for choice in choices] == [3, 0, 5, 0]
    assert choices[0]["prompt_logprobs"][0] is None
    assert all(len(entry) == 1 for entry in choices[2]["prompt_logprobs"][1:])


def test_beside_echo_each_has_its_own_number(clients: Callable[[str], httpx.Client]) -> None:
    client = clients("plain")
    for logprobs, number in ((1, 3), (3, 1), (2, 0)):
        choice = ask(client, COMPLETIONS, echo=True, logprobs=logprobs, prompt_logprobs=number)["choices"][0]
        tops = choice["logprobs"]["top_logprobs"][1 : len(TEXT)]
        assert {len(top) for top in tops} <= {logprobs, logprobs + 1}
        assert {len(entry) for entry in choice["prompt_logprobs"][1:]} <= {max(1, number), number + 1}
    alone = ask(client, COMPLETIONS, echo=True)["choices"][0]
    assert alone["logprobs"] is None
    assert alone["text"].startswith(TEXT)
    assert len(alone["prompt_logprobs"]) == len(TEXT.encode())


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_only_who_asks_gets_them(served: Served, path: str) -> None:
    for extra in ({}, {"prompt_logprobs": None}):
        body = {"prompt": "x", **extra} if path == COMPLETIONS else {"messages": MESSAGES, **extra}
        answer = served.http.post(path, json=body).json()
        assert "prompt_logprobs" not in answer
        assert "prompt_logprobs" not in answer["choices"][0]
        assert served.engine.requests[-1].params.prompt_logprobs is None


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.parametrize("value", [-1, 21, "3", True, 1.5])
def test_numbers_that_make_no_sense(served: Served, path: str, value: Any) -> None:
    good: dict[str, Any] = {"prompt": "x"} if path == COMPLETIONS else {"messages": MESSAGES}
    error = error_of(served.http.post(path, json={**good, "prompt_logprobs": value}))
    assert error["param"] == "prompt_logprobs"


def test_there_is_a_limit(serve: Serve) -> None:
    served = serve(FakeEngine(max_model_len=100_000), AppSettings(served_model_name="fake", max_logprobs=5))
    most = Limits(5, 1).max_prompt_logprobs
    fits = {"prompt": [1] * (most // 2), "prompt_logprobs": 1, "max_tokens": 1}
    answer = served.http.post(COMPLETIONS, json=fits)
    assert len(answer.json()["choices"][0]["prompt_logprobs"]) == most // 2
    for body in (
        {**fits, "prompt_logprobs": 2},
        {**fits, "prompt": [[1] * (most // 2), [1]]},
        {**fits, "echo": True, "logprobs": 1, "n": 2},
    ):
        error = error_of(served.http.post(COMPLETIONS, json=body))
        assert error["param"] == "prompt_logprobs"
        assert str(most) in error["message"]
    error = error_of(served.http.post(COMPLETIONS, json={"prompt": "x", "prompt_logprobs": 6}))
    assert error["message"] == "prompt_logprobs is at most 5 on this server, got 6"
