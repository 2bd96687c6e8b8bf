"""The OpenAPI schema: every endpoint and every field."""

from collections.abc import Iterator
from typing import Any

import pytest

from tests.server.conftest import Served


@pytest.fixture(scope="module")
def schema(served: Served) -> dict[str, Any]:
    document: dict[str, Any] = served.http.get("/openapi.json").json()
    return document


def references(node: object) -> Iterator[str]:
    if isinstance(node, dict):
        for key, value in node.items():
            if key == "$ref":
                yield value
            yield from references(value)
    elif isinstance(node, list):
        for item in node:
            yield from references(item)


def test_schema_has_every_endpoint_and_resolves(schema: dict[str, Any]) -> None:
    assert set(schema["paths"]) == {
        *("/v1/completions", "/v1/chat/completions", "/v1/models", "/v1/models/{model}"),
        *("/v1/responses", "/v1/responses/{response_id}"),
        *("/tokenize", "/detokenize", "/version"),
        *("/health", "/ready", "/metrics"),
    }
    found = set(references(schema))
    assert "#/components/schemas/ChatCompletionChunk" in found
    assert "#/components/schemas/ArgumentsDelta" in found
    for reference in found:
        assert reference.removeprefix("#/components/schemas/") in schema["components"]["schemas"]


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("/v1/completions", "CompletionRequest"),
        ("/v1/chat/completions", "ChatCompletionRequest"),
        ("/v1/responses", "ResponseRequest"),
    ],
)
def test_schema_describes_every_field(schema: dict[str, Any], path: str, name: str) -> None:
    operation = schema["paths"][path]["post"]
    assert operation["requestBody"]["content"]["application/json"]["schema"] == {
        "$ref": f"#/components/schemas/{name}"
    }
    assert {"application/json", "text/event-stream"} <= set(operation["responses"]["200"]["content"])
    assert {"400", "404", "413", "503"} <= set(operation["responses"])
    assert "422" not in operation["responses"]
    assert schema["components"]["schemas"][name]["properties"]["logit_bias"]["default"] == {}
    for field, description in schema["components"]["schemas"][name]["properties"].items():
        assert description.get("description"), field


@pytest.mark.parametrize(
    ("path", "name"), [("/v1/completions", "Completion"), ("/v1/chat/completions", "ChatCompletionChunk")]
)
def test_schema_describes_the_events_of_a_stream(schema: dict[str, Any], path: str, name: str) -> None:
    content = schema["paths"][path]["post"]["responses"]["200"]["content"]
    *payloads, done = content["text/event-stream"]["schema"]["properties"]["data"]["anyOf"]
    assert done == {"const": "[DONE]"}
    assert [payload["contentSchema"]["$ref"].rpartition("/")[2] for payload in payloads] == [
        name,
        "ErrorResponse",
    ]


@pytest.mark.parametrize(
    "name", ["CompletionRequest", "ChatCompletionRequest", "ChatMessage", "TokenizeRequest"]
)
def test_schema_allows_null_wherever_a_key_may_be_left_out(schema: dict[str, Any], name: str) -> None:
    described = schema["components"]["schemas"][name]
    null = {"type": "null"}
    allowing = {key for key, field in described["properties"].items() if null in field.get("anyOf", ())}
    assert allowing == described["properties"].keys() - set(described.get("required", ()))
