"""Random JSON schemas whose answers end by themselves: everything that can repeat has a limit."""

import random
import string
from typing import Any

_WORDS = ("red", "green", "é ü", 'say "hi"', "a\\b", "line\nbreak", "")


def random_schema(seed: int) -> dict[str, Any]:
    """A schema of objects, lists, unions and references, a few levels deep; the same for the same seed."""
    chance = random.Random(seed)
    definitions = {"leaf": _leaf(chance), "pair": _object(chance, 1)}
    return {**_value(chance, 3), "$defs": definitions}


def _value(chance: random.Random, depth: int) -> dict[str, Any]:
    if depth == 0:
        return _leaf(chance)
    kind = chance.choice(("object", "object", "list", "union", "leaf", "reference"))
    if kind == "object":
        return _object(chance, depth)
    if kind == "list":
        least = chance.randint(0, 2)
        most = least + chance.randint(0, 2)
        return {"type": "array", "items": _value(chance, depth - 1), "minItems": least, "maxItems": most}
    if kind == "union":
        return {"anyOf": [_value(chance, depth - 1) for _ in range(chance.randint(2, 3))]}
    if kind == "reference":
        return {"$ref": f"#/$defs/{chance.choice(('leaf', 'pair'))}"}
    return _leaf(chance)


def _object(chance: random.Random, depth: int) -> dict[str, Any]:
    names = chance.sample(string.ascii_lowercase, chance.randint(1, 3))
    if chance.random() < 0.3:
        names[0] = 'a "long" name, with é'
    return {
        "type": "object",
        "properties": {name: _value(chance, depth - 1) for name in names},
        "required": [name for name in names if chance.random() < 0.7],
        "additionalProperties": False,
    }


def _leaf(chance: random.Random) -> dict[str, Any]:
    low = chance.randint(-120, 120)
    leaves: list[dict[str, Any]] = [
        {"type": "integer", "minimum": low, "maximum": low + chance.randint(0, 300)},
        {"type": "integer", "minimum": 0, "maximum": 60, "multipleOf": chance.randint(2, 9)},
        {"type": "string", "minLength": chance.randint(0, 2), "maxLength": chance.randint(2, 6)},
        {"type": "string", "pattern": chance.choice(("^[a-c]{1,4}$", "^(ab|ba){1,3}-\\d$"))},
        {"type": "string", "format": chance.choice(("date", "time"))},
        {"type": ["boolean", "null"]},
        {"enum": [*chance.sample(_WORDS, 2), low, None, {"x": [1, True]}]},
        {"const": chance.choice(_WORDS)},
    ]
    return chance.choice(leaves)


def wide_schema(seed: int) -> dict[str, Any]:
    """A schema that uses more of the language than `random_schema`; the same for the same seed.

    With a model that says anything, some of its answers do not end by themselves: numbers of any length,
    keys that are free, trees that grow.
    """
    chance = random.Random(f"wide {seed}")
    tree = {
        "type": "object",
        "properties": {
            "value": _leaf(chance),
            "next": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/tree"}]},
        },
        "required": ["value"],
        "additionalProperties": False,
    }
    definitions = {"leaf": _wide_leaf(chance), "pair": _object(chance, 1), "tree": tree}
    return {**_wide(chance, 3), "$defs": definitions}


def _wide(chance: random.Random, depth: int) -> dict[str, Any]:
    if depth == 0:
        return _wide_leaf(chance)
    kind = chance.choice(("object", "object", "row", "list", "union", "both", "tree", "map", "leaf", "old"))
    if kind == "object":
        names = chance.sample(string.ascii_letters, chance.randint(1, 4))
        return {
            "type": "object",
            "description": "what it is for",
            "properties": {name: _wide(chance, depth - 1) for name in names},
            "required": chance.sample(names, chance.randint(0, len(names))),
            "additionalProperties": False,
        }
    if kind == "row":
        items = [_wide(chance, depth - 1) for _ in range(chance.randint(1, 3))]
        return {"type": "array", "prefixItems": items, "items": False, "minItems": len(items)}
    if kind == "list":
        return {"type": "array", "items": _wide(chance, depth - 1), "maxItems": chance.randint(1, 3)}
    if kind == "union":
        return {"anyOf": [_wide(chance, depth - 1), {"type": "null"}]}
    if kind == "both":
        return {"allOf": [{"type": "integer", "minimum": -5}, {"maximum": chance.randint(0, 500)}]}
    if kind == "tree":
        return {"$ref": "#/$defs/tree"}
    if kind == "map":
        values = {"type": "object", "patternProperties": {"^[xy]$": _leaf(chance)}}
        return {**values, "additionalProperties": False}
    return _wide_leaf(chance) if kind == "leaf" else _value(chance, depth)


def _wide_leaf(chance: random.Random) -> dict[str, Any]:
    leaves: list[dict[str, Any]] = [
        {"type": "number", "minimum": -1.5, "maximum": chance.randint(0, 99)},
        {"type": "integer", "exclusiveMinimum": 0, "exclusiveMaximum": chance.randint(3, 4000)},
        {"type": "string", "format": chance.choice(("uuid", "ipv4", "date-time"))},
        {"type": "string", "pattern": chance.choice(("^\\w{2}é?$", "^(?:[0-9]{2}:){2}[0-9]{2}$", "^$"))},
        {"type": ["string", "integer"], "maxLength": 3, "minimum": 0, "maximum": 9},
        {"const": {"nested": ["ž", 1.5, None, {"a b": False}]}},
        {"enum": [1.25, "two\twords", ["x"], chance.choice(_WORDS)]},
        _leaf(chance),
    ]
    return chance.choice(leaves)
