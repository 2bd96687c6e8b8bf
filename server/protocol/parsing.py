"""From bytes to a request, or to an error that names the field."""

from collections.abc import Sequence
from typing import TypeVar

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from server.errors import ApiError
from server.protocol.base import RequestModel

AnyRequest = TypeVar("AnyRequest", bound=RequestModel)

_SHOWN_CHARACTERS = 60


def parse(kind: type[AnyRequest], body: bytes) -> AnyRequest:
    """The request in a body.

    Raises:
        ApiError: 400; the body is no JSON, or a field is wrong.
    """
    try:
        return kind.model_validate_json(body)
    except ValidationError as error:
        raise _explain(error.errors(include_url=False)[0]) from None


def _explain(error: ErrorDetails) -> ApiError:
    context = error.get("ctx", {})
    if error["type"] == "json_invalid":
        return ApiError(400, f"the body is not valid JSON: {context['error']}", code="invalid_json")
    # A validator of a whole object names its field in the context.
    param = _path((*error["loc"], *([str(context["field"])] if "field" in context else [])))
    message = error["msg"][0].lower() + error["msg"][1:]
    if param is None:
        return ApiError(400, f"the body must be a JSON object: {message}", code="invalid_type")
    if error["type"] == "missing":
        return ApiError(400, f"{param} is missing or null; it is required", param=param, code="missing")
    if "field" not in context:
        message = f"{param}: {message}{_shown(error)}"
    return ApiError(400, message, param=param, code="invalid_value")


def _path(location: Sequence[str | int]) -> str | None:
    """`messages[0].role` for ("messages", 0, "role"); an item of a plain list goes by the list's name."""
    parts = [f"[{part}]" if isinstance(part, int) else f".{part}" for part in location]
    if len(parts) == 2 and isinstance(location[1], int) and location[0] != "messages":
        parts.pop()
    return "".join(parts).removeprefix(".") or None


def _shown(error: ErrorDetails) -> str:
    """The value at fault, if it is short enough to be of use."""
    value = error["input"]
    if isinstance(value, bool | int | float | str | None):
        text = str(value).lower() if isinstance(value, bool) else repr(value)
        return f", got {text if len(text) <= _SHOWN_CHARACTERS else text[:_SHOWN_CHARACTERS] + '...'}"
    return ""
