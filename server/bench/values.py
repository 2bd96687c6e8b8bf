"""Readers of flags' values: what cannot be is refused in words."""

import argparse
import json
import math
from collections.abc import Callable
from typing import Any, TypeVar

Number = TypeVar("Number", int, float)


def list_of(read: Callable[[str], Number]) -> Callable[[str], tuple[Number, ...]]:
    """Numbers with commas between them."""

    def read_list(text: str) -> tuple[Number, ...]:
        return tuple(read(part.strip()) for part in text.split(","))

    return read_list


def whole(text: str) -> int:
    """A whole number from 1 on."""
    return _read(text, int, 1, "a whole number from 1 on")


def count(text: str) -> int:
    """A whole number from 0 on."""
    return _read(text, int, 0, "a whole number from 0 on")


def share(text: str) -> float:
    """A number from 0 on."""
    return _read(text, float, 0.0, "a number from 0 on")


def positive(text: str) -> float:
    """A number above 0."""
    return _read(text, float, math.ulp(0.0), "a number above 0")


def _read(text: str, read: Callable[[str], Number], least: Number, expected: str) -> Number:
    try:
        value = read(text)
    except ValueError:
        value = -1
    if not least <= value < math.inf:
        raise argparse.ArgumentTypeError(f"must be {expected}, got {text!r}")
    return value


def keys(text: str) -> dict[str, Any]:
    """A JSON object."""
    try:
        read = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"is not JSON: {error}") from error
    if not isinstance(read, dict):
        raise argparse.ArgumentTypeError(f"must be an object such as '{{\"top_p\": 0.9}}', got {text!r}")
    return read
