"""Reads a head's config.json field by field: what is not of its kind is refused by name."""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from engine.errors import StartupError

_MAX_SIZE = 1 << 24  # No width, head count or vocabulary comes near; arithmetic with it stays exact.


class Fields:
    """The fields of a JSON object.

    Args:
        values: The object.
        where: What it is, for messages.
    """

    def __init__(self, values: Mapping[str, Any], where: str) -> None:
        self._values = values
        self.where = where

    def has(self, name: str) -> bool:
        """Whether a field is there and not null."""
        return self._values.get(name) is not None

    def size(self, name: str, default: int | None = None) -> int:
        """A positive whole number.

        Raises:
            StartupError: It is something else, or is missing and has no default.
        """
        value = self._values.get(name)
        if value is None:
            value = default
        if value is None:
            raise StartupError(f"{self.where} has no {name}")
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= _MAX_SIZE:
            raise self._wrong(name, f"a whole number from 1 to {_MAX_SIZE}")
        return value

    def count(self, name: str, default: int) -> int:
        """A whole number from 0.

        Raises:
            StartupError: It is something else.
        """
        value = self._values.get(name)
        if value is None:
            return default
        if not _is_index(value):
            raise self._wrong(name, f"a whole number from 0 to {_MAX_SIZE}")
        return int(value)

    def optional_size(self, name: str) -> int | None:
        """A positive whole number, None if it is missing.

        Raises:
            StartupError: It is something else.
        """
        return self.size(name) if self.has(name) else None

    def flag(self, name: str, *, default: bool = False) -> bool:
        """True or false.

        Raises:
            StartupError: It is something else.
        """
        value = self._values.get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self._wrong(name, "true or false")
        return value

    def positive(self, name: str, default: float) -> float:
        """A finite number above zero.

        Raises:
            StartupError: It is something else.
        """
        value = self._values.get(name)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
            raise self._wrong(name, "a finite number above zero")
        return float(value)

    def text(self, name: str, default: str) -> str:
        """A string.

        Raises:
            StartupError: It is something else.
        """
        value = self._values.get(name)
        if value is None:
            return default
        if not isinstance(value, str):
            raise self._wrong(name, "a string")
        return value

    def section(self, name: str) -> "Fields":
        """An object inside; an empty one if it is missing.

        Raises:
            StartupError: It is something else.
        """
        value = self._values.get(name)
        if value is None:
            value = {}
        if not isinstance(value, dict):
            raise self._wrong(name, "an object")
        return Fields(value, f"{name} in {self.where}")

    def numbers(self, name: str) -> tuple[int, ...] | None:
        """A list of whole numbers, None if it is missing or empty.

        Raises:
            StartupError: It is something else.
        """
        value = self._values.get(name)
        if value is None or value == []:
            return None
        if not isinstance(value, list) or not all(_is_index(item) for item in value):
            raise self._wrong(name, "a list of whole numbers from 0")
        return tuple(value)

    def texts(self, name: str) -> tuple[str, ...] | None:
        """A list of strings, None if it is missing.

        Raises:
            StartupError: It is something else.
        """
        value = self._values.get(name)
        if value is None:
            return None
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise self._wrong(name, "a list of strings")
        return tuple(value)

    def paths(self, name: str) -> tuple[tuple[int, ...], ...] | None:
        """A list of lists of whole numbers, None if it is missing.

        Raises:
            StartupError: It is something else, or empty.
        """
        value = self._values.get(name)
        if value is None:
            return None
        fits = isinstance(value, list) and all(isinstance(path, list) and path for path in value)
        if not fits or not value or not all(_is_index(item) for path in value for item in path):
            raise self._wrong(name, "a list of lists of whole numbers from 0")
        return tuple(map(tuple, value))

    @property
    def nested(self) -> list[str]:
        """The fields that are objects themselves."""
        return [name for name, value in self._values.items() if isinstance(value, dict)]

    def _wrong(self, name: str, wanted: str) -> StartupError:
        value = repr(self._values[name])
        shown = value if len(value) <= 60 else f"{value[:60]}..."
        return StartupError(f"{name} in {self.where} must be {wanted}, not {shown}")


def read_fields(folder: Path) -> Fields:
    """A head's config.json.

    Raises:
        StartupError: It is not there, or no JSON object.
    """
    path = folder / "config.json"
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise StartupError(f"{path} cannot be read: {error}") from error
    if not isinstance(values, dict):
        raise StartupError(f"{path} must hold a JSON object")
    return Fields(values, str(path))


def _is_index(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= _MAX_SIZE
