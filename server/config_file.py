"""Reads a YAML file of settings, and says where in it something is wrong."""

from collections.abc import Hashable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

_MOST_SHOWN = 60


class UnreadableFile(Exception):
    """The file does not hold settings; the message says where it ceases to, in one line."""


@dataclass(frozen=True, slots=True)
class Entry:
    """A line `name: value` of the file.

    Attributes:
        name: What stands before the colon, as YAML reads it.
        value: What stands behind it.
        place: Where: the file and the line, as editors and terminals take it (serve.yaml:3).
    """

    name: object
    value: object
    place: str


def read_entries(path: Path) -> list[Entry]:
    """The settings of a file, in its order.

    Raises:
        OSError: It cannot be read.
        UnreadableFile: It is not YAML, or YAML of another form.
    """
    content = path.read_bytes()
    try:
        loader = _StrictLoader(content.decode())
        node = loader.get_single_node()
        values = None if node is None else loader.construct_document(node)
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise UnreadableFile(
            f"{path}:{line}: not UTF-8: byte {content[error.start]:#04x} is no part of a character"
        ) from error
    except yaml.reader.ReaderError as error:
        line = content.decode().count("\n", 0, error.position) + 1
        raise UnreadableFile(
            f"{path}:{line}: not valid YAML: it holds the control character U+{error.character:04X}"
        ) from error
    except yaml.MarkedYAMLError as error:
        raise UnreadableFile(f"{path}{_explain(error)}") from error
    except RecursionError as error:
        raise UnreadableFile(f"{path}: not valid YAML: it is nested too deeply") from error
    if node is None or values is None:
        return []
    if not isinstance(values, dict):
        shown = f"{values!r:.{_MOST_SHOWN}}"
        raise UnreadableFile(f"{path}: must hold lines of `name: value`, got {shown}")
    places = [f"{path}:{key.start_mark.line + 1}" for key, _ in node.value]
    return [Entry(name, value, place) for (name, value), place in zip(values.items(), places, strict=True)]


def _explain(error: yaml.MarkedYAMLError) -> str:
    """Line and column, what is wrong there, and in the midst of what."""
    mark = error.problem_mark or error.context_mark
    place = f":{mark.line + 1}:{mark.column + 1}" if mark else ""
    context = ""
    if error.context:
        begin = error.context_mark
        where = f" that begins at {begin.line + 1}:{begin.column + 1}" if begin and begin != mark else ""
        context = f" ({error.context}{where})"
    return f"{place}: not valid YAML: {error.problem}{context}"


class _StrictLoader(yaml.SafeLoader):
    """YAML in which a repeated key is an error and not a silent override."""

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        try:
            return super().construct_object(node, deep)
        except (ValueError, LookupError, AttributeError) as error:
            # What looks like a date or a number, or is marked as one, and is none; of PyYAML's errors only
            # ValueErrors say how.
            kind = node.tag.rpartition(":")[2]
            reason = error if isinstance(error, ValueError) else f"this is no {kind}"
            raise yaml.constructor.ConstructorError(
                None, None, f"{reason}; put it in quotes if it is text", node.start_mark
            ) from error

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        for place, (key, (key_node, _)) in enumerate(zip(keys, node.value, strict=True)):
            if key in keys[:place]:
                first = node.value[keys.index(key)][0].start_mark.line + 1
                raise yaml.constructor.ConstructorError(
                    None, None, f"{key} is given more than once, first in line {first}", key_node.start_mark
                )
        return super().construct_mapping(node, deep)
