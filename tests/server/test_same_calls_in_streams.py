"""Calls of functions and thoughts, streamed and whole, of an engine that commits many tokens per step."""

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from engine.model.loader import wrap_model
from tests.engines import build_llm
from tests.forced import force
from tests.operators import operators
from tests.server.engines import serving
from tests.server.sse import chunks
from tests.tiny import EOS, byte_tokenizer, tiny_model

CITY = 'Žluťouč \\"ke\u0301\\" 你好 👩‍👩‍👧 {[<,;'
F, G = f'{{"city": "{CITY}", "days": [1, {{"n": -2.5}}]}}', "{}"
# Per model what its template has, which marks are special tokens, and what it says.
MODELS: dict[str, tuple[str, list[str], str]] = {
    "hermes": (
        "<tool_call>",
        [],
        f'Hm, ž <tool_\n\n<tool_call>\n{{"name": "f", "arguments": {F}}}\n</tool_call>\n'
        f'<tool_call>\n{{"arguments": {G}, "name": "g"}}\n</tool_call> so. ',
    ),
    "hermes, marks are special": (
        "<tool_call>",
        ["<tool_call>", "</tool_call>"],
        f'<tool_call>\n{{"name": "f", "arguments": {F}}}\n</tool_call>\n<tool_call>oops</tool_call> 你',
    ),
    "mistral": (
        "[TOOL_CALLS]",
        ["[TOOL_CALLS]"],
        f'é [TOOL_CALLS] [{{"name": "f", "arguments": {F}}}, {{"name": "g", "arguments": {G}}}]',
    ),
    "mistral_args": (
        "[TOOL_CALLS][ARGS]",
        ["[TOOL_CALLS]", "[ARGS]"],
        f"好 [TOOL_CALLS]g[ARGS]{G}[TOOL_CALLS]f[ARGS]{F}",
    ),
    "llama3_json": ("'parameters':", [], f'{{"name": "f", "parameters": {F}}}; {{"name": "g"}}'),
    "thoughts": (
        "<tool_call></think>",
        [],
        '<think>\nWhat, "ž" 你?</think>\n\nSo:\n'
        f'<tool_call>\n{{"name": "f", "arguments": {F}}}\n</tool_call>',
    ),
}
OPTIONS: dict[str, dict[str, Any]] = {
    "as it comes": {},
    "one token at a time": {"speculation": {"enabled": False}},
    "several": {"n": 3},
    "one call": {"parallel_tool_calls": False},
    "no tools": {"tool_choice": "none"},
    "a stop string within": {"stop": ["你好 👩", "</tool"]},
    "a stop string, kept": {"stop": ["city"], "include_stop_str_in_output": True},
    "special tokens shown": {"skip_special_tokens": False, "return_token_ids": True},
    "prompt and all": {"prompt_logprobs": 1, "return_token_ids": True},
    "thoughts left in": {"separate_reasoning": False},
    **{f"cut at {limit}": {"max_tokens": limit} for limit in (1, 5, 18, 31, 44, 47, 61, 75, 99, 120)},
}
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "array"}}}
TOOLS = [
    {"type": "function", "function": {"name": "f", "parameters": PARAMETERS}},
    {"type": "function", "function": {"name": "g"}},
]
MESSAGES = [{"role": "user", "content": "Go!"}]


@pytest.fixture(scope="module", params=MODELS)
def http(request: pytest.FixtureRequest) -> Iterator[httpx.Client]:
    marks, special, said = MODELS[request.param]
    tokenizer = byte_tokenizer()
    tokenizer.add_tokens(special, special_tokens=True)
    # The prompt is the same with tools and without, so that one script serves both.
    tokenizer.chat_template = f"{{% if false %}}tools {marks}{{% endif %}}Go on:"
    module = tiny_model(vocab_size=len(tokenizer), max_position_embeddings=640)
    model = wrap_model(module, tokenizer, name="tiny", max_model_len=640, operators=operators())
    llm = build_llm("ngram", target=model, num_draft_tokens=8, num_kv_blocks=800)
    force(llm, llm.tokenizer.encode("Go on:"), llm.tokenizer.encode(said), EOS)
    with (
        serving(llm) as server,
        httpx.Client(base_url=server.url, timeout=60, headers={"said": json.dumps(said)}) as client,
    ):
        yield client


@pytest.mark.parametrize("option", OPTIONS)
def test_a_stream_says_what_the_whole_answer_says(http: httpx.Client, option: str) -> None:
    said = json.loads(http.headers["said"])
    prediction = {"type": "content", "content": said}
    body = {"messages": MESSAGES, "tools": TOOLS, "seed": 5, "logprobs": True, "top_logprobs": 1}
    body |= {"prediction": prediction, **OPTIONS[option]}
    whole = http.post("/v1/chat/completions", json=body)
    assert whole.status_code == 200, whole.text
    answer = whole.json()
    options = {"include_usage": True, "continuous_usage_stats": True}
    streamed = http.post("/v1/chat/completions", json={**body, "stream": True, "stream_options": options})
    *events, last = chunks(streamed)
    assert joined(events) == told(answer)
    usage = answer["usage"]
    assert last["choices"] == []
    # The second request finds more in the prefix cache.
    for found in (usage, last["usage"], events[-1]["usage"]):
        found.pop("prompt_tokens_details")
    assert last["usage"] == events[-1]["usage"] == usage
    if option == "as it comes":
        assert len(events) < len(said.encode()) / 4, "several tokens come in one chunk"


def test_the_calls_are_as_they_should_be(http: httpx.Client) -> None:
    body = {"messages": MESSAGES, "tools": TOOLS, "seed": 5}
    message = http.post("/v1/chat/completions", json=body).json()["choices"][0]["message"]
    calls = {call["function"]["name"]: call["function"]["arguments"] for call in message["tool_calls"]}
    assert calls["f"] == F
    assert calls.get("g", G) == G


def told(answer: dict[str, Any]) -> dict[str, Any]:
    """What an answer says, without what differs from call to call."""
    kept = ("choices", "prompt_token_ids", "prompt_logprobs")
    return {key: answer[key] for key in kept if key in answer}


def joined(events: list[dict[str, Any]]) -> dict[str, Any]:
    """The answer that the chunks of a stream add up to."""
    parts: dict[int, list[dict[str, Any]]] = {}
    whole: dict[str, Any] = {}
    for event in events:
        for key in ("prompt_token_ids", "prompt_logprobs"):
            if key in event:
                assert key not in whole, "it comes once"
                whole[key] = event[key]
        for choice in event["choices"]:
            parts.setdefault(choice["index"], []).append(choice)
    return {"choices": [choice_of(parts[index]) for index in sorted(parts)], **whole}


def choice_of(parts: list[dict[str, Any]]) -> dict[str, Any]:
    assert [part["finish_reason"] for part in parts[:-1]] == [None] * (len(parts) - 1)
    choice = {key: parts[-1][key] for key in ("index", "finish_reason", "stop_reason")}
    deltas = [part["delta"] for part in parts]
    contents = [delta["content"] for delta in deltas if delta.get("content") is not None]
    message = {"role": deltas[0]["role"], "content": "".join(contents) if contents else None, "refusal": None}
    if thoughts := "".join(delta.get("reasoning_content") or "" for delta in deltas):
        message["reasoning_content"] = thoughts
    calls: list[dict[str, Any]] = []
    for call in (call for delta in deltas for call in delta.get("tool_calls") or ()):
        if "id" in call:
            assert call["index"] == len(calls)
            function = {"name": call["function"]["name"], "arguments": ""}
            calls.append({"id": call["id"], "type": call["type"], "function": function})
        calls[call["index"]]["function"]["arguments"] += call["function"]["arguments"]
    if calls:
        message["tool_calls"] = calls
    choice["message"] = message
    choice["logprobs"] = {"content": [entry for part in parts for entry in part["logprobs"]["content"]]}
    if "token_ids" in parts[0]:
        choice["token_ids"] = [token for part in parts for token in part["token_ids"]]
    return choice
