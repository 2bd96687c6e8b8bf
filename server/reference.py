"""From an OpenAPI schema to the rows of an API reference: endpoints, fields, limits, answers."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

Node = Mapping[str, Any]

_PLURALS = {"integer": "integers", "string": "strings", "number": "numbers", "object": "objects"}
# Longer than this, a default is a whole object, whose fields have rows of their own.
_MAX_DEFAULT = 40


@dataclass(frozen=True, slots=True)
class FieldRow:
    """One field of a request or an answer.

    Attributes:
        parent: The fields it lies in, such as `messages[].`; empty at the top.
        name: Its own name.
        kind: Its type in words.
        limits: What values it may have; empty for any of its type.
        default: Its default as JSON; empty where there is none, or where the description tells it.
        required: Whether a request must have it.
        description: What it means.
    """

    parent: str
    name: str
    kind: str
    limits: str
    default: str
    required: bool
    description: str


@dataclass(frozen=True, slots=True)
class Body:
    """The body of an answer.

    Attributes:
        media_type: Its content type, or several that have the same fields.
        rows: Its fields; none for one that is no JSON.
    """

    media_type: str
    rows: tuple[FieldRow, ...]


@dataclass(frozen=True, slots=True)
class Answer:
    """What an endpoint may answer.

    Attributes:
        status: The HTTP status.
        description: When it comes.
        bodies: What it may consist of.
    """

    status: int
    description: str
    bodies: tuple[Body, ...]


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One operation.

    Attributes:
        method: The HTTP method.
        path: The path's template.
        group: What it is about.
        description: What it does.
        parameters: What the path takes.
        body: The fields of its JSON body; none if it takes no body.
        example_path: A path to try.
        example_body: A JSON body to try; empty if it takes none.
        answers: What it answers when all is well.
        errors: What it answers when not.
    """

    method: str
    path: str
    group: str
    description: str
    parameters: tuple[FieldRow, ...]
    body: tuple[FieldRow, ...]
    example_path: str
    example_body: str
    answers: tuple[Answer, ...]
    errors: tuple[Answer, ...]


def read_endpoints(schema: Node) -> list[Endpoint]:
    """The operations of an OpenAPI schema, in its order."""
    reader = _Reader(schema.get("components", {}).get("schemas", {}))
    return [
        reader.endpoint(method, path, operation)
        for path, operations in schema["paths"].items()
        for method, operation in operations.items()
    ]


class _Reader:
    """Reads operations and fields.

    Args:
        components: The schemas that others refer to by name.
    """

    def __init__(self, components: Node) -> None:
        self._components = components

    def endpoint(self, method: str, path: str, operation: Node) -> Endpoint:
        parameters = operation.get("parameters", [])
        body = operation.get("requestBody", {}).get("content", {}).get("application/json", {})
        example_path = path
        for parameter in parameters:
            value = parameter["schema"].get("examples", [parameter["name"].upper()])[0]
            example_path = example_path.replace("{" + parameter["name"] + "}", str(value))
        answers = [self._answer(int(status), entry) for status, entry in operation["responses"].items()]
        return Endpoint(
            method=method.upper(),
            path=path,
            group=" ".join(operation.get("tags", [])),
            description=operation.get("description", operation.get("summary", "")),
            parameters=tuple(self._parameter(parameter) for parameter in parameters),
            body=tuple(self._rows(body.get("schema", {}), "", (), asked=True)),
            example_path=example_path,
            example_body=json.dumps(body["example"], ensure_ascii=False) if "example" in body else "",
            answers=tuple(answer for answer in answers if answer.status < 400),
            errors=tuple(answer for answer in answers if answer.status >= 400),
        )

    def _answer(self, status: int, entry: Node) -> Answer:
        media_types: dict[tuple[FieldRow, ...], list[str]] = {}
        for media_type, content in entry.get("content", {}).items():
            for payload in _payloads(content.get("schema", {})):
                rows = tuple(self._rows(payload, "", (), asked=False))
                media_types.setdefault(rows, []).append(media_type)
        bodies = tuple(Body(" and ".join(types), rows) for rows, types in media_types.items())
        return Answer(status, entry["description"], bodies)

    def _parameter(self, parameter: Node) -> FieldRow:
        node = {**parameter["schema"], "description": parameter.get("description", "")}
        return self._row("", parameter["name"], node, asked=True, required=parameter.get("required", False))

    def _rows(self, node: Node, parent: str, seen: tuple[str, ...], *, asked: bool) -> Iterator[FieldRow]:
        """The fields of an object, each followed by those in it; `seen` ends what contains itself."""
        name, node = self._resolve(node)
        if name in seen:
            return
        seen = (*seen, name) if name else seen
        required = node.get("required", ())
        fields: dict[str, Node] = node.get("properties", {})
        # What a request must have comes first; the rest keeps its order.
        for field in sorted(fields, key=lambda field: field not in required if asked else False):
            yield self._row(parent, field, fields[field], asked=asked, required=field in required)
            for inner, brackets in self._inside(fields[field]):
                yield from self._rows(inner, f"{parent}{field}{brackets}.", seen, asked=asked)

    def _inside(self, node: Node) -> Iterator[tuple[Node, str]]:
        """The objects that a field holds, with the brackets that lead to them."""
        _, resolved = self._resolve(node)
        if "properties" in resolved:
            yield node, ""
        for option in resolved.get("anyOf", ()):
            yield from self._inside(option)
        if "items" in resolved:
            yield from ((inner, "[]" + brackets) for inner, brackets in self._inside(resolved["items"]))

    def _row(self, parent: str, name: str, node: Node, *, asked: bool, required: bool) -> FieldRow:
        return FieldRow(
            parent=parent,
            name=name,
            kind=self._kind(node, asked=asked),
            limits="; ".join(dict.fromkeys(filter(None, self._limits(node)))),
            default=_default(node) if asked else "",
            required=asked and required,
            description=node.get("description") or self._resolve(node)[1].get("description", ""),
        )

    def _resolve(self, node: Node) -> tuple[str, Node]:
        """The schema a reference leads to, with its name; anything else is itself, without one."""
        name = str(node.get("$ref", "")).rpartition("/")[2]
        return name, self._components[name] if name else node

    def _kind(self, node: Node, *, asked: bool, plural: bool = False) -> str:
        _, node = self._resolve(node)
        if "anyOf" in node:
            # null in a request means the same as leaving the field out.
            options = [option for option in node["anyOf"] if not (asked and option.get("type") == "null")]
            kinds = (self._kind(option, asked=asked, plural=plural) for option in options)
            return " or ".join(dict.fromkeys(kinds))
        if "const" in node:
            return "string"
        kind = str(node.get("type", "any"))
        if kind == "array":
            return f"list{'s' * plural} of {self._kind(node['items'], asked=asked, plural=True)}"
        values = node.get("additionalProperties")
        if kind == "object" and isinstance(values, Mapping):
            return f"object{'s' * plural} with {self._kind(values, asked=asked, plural=True)}"
        return _PLURALS.get(kind, kind) if plural else kind

    def _limits(self, node: Node) -> Iterator[str]:
        _, node = self._resolve(node)
        for option in node.get("anyOf", ()):
            yield from self._limits(option)
        if "const" in node:
            yield json.dumps(node["const"])
        if "enum" in node:
            yield ", ".join(map(json.dumps, node["enum"]))
        yield _range(node.get("minimum"), node.get("exclusiveMinimum"), node.get("maximum"))
        if node.get("minLength"):
            yield "not empty"
        if "minItems" in node:
            yield f"at least {node['minItems']} item{'s' * (node['minItems'] > 1)}"
        if "maxItems" in node:
            yield f"at most {node['maxItems']} items"


def _payloads(body: Node) -> list[Node]:
    """What a body's fields are those of: itself, but for a stream what its events say until an error."""
    data = body.get("properties", {}).get("data", {})
    payloads = [option["contentSchema"] for option in data.get("anyOf", ()) if "contentSchema" in option]
    return payloads[:-1] or [body]


def _range(low: Any, above: Any, high: Any) -> str:
    if low is not None and high is not None:
        return f"{_number(low)} to {_number(high)}"
    parts = (("at least", low), ("above", above), ("at most", high))
    return ", ".join(f"{word} {_number(limit)}" for word, limit in parts if limit is not None)


def _number(limit: float) -> str:
    """As a person writes it: nobody reads 2^63 off its digits."""
    if limit == 2**63 - 1:
        return "2^63 - 1"
    return "-2^63" if limit == -(2**63) else str(limit)


def _default(node: Node) -> str:
    default = node.get("default")
    text = "" if default is None else json.dumps(default, ensure_ascii=False)
    return text if len(text) <= _MAX_DEFAULT else ""
