"""Field types that take more than one JSON shape, read by hand so that each error is one clear sentence."""

import json
from collections.abc import Mapping, Sequence
from typing import Annotated, cast

from pydantic import AfterValidator, PlainValidator, WithJsonSchema
from pydantic_core import PydanticCustomError

PromptInput = str | tuple[int, ...]

# As at OpenAI.
MAX_PROMPTS = 2048

_PIECE_ITEMS = 1 << 16

# What rendering itself is told, so that no template has a variable of that name to itself.
_TEMPLATE_ARGUMENTS = frozenset(
    {
        "add_generation_prompt", "chat_template", "continue_final_message", "conversation", "documents",
        "load_audio_from_video", "max_length", "messages", "padding", "processor_kwargs",
        "return_assistant_tokens_mask", "return_dict", "return_tensors", "tokenize", "tokenizer_kwargs",
        "tools", "truncation",
    }
)  # fmt: skip

# Types of content parts, and where each has its text.
CHAT_PARTS = {"text": "text"}

_TOKEN_IDS = {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1}


def _item_types(items: Sequence[object]) -> set[type]:
    # In C, for a prompt may have millions of items, but in pieces, between which other threads get a turn; by
    # type(), since True is an int but no token id.
    kinds: set[type] = set()
    for begin in range(0, len(items), _PIECE_ITEMS):
        kinds.update(map(type, items[begin : begin + _PIECE_ITEMS]))
    return kinds


def _read_prompts(value: object) -> tuple[PromptInput, ...]:
    if isinstance(value, str):
        return (value,)
    if isinstance(value, list):
        kinds = _item_types(value)
        if kinds == {int}:
            return (tuple(value),)
        if len(value) > MAX_PROMPTS:
            raise PydanticCustomError(
                "too_many",
                "must be at most {limit} prompts, got {count}",
                {"limit": MAX_PROMPTS, "count": len(value)},
            )
        if not value or [] in value:
            raise PydanticCustomError("empty", "must not be empty: the model needs a token to start from")
        if kinds == {str}:
            return tuple(value)
        if kinds == {list} and all(_item_types(item) == {int} for item in value):
            return tuple(tuple(item) for item in value)
    raise PydanticCustomError(
        "prompt_type",
        "must be a string, a list of strings, a list of token ids (integers) or a list of such lists",
    )


def _read_stop(value: object) -> tuple[str, ...]:
    if isinstance(value, str):
        return (value,)
    if isinstance(value, list) and all(isinstance(item, str) for item in value):
        return tuple(value)
    raise PydanticCustomError("stop_type", "must be a string or a list of strings")


def _read_logit_bias(value: object) -> tuple[tuple[int, float], ...]:
    if not isinstance(value, dict):
        raise PydanticCustomError("logit_bias_type", 'must map token ids to biases, such as {"42": -100}')
    return tuple((_read_token_id(key), _read_bias(key, bias)) for key, bias in value.items())


def _read_token_id(key: str) -> int:
    # One spelling per id, so that no two keys can mean the same token; the length keeps int() cheap.
    if len(key) <= 10 and key.isascii() and key.isdecimal() and str(int(key)) == key:
        return int(key)
    raise PydanticCustomError(
        "logit_bias_key", "keys must be token ids such as \"42\", got '{key}'", {"key": key[:40]}
    )


def _read_bias(key: str, bias: object) -> float:
    if type(bias) in (int, float) and -100 <= cast(float, bias) <= 100:
        return float(cast(float, bias))
    raise PydanticCustomError(
        "logit_bias_value",
        "the bias of token {key} must be a number between -100 and 100, got {bias}",
        {"key": key, "bias": json.dumps(bias)[:40]},
    )


def read_content(value: object, parts: Mapping[str, str] = CHAT_PARTS, between: str = "\n") -> str:
    """A text, or that of text parts.

    Args:
        value: What the client sent.
        parts: The types of parts that there are, and the key that each has its text under.
        between: What stands between two parts.
    """
    if isinstance(value, str):
        return value
    if not isinstance(value, list) or not value:
        raise PydanticCustomError("content_type", "must be a string or a list of text parts")
    return between.join(_read_part(index, part, parts) for index, part in enumerate(value))


def _read_part(index: int, part: object, parts: Mapping[str, str]) -> str:
    kind = part.get("type") if isinstance(part, dict) else None
    if not isinstance(part, dict) or not isinstance(kind, str):
        raise PydanticCustomError(
            "content_part", "part {index} must be an object with a type", {"index": index}
        )
    if kind not in parts:
        raise PydanticCustomError(
            "content_part",
            "part {index} is of type '{kind}', but this server reads text only",
            {"index": index, "kind": kind[:40]},
        )
    text = part.get(parts[kind])
    if not isinstance(text, str):
        raise PydanticCustomError(
            "content_part", "part {index} must have its text as a string", {"index": index}
        )
    return text


def _read_prediction(value: object) -> str:
    if not isinstance(value, dict) or value.get("type") != "content" or "content" not in value:
        raise PydanticCustomError(
            "prediction_type", 'must be an object such as {"type": "content", "content": "the text"}'
        )
    # The parts of a text, not passages of a message: nothing comes between them.
    return read_content(value["content"], between="")


def _read_prediction_or_text(value: object) -> str:
    return value if isinstance(value, str) else _read_prediction(value)


def _check_template_variables(variables: dict[str, object]) -> dict[str, object]:
    taken = sorted(_TEMPLATE_ARGUMENTS & variables.keys())
    if taken:
        raise PydanticCustomError(
            "chat_template_kwargs", "cannot set {name}, which this server sets itself", {"name": taken[0]}
        )
    return variables


Prompts = Annotated[
    tuple[PromptInput, ...],
    PlainValidator(_read_prompts),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "string"},
                {"type": "array", "items": {"type": "string"}, "minItems": 1},
                _TOKEN_IDS,
                {"type": "array", "items": _TOKEN_IDS, "minItems": 1},
            ]
        }
    ),
]

StopStrings = Annotated[
    tuple[str, ...],
    PlainValidator(_read_stop),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "string", "minLength": 1},
                {"type": "array", "items": {"type": "string", "minLength": 1}, "maxItems": 4},
            ]
        }
    ),
]

LogitBias = Annotated[
    tuple[tuple[int, float], ...],
    PlainValidator(_read_logit_bias),
    WithJsonSchema(
        {
            "type": "object",
            "propertyNames": {"pattern": "^(0|[1-9][0-9]{0,9})$"},
            "additionalProperties": {"type": "number", "minimum": -100, "maximum": 100},
        }
    ),
]


def content_schema(part_type: dict[str, object]) -> dict[str, object]:
    """For the schema: a text, or parts with a text each whose type is as described."""
    part = {
        "type": "object",
        "properties": {"type": part_type, "text": {"type": "string"}},
        "required": ["type", "text"],
    }
    return {"anyOf": [{"type": "string"}, {"type": "array", "minItems": 1, "items": part}]}


_TEXT_CONTENT = content_schema({"const": "text"})
_PREDICTION: dict[str, object] = {
    "type": "object",
    "properties": {"type": {"const": "content"}, "content": _TEXT_CONTENT},
    "required": ["type", "content"],
}

TemplateVariables = Annotated[dict[str, object], AfterValidator(_check_template_variables)]

TextContent = Annotated[str, PlainValidator(lambda value: read_content(value)), WithJsonSchema(_TEXT_CONTENT)]

Prediction = Annotated[str, PlainValidator(_read_prediction), WithJsonSchema(_PREDICTION)]

PredictionOrText = Annotated[
    str,
    PlainValidator(_read_prediction_or_text),
    WithJsonSchema({"anyOf": [{"type": "string"}, _PREDICTION]}),
]
