"""From bytes to a request, or to an error that names the field."""

import json
from collections.abc import Sequence
from typing import TypeVar

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from server.errors import ApiError
from server.protocol.json_pieces import BrokenJson, read_json
from server.protocol.model import RequestModel

AnyRequest = TypeVar("AnyRequest", bound=RequestModel)

MAX_FIELDS = 1024
"""Keys of a large body; smaller ones have no room for so many that they take long."""

_SHOWN_CHARACTERS = 60

# By pydantic's type of error, where its own words speak of Python or of validation.
_OWN_WORDS = {
    "bool_type": "must be true or false",
    "int_type": "must be an integer",
    "float_type": "must be a number",
    "string_type": "must be a string",
    "list_type": "must be a list",
    "model_type": "must be an object",
    "dict_type": "must be an object",
    "too_short": "must not be empty",
}
_LISTS_OF_OBJECTS = ("messages", "input")
_OVER_LIMITS = {
    "recursion limit exceeded": "nested too deeply",
    "number out of range": "with a number of too many digits",
}


def parse(kind: type[AnyRequest], body: bytes) -> AnyRequest:
    """The request in a body.

    Raises:
        ApiError: 400; the body is no JSON, or a field is wrong.
    """
    try:
        return kind.model_validate_json(body)
    except ValidationError as error:
        raise _explain(error.errors(include_url=False)[0]) from None


def parse_in_pieces(kind: type[AnyRequest], body: bytes) -> AnyRequest:
    """The same, never holding the interpreter's lock for long, which makes it slower: for a worker thread.

    Raises:
        ApiError: 400; the body is no JSON, has more in it than `read_json` takes or more than MAX_FIELDS
            keys, or a field is wrong.
    """
    try:
        value = read_json(body)
    except BrokenJson as error:
        raise ApiError(400, str(error), code="invalid_json") from None
    if isinstance(value, dict) and len(value) > MAX_FIELDS:
        raise ApiError(
            400, f"the body has {len(value)} fields; {MAX_FIELDS} are the limit", code="invalid_value"
        )
    try:
        return kind.model_validate(value)
    except ValidationError as error:
        raise _explain(error.errors(include_url=False)[0]) from None


def _explain(error: ErrorDetails) -> ApiError:
    context = error.get("ctx", {})
    if error["type"] == "json_invalid":
        return ApiError(400, _explain_json(str(context["error"])), code="invalid_json")
    # A validator of a whole object names its field in the context.
    location = (*error["loc"], *([str(context["field"])] if "field" in context else []))
    param = _param(location)
    if param is None:
        return ApiError(400, "the body must be a JSON object", code="invalid_type")
    if error["type"] == "missing":
        return ApiError(400, f"{param} is missing or null; it is required", param=param, code="missing")
    message = error["msg"]
    if "field" not in context:
        message = _OWN_WORDS.get(error["type"], message).replace("Input should ", "must ", 1)
        colon = "" if message.startswith("must ") else ":"
        message = f"{_path(location)}{colon} {message}{_shown(error)}"
    return ApiError(400, message, param=param, code="invalid_value")


def _explain_json(found: str) -> str:
    """The parser's finding; two of them speak of JSON that is valid, but more than it takes."""
    for beginning, fault in _OVER_LIMITS.items():
        if found.startswith(beginning):
            return f"the body is JSON {fault},{found.removeprefix(beginning)}"
    return f"the body is not valid JSON: {found}"


def _path(location: Sequence[str | int]) -> str:
    """`messages[0].role` for ("messages", 0, "role")."""
    parts = (f"[{part}]" if isinstance(part, int) else f".{part}" for part in location)
    return "".join(parts).removeprefix(".")


def _param(location: Sequence[str | int]) -> str | None:
    """The path, but an item of a plain list goes by the list's name."""
    if len(location) == 2 and isinstance(location[1], int) and location[0] not in _LISTS_OF_OBJECTS:
        location = location[:1]
    return _path(location) or None


def _shown(error: ErrorDetails) -> str:
    """The value at fault, if it is short enough to be of use."""
    value = error["input"]
    if isinstance(value, bool | int | float | str | None):
        text = json.dumps(value, ensure_ascii=False)
        return f", got {text if len(text) <= _SHOWN_CHARACTERS else text[:_SHOWN_CHARACTERS] + '...'}"
    return ""
