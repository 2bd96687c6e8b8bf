"""From the formats of a request to the constraint of its answers."""

import json

from engine.sampling_params import Constraint, ConstraintKind
from server.protocol.base import GenerationRequest
from server.protocol.formats import ResponseFormat, StructuredOutputs

_ANY_OBJECT = {"type": "object"}


def constraint_of(request: GenerationRequest) -> Constraint | None:
    """The format that the answer's text must have; None if any will do."""
    if request.structured_outputs is not None:
        return _structured(request.structured_outputs)
    return _response_format(request.response_format, request.names.response_format)


def _response_format(wanted: ResponseFormat | None, name: str) -> Constraint | None:
    if wanted is None or wanted.type == "text":
        return None
    schema = wanted.json_schema.schema_ if wanted.json_schema else _ANY_OBJECT
    return Constraint(ConstraintKind.JSON, json.dumps(schema), name)


def _structured(wanted: StructuredOutputs) -> Constraint:
    if wanted.regex is not None:
        return Constraint(ConstraintKind.REGEX, wanted.regex, "structured_outputs.regex")
    if wanted.choice is not None:
        return Constraint(ConstraintKind.CHOICE, json.dumps(wanted.choice), "structured_outputs.choice")
    if wanted.grammar is not None:
        return Constraint(ConstraintKind.GRAMMAR, wanted.grammar, "structured_outputs.grammar")
    schema = wanted.json_ if isinstance(wanted.json_, str) else json.dumps(wanted.json_)
    return Constraint(ConstraintKind.JSON, schema, "structured_outputs.json")
