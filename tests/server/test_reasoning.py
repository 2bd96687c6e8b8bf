"""Thoughts of think-tag models come as reasoning_content, whole or in pieces of any size."""

from collections.abc import Callable
from typing import Any

import pytest

from server.services.reasoning import ReasoningSplitter
from tests.fakes import FakeEngine
from tests.server.conftest import Served
from tests.server.sse import chunks
from tests.server.test_validation import PATHS

Serve = Callable[..., Served]
TEMPLATE = "... {{ content.split('</think>')[-1] }} ..."

CASES = [
    (False, "<think>\nwhy not?\n</think>\n\nYes.", "why not?\n", "Yes."),
    (False, "\n<think>a</think>b", "a", "b"),
    (False, "Yes, <think> is a tag.", "", "Yes, <think> is a tag."),
    (False, " <thin", "", " <thin"),
    (False, "<think></think>Yes", "", "Yes"),
    (False, "<think>never ends </thi", "never ends </thi", ""),
    (False, "", "", ""),
    (True, "\nstill </ thinking </think>\nYes </think>", "still </ thinking ", "Yes </think>"),
    (True, "<think>x</think>y", "<think>x", "y"),
    (True, "cut", "cut", ""),
]


@pytest.mark.parametrize(("is_open", "text", "reasoning", "content"), CASES)
@pytest.mark.parametrize("size", [1, 2, 3, 7, 99])
def test_pieces_of_any_size_are_split_alike(
    is_open: bool, text: str, reasoning: str, content: str, size: int
) -> None:
    splitter = ReasoningSplitter(is_open=is_open)
    parts = [splitter.feed(text[place : place + size]) for place in range(0, len(text), size)]
    parts.append(splitter.finish())
    assert "".join(part.reasoning for part in parts) == reasoning
    assert "".join(part.content for part in parts) == content


def ask(served: Served, **fields: Any) -> Any:
    body = {"messages": [{"role": "user", "content": "hi"}], **fields}
    return served.http.post(PATHS["chat"], json=body)


@pytest.mark.parametrize("per_step", [1, 3, 50])
def test_over_http(serve: Serve, per_step: int) -> None:
    engine = FakeEngine(
        answer=b"<think>hm, \xc3\xa9</think>\n\nYes.", tokens_per_step=per_step, chat_template=TEMPLATE
    )
    served = serve(engine)
    message = ask(served).json()["choices"][0]["message"]
    assert message == {
        "role": "assistant",
        "content": "Yes.",
        "refusal": None,
        "reasoning_content": "hm, \u00e9",
    }
    events = chunks(ask(served, stream=True))
    deltas = [choice["delta"] for event in events for choice in event["choices"]]
    assert "".join(delta.get("reasoning_content") or "" for delta in deltas) == "hm, \u00e9"
    assert "".join(delta.get("content") or "" for delta in deltas) == "Yes."
    plain = ask(served, separate_reasoning=False).json()["choices"][0]["message"]
    assert plain["content"] == "<think>hm, \u00e9</think>\n\nYes."
    assert "reasoning_content" not in plain


def test_a_prompt_may_have_opened_the_tag(serve: Serve) -> None:
    served = serve(FakeEngine(answer=b"hm</think>Yes", chat_template=TEMPLATE))
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "<think>\n"}]
    message = ask(served, messages=messages, continue_final_message=True).json()["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == ("hm", "Yes")


def test_other_models_have_no_thoughts(serve: Serve) -> None:
    served = serve(FakeEngine(answer=b"<think>a</think>b"))
    message = ask(served).json()["choices"][0]["message"]
    assert message == {"role": "assistant", "content": "<think>a</think>b", "refusal": None}
