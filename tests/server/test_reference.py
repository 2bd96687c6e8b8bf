"""From a schema to rows: types, limits, defaults and nesting."""

from typing import Any

import pytest

from server.reference import FieldRow, read_endpoints

ITEM = {
    "type": "object",
    "required": ["role"],
    "properties": {
        "role": {"type": "string", "enum": ["user", "tool"]},
        "next": {"$ref": "#/components/schemas/Item"},
    },
}


def rows(field: dict[str, Any], required: tuple[str, ...] = ()) -> dict[str, FieldRow]:
    """The rows of a request whose second field is `field`."""
    body = {"type": "object", "required": required, "properties": {"first": {"type": "string"}, "f": field}}
    operation = {
        "requestBody": {"content": {"application/json": {"schema": body, "example": {"f": "é"}}}},
        "responses": {},
    }
    schema = {"paths": {"/p": {"post": operation}}, "components": {"schemas": {"Item": ITEM}}}
    (endpoint,) = read_endpoints(schema)
    assert endpoint.example_body == '{"f": "é"}'
    return {row.parent + row.name: row for row in endpoint.body}


@pytest.mark.parametrize(
    ("field", "kind", "limits", "default"),
    [
        ({"type": "number", "minimum": 0, "maximum": 2, "default": 1.0}, "number", "0 to 2", "1.0"),
        ({"type": "number", "exclusiveMinimum": 0, "maximum": 1}, "number", "above 0, at most 1", ""),
        ({"type": "integer", "minimum": -(2**63), "maximum": 2**63 - 1}, "integer", "-2^63 to 2^63 - 1", ""),
        ({"type": "boolean", "default": False}, "boolean", "", "false"),
        ({"anyOf": [{"type": "integer", "minimum": 1}, {"type": "null"}]}, "integer", "at least 1", ""),
        ({"type": "string", "enum": ["a", "b"], "default": "a"}, "string", '"a", "b"', '"a"'),
        (
            {"type": "array", "items": {"type": "string"}, "minItems": 1},
            "list of strings",
            "at least 1 item",
            "",
        ),
        (
            {"type": "array", "items": {"type": "array", "items": {"type": "integer"}}},
            "list of lists of integers",
            "",
            "",
        ),
        (
            {
                "anyOf": [
                    {"type": "string", "minLength": 1},
                    {"type": "array", "items": {"type": "string"}, "maxItems": 4},
                ]
            },
            "string or list of strings",
            "not empty; at most 4 items",
            "",
        ),
        ({"type": "object", "additionalProperties": {"type": "number"}}, "object with numbers", "", ""),
    ],
)
def test_a_field_in_words(field: dict[str, Any], kind: str, limits: str, default: str) -> None:
    row = rows(field)["f"]
    assert (row.kind, row.limits, row.default) == (kind, limits, default)


def test_what_a_request_must_have_comes_first() -> None:
    found = rows({"type": "string"}, required=("f",))
    assert list(found) == ["f", "first"]
    assert found["f"].required
    assert not found["first"].required


def test_fields_of_objects_and_lists_follow_and_end_where_they_contain_themselves() -> None:
    inner = {"type": "array", "items": {"$ref": "#/components/schemas/Item"}}
    found = rows(inner)
    assert list(found) == ["first", "f", "f[].role", "f[].next"]
    assert found["f"].kind == "list of objects"
    assert found["f[].role"].limits == '"user", "tool"'
    assert "f.role" in rows({"anyOf": [{"$ref": "#/components/schemas/Item"}, {"type": "null"}]})


def test_answers_may_be_null_and_equal_bodies_are_one() -> None:
    body = {"schema": {"properties": {"x": {"anyOf": [{"type": "string"}, {"type": "null"}]}}}}
    ok = {"description": "Fine.", "content": {"application/json": body, "text/event-stream": body}}
    operation = {"responses": {"200": ok, "503": {"description": "Busy."}}}
    (endpoint,) = read_endpoints({"paths": {"/p": {"get": operation}}})
    (answer,), (error,) = endpoint.answers, endpoint.errors
    assert (error.status, error.description) == (503, "Busy.")
    (only,) = answer.bodies
    assert only.media_type == "application/json and text/event-stream"
    assert [row.kind for row in only.rows] == ["string or null"]
    assert not only.rows[0].required
