"""The official client for JavaScript, in Node."""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.clients.asking import MESSAGES, MODEL, TALK, TOLD, WEATHER, Point, Weather, asked_plainly

FOLDER = Path(__file__).parent / "node"
# The one beside this Python is new enough, if it is there; the system's may not be.
NODE = shutil.which("node", path=Path(sys.executable).parent) or shutil.which("node")

pytestmark = [
    pytest.mark.skipif(NODE is None, reason="node is not installed; make test-clients does that"),
    pytest.mark.skipif(
        not (FOLDER / "node_modules" / "openai").is_dir(),
        reason="the npm package openai is not installed; make test-clients does that",
    ),
]


@pytest.fixture(scope="module")
def found(base_url: str, scripted_url: str) -> Any:
    """What the program got."""
    asked = {"url": base_url, "scriptedUrl": scripted_url, "model": MODEL, "tool": WEATHER}
    asked |= {"messages": MESSAGES, "talk": TALK}
    assert NODE is not None
    program = subprocess.run(
        [NODE, "talk.mjs", json.dumps(asked)],
        cwd=FOLDER,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert program.returncode == 0, program.stderr
    assert program.stderr == ""
    return json.loads(program.stdout)


def test_a_whole_answer_and_a_streamed_one(found: Any, base_url: str) -> None:
    expected = asked_plainly(base_url, **TALK)
    [choice] = expected["choices"]
    for way in ("whole", "streamed"):
        assert found[way]["text"] == choice["message"]["content"] != ""
        assert found[way]["reason"] == choice["finish_reason"]
        for count in ("prompt_tokens", "completion_tokens", "total_tokens"):
            assert found[way]["usage"][count] == expected["usage"][count] > 1
    assert found["completion"]["whole"] == found["completion"]["streamed"] != ""


def test_parse_gives_an_object(found: Any) -> None:
    assert found["parsed"]["whole"] == found["parsed"]["streamed"]
    Point.model_validate(found["parsed"]["whole"], strict=True)


def test_a_required_call(found: Any) -> None:
    whole, streamed = found["requiredCall"]
    assert whole["reason"] == streamed["reason"] == "tool_calls"
    [[call], [other]] = whole["calls"], streamed["calls"]
    assert (call["id"], call["function"]) == (other["id"], other["function"])
    assert call["function"]["name"] == "weather"
    Weather.model_validate_json(call["function"]["arguments"], strict=True)


@pytest.mark.parametrize("way", ["conversation", "streamedConversation"])
def test_the_client_runs_a_conversation_with_a_call(found: Any, way: str) -> None:
    assert found[way] == {"text": TOLD, "asked": [{"city": "Brno", "days": 2}]}


def test_what_is_wrong_is_the_clients_own_error(found: Any) -> None:
    error = found["wrongField"]
    assert (error["kind"], error["status"]) == ("BadRequestError", 400)
    assert (error["param"], error["code"]) == ("temperature", "invalid_value")
    assert error["type"] == "invalid_request_error"
    assert "temperature" in error["message"]
    assert (found["wrongFieldStreamed"]["kind"], found["wrongFieldStreamed"]["param"]) == (
        "BadRequestError",
        "messages",
    )
    assert found["wrongModel"]["kind"] == "NotFoundError"
    assert "gpt-9" in found["wrongModel"]["message"]


def test_the_model_is_listed(found: Any) -> None:
    assert found["models"] == [MODEL]
