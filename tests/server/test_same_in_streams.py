"""Streamed and whole answers of an engine that commits many tokens per step are the same, byte for byte."""

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from engine.llm import LLM
from tests.engines import build_llm, load_tiny
from tests.forced import force
from tests.server.engines import serving
from tests.server.sse import chunks
from tests.tiny import BOS, EOS, IM_END

PROMPT = "Say it:"
# Characters of one to four bytes, combining marks, a joined emoji, a stop string, special tokens, repetition.
SAID = "Žluťoučký ke\u0301z\u030c 你好 👩‍👩‍👧 one two one two STOPPED one two 你好 "
TOKENS = [*SAID[:20].encode(), BOS, *SAID[20:].encode(), BOS, *SAID.encode(), 0xF0, 0x9F]
MAX_MODEL_LEN = 640

OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "predicted": {"prediction": {"type": "content", "content": SAID + SAID}},
    "predicted, one at a time": {"speculation": {"enabled": False}},
    "stop": {"stop": ["STOPPED"]},
    "stop within a chunk, kept": {"stop": ["STOP", "好 👩"], "include_stop_str_in_output": True},
    "stop that never comes": {"stop": ["one two three", "\u0301\u0301"]},
    "stop by a token": {"stop_token_ids": [BOS]},
    "special tokens shown": {"skip_special_tokens": False},
    "special tokens shown, stop across one": {"skip_special_tokens": False, "stop": ["bos>\u200d", "🙂"]},
    "cut inside a character": {"max_tokens": 23},
    "token ids": {"return_token_ids": True},
    "of the prompt, too": {"prompt_logprobs": 2, "return_token_ids": True},
    "several": {"n": 3, "stop": ["two S"], "prediction": {"type": "content", "content": SAID}},
    "min_tokens": {"min_tokens": 70, "stop": ["one"]},
    "sampled": {"temperature": 0.7, "seed": 3, "top_k": 3, "frequency_penalty": 0.1},
}


# What one endpoint has.
ECHOES: dict[str, dict[str, Any]] = {
    "echo": {"echo": True},
    "echo of all": {"echo": True, "n": 2, "prompt_logprobs": 1, "return_token_ids": True},
    "echo alone": {"echo": True, "max_tokens": 0},
    "echo, cut inside a character": {"echo": True, "max_tokens": 23},
}
# What responses do not have.
CHAT_ALONE = ("token ids", "of the prompt, too", "several")
CASES = [
    *((endpoint, option) for option in OPTIONS for endpoint in ("chat", "completions")),
    *(("completions", option) for option in ECHOES),
]


@pytest.fixture(scope="module")
def http() -> Iterator[httpx.Client]:
    model = load_tiny(max_model_len=MAX_MODEL_LEN, max_position_embeddings=MAX_MODEL_LEN)
    llm: LLM = build_llm("ngram", target=model, num_draft_tokens=8, num_kv_blocks=800)
    # Both endpoints read prompts of one length, so that one script serves both.
    force(llm, prompt_ids(), TOKENS, EOS)
    with serving(llm) as server, httpx.Client(base_url=server.url, timeout=60) as client:
        yield client


def prompt_ids() -> list[int]:
    return [*f"user:{PROMPT}".encode(), IM_END, *b"assistant:"]


def request(endpoint: str, options: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    body = {"temperature": 0, **options}
    if endpoint == "chat":
        messages = [{"role": "user", "content": PROMPT}]
        return "/v1/chat/completions", {"messages": messages, "logprobs": True, "top_logprobs": 2, **body}
    return "/v1/completions", {"prompt": prompt_ids(), "logprobs": 2, "max_tokens": 500, **body}


@pytest.mark.parametrize(("endpoint", "option"), CASES)
def test_a_stream_says_what_the_whole_answer_says(http: httpx.Client, endpoint: str, option: str) -> None:
    path, body = request(endpoint, (OPTIONS | ECHOES)[option])
    whole = http.post(path, json=body)
    assert whole.status_code == 200, whole.text
    streamed = http.post(path, json={**body, "stream": True, "stream_options": {"include_usage": True}})
    *events, last = chunks(streamed)
    answer = whole.json()
    expected = [essence(choice) for choice in answer["choices"]]
    assert [essence(joined(events, index)) for index in range(len(expected))] == expected
    usage, told = answer["usage"], last["usage"]
    # The second request finds more in the prefix cache.
    usage.pop("prompt_tokens_details"), told.pop("prompt_tokens_details")
    assert told == usage
    for choice in answer["choices"]:
        text = choice.get("text") or choice["message"]["content"]
        assert text.encode().decode() == text
    if option == "predicted":
        assert len(events) < len(TOKENS) / 8, "several tokens come in one chunk, or this says nothing of them"


@pytest.mark.parametrize("option", [name for name in OPTIONS if name not in CHAT_ALONE])
def test_a_response_says_what_chat_says_whole_and_streamed(http: httpx.Client, option: str) -> None:
    path, body = request("chat", OPTIONS[option])
    choice = http.post(path, json=body).json()["choices"][0]
    asked = {"input": PROMPT, "include": ["message.output_text.logprobs"], "top_logprobs": 2, **body}
    for name in ("messages", "logprobs"):
        del asked[name]
    if "max_tokens" in asked:
        asked["max_output_tokens"] = asked.pop("max_tokens")
    whole = http.post("/v1/responses", json=asked)
    assert whole.status_code == 200, whole.text
    [message] = whole.json()["output"]
    [part] = message["content"]
    assert part["text"] == choice["message"]["content"]
    assert part["logprobs"] == choice["logprobs"]["content"]
    assert whole.json()["status"] == ("incomplete" if choice["finish_reason"] == "length" else "completed")
    streamed = http.post("/v1/responses", json={**asked, "stream": True})
    events = [json.loads(line[6:]) for line in streamed.text.split("\n") if line.startswith("data: ")]
    deltas = [event for event in events if event["type"] == "response.output_text.delta"]
    assert "".join(delta["delta"] for delta in deltas) == part["text"]
    assert [entry for delta in deltas for entry in delta["logprobs"]] == part["logprobs"]
    assert events[-1]["response"]["output"][0]["content"] == [part]


def test_the_texts_are_as_they_should_be(http: httpx.Client) -> None:
    def text(**options: Any) -> str:
        path, body = request("chat", options)
        answer: str = http.post(path, json=body).json()["choices"][0]["message"]["content"]
        return answer

    whole = SAID + SAID + "\ufffd"
    assert text() == whole
    assert text(stop=["STOPPED"]) == SAID[: SAID.index("STOPPED")]
    assert text(stop_token_ids=[BOS]) == SAID[:20]
    shown = f"{SAID[:20]}<bos>{SAID[20:]}<bos>{SAID}\ufffd<eos>"
    assert text(skip_special_tokens=False) == shown
    across = ["bos>\u200d", "\U0001f642"]
    assert text(skip_special_tokens=False, stop=across) == shown[: shown.index(across[0])]
    cut = text(max_tokens=2)
    assert cut == "Ž"
    assert text(max_tokens=1) == "\ufffd"


def joined(events: list[dict[str, Any]], index: int) -> dict[str, Any]:
    """A choice put together from its chunks."""
    parts = [c for event in events for c in event["choices"] if c["index"] == index]
    whole: dict[str, Any] = {key: parts[-1][key] for key in ("index", "finish_reason", "stop_reason")}
    if "text" in parts[0]:
        whole["text"] = "".join(part["text"] for part in parts)
    else:
        content = "".join(part["delta"].get("content") or "" for part in parts)
        whole["message"] = {"role": parts[0]["delta"]["role"], "content": content}
    logprobs = [part["logprobs"] for part in parts if part["logprobs"]]
    whole["logprobs"] = {key: [item for each in logprobs for item in each[key]] for key in logprobs[0]}
    whole |= {key: parts[0][key] for key in ("prompt_token_ids", "prompt_logprobs") if key in parts[0]}
    if any("token_ids" in part for part in parts):
        whole["token_ids"] = [token for part in parts for token in part["token_ids"]]
    return whole


def essence(choice: dict[str, Any]) -> str:
    """What both ways of answering have in common, as bytes would have it."""
    kept = dict(choice)
    if "message" in kept:
        kept["message"] = {key: kept["message"][key] for key in ("role", "content")}
    return json.dumps(kept, sort_keys=True, ensure_ascii=True)
