"""docs/compatibility.md, held against the code and the official client's own types."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from openai.types import completion_create_params
from openai.types.chat import completion_create_params as chat_create_params
from openai.types.responses import response_create_params

from server.protocol.base import SamplingRequest
from server.protocol.chat import ChatCompletionRequest
from server.protocol.completion import CompletionRequest
from server.protocol.refused import REFUSED_IN_CHAT, REFUSED_IN_COMPLETIONS, RefusedField
from server.protocol.response import ResponseRequest
from server.protocol.response_refused import REFUSED_IN_RESPONSES
from tests.server import test_validation
from tests.server.conftest import Served
from tests.server.test_validation import error_of

ROOT = Path(__file__).parent.parent.parent
PATHS = {**test_validation.PATHS, "responses": "/v1/responses"}
GOOD: dict[str, dict[str, Any]] = {**test_validation.GOOD, "responses": {"input": "hi"}}
KINDS: dict[str, tuple[type[SamplingRequest], tuple[RefusedField, ...], Any]] = {
    "chat": (ChatCompletionRequest, REFUSED_IN_CHAT, chat_create_params.CompletionCreateParamsStreaming),
    "completions": (
        CompletionRequest,
        REFUSED_IN_COMPLETIONS,
        completion_create_params.CompletionCreateParamsStreaming,
    ),
    "responses": (
        ResponseRequest,
        REFUSED_IN_RESPONSES,
        response_create_params.ResponseCreateParamsStreaming,
    ),
}
EACH = pytest.mark.parametrize("endpoint", PATHS)
Serve = Callable[..., Served]


def rows(endpoint: str) -> list[tuple[str, str]]:
    """Field and state of each row of an endpoint's table."""
    text = (ROOT / "docs" / "compatibility.md").read_text("utf-8")
    [section] = re.findall(rf"^## POST {PATHS[endpoint]}\n(.*?)^## ", text, re.DOTALL | re.MULTILINE)
    return re.findall(r"^\| `(\w+)` \| (\w+) \|", section, re.MULTILINE)


@EACH
def test_every_field_has_one_row_and_the_row_is_true(endpoint: str) -> None:
    kind, refused_fields, _ = KINDS[endpoint]
    table = rows(endpoint)
    assert len({field for field, _ in table}) == len(table)
    by_state = {
        state: {field for field, own in table if own == state} for state in ("works", "refused", "ignored")
    }
    assert sum(map(len, by_state.values())) == len(table)
    assert by_state["works"] == set(kind.model_fields)
    assert by_state["refused"] == {field.name for field in refused_fields}


@EACH
def test_the_table_has_every_field_of_the_official_client(endpoint: str) -> None:
    # Of a TypedDict, those of its bases included.
    fields = set(KINDS[endpoint][2].__annotations__)
    assert {"stream", "model", "temperature"} <= fields
    assert fields <= {field for field, _ in rows(endpoint)}


@EACH
def test_what_the_table_calls_refused_or_ignored_is(served: Served, endpoint: str) -> None:
    for field, state in rows(endpoint):
        if state == "refused":
            body = {**GOOD[endpoint], field: {"something": "wanted"}}
            assert error_of(served.http.post(PATHS[endpoint], json=body))["param"] == field
    ignored = [field for field, state in rows(endpoint) if state == "ignored"]
    body = {**GOOD[endpoint], **dict.fromkeys(ignored, "x")}
    response = served.http.post(PATHS[endpoint], json=body)
    assert response.status_code == 200
    assert response.headers.get("x-outrider-ignored-fields", "") == ", ".join(ignored)


def test_the_readme_leads_to_it() -> None:
    assert "docs/compatibility.md" in (ROOT / "README.md").read_text("utf-8")
