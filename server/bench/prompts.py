"""Prompts: a few of our own, or a file in one of the formats that public sets come in."""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from server.config import ConfigError

FORMATS = (
    "a .json file is a list of objects, a .jsonl file has an object per line. An object has `messages` (a "
    "conversation), `turns` (a list of which the first is asked), `question`, or `prompt` (a text to be "
    "continued); its name is `id`, `task_id` or `question_id`, and what it is about `kind` or `category`"
)

_EDIT = """Repeat this file exactly, but rename the function `load` to `read`. Answer with the code only.

```python
import json
from pathlib import Path


def load(path: Path) -> dict[str, int]:
    return {str(key): int(value) for key, value in json.loads(path.read_text()).items()}


def total(path: Path) -> int:
    return sum(load(path).values())


def largest(path: Path) -> str:
    counts = load(path)
    return max(counts, key=counts.__getitem__)
```"""
_OWN = (
    ("prime", "code", "Write a Python function that returns the n-th prime number, with a docstring."),
    ("rename", "edit", _EDIT),
    ("sky", "chat", "Why is the sky blue? Explain it to a child in one short paragraph."),
    ("planets", "list", "List the planets of the solar system, one per line, each with its number of moons."),
)


@dataclass(frozen=True, slots=True)
class Prompt:
    """What is asked.

    Attributes:
        name: What reports call it; unique in its file.
        kind: What it is about; figures are given per kind too.
        messages: The conversation, for the chat endpoint; None where there is only a text.
        text: The text, for the completions endpoint; None where a conversation is more than that.
    """

    name: str
    kind: str
    messages: tuple[Mapping[str, Any], ...] | None
    text: str | None


def own_prompts() -> list[Prompt]:
    """Four short ones: code, an edit that lookup drafts well, prose, a list."""
    return [_asked(name, kind, text) for name, kind, text in _OWN]


def read_prompts(path: Path) -> list[Prompt]:
    """All prompts of a file.

    Raises:
        ConfigError: It cannot be read, or something in it is no prompt; names the line.
    """
    rows = _read(path)
    if not rows:
        raise ConfigError(f"--prompts: {path} has no prompts")
    prompts = [_prompt(row, place, path) for place, row in rows]
    name, count = Counter(prompt.name for prompt in prompts).most_common(1)[0]
    if count > 1:
        raise ConfigError(f"--prompts: {path}: {count} prompts are named {name!r}")
    return prompts


def take(prompts: Sequence[Prompt], count: int | None) -> list[Prompt]:
    """So many prompts, in order; None takes each once.

    Fewer than there are lie evenly among them, since sets are often sorted by kind; for more they come round
    again.
    """
    if count is None:
        return list(prompts)
    if count < len(prompts):
        return [prompts[index * len(prompts) // count] for index in range(count)]
    return [prompts[index % len(prompts)] for index in range(count)]


def _read(path: Path) -> list[tuple[str, object]]:
    """Each row of a file and where it stands, in words."""
    try:
        text = path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--prompts: cannot read {path}: {error}") from error
    if path.suffix == ".jsonl":
        # Not splitlines(): it also splits at separators that JSON leaves bare within strings.
        lines = [(f"line {number}", line) for number, line in enumerate(text.split("\n"), 1)]
        return [(place, _parse(line, f"{path}, {place}")) for place, line in lines if line.strip()]
    rows = _parse(text, str(path))
    if not isinstance(rows, list):
        raise ConfigError(f"--prompts: {path} must hold a list; {FORMATS}")
    return [(f"entry {number}", row) for number, row in enumerate(rows, 1)]


def _parse(text: str, where: str) -> object:
    try:
        return json.loads(text)
    except ValueError as error:
        raise ConfigError(f"--prompts: {where} is not JSON: {error}") from error


def _prompt(row: object, place: str, path: Path) -> Prompt:
    if isinstance(row, dict):
        name = _first(row, "id", "task_id", "question_id") or place
        kind = _first(row, "kind", "category") or path.stem
        messages, turns = row.get("messages"), row.get("turns")
        question = turns[0] if isinstance(turns, list) and turns else row.get("question")
        if isinstance(messages, list) and messages and all(isinstance(item, dict) for item in messages):
            return Prompt(name, kind, tuple(messages), None)
        if isinstance(question, str):
            return _asked(name, kind, question)
        if isinstance(row.get("prompt"), str):
            return Prompt(name, kind, None, row["prompt"])
    raise ConfigError(f"--prompts: {path}, {place}: not a prompt; {FORMATS}")


def _first(row: Mapping[str, object], *keys: str) -> str:
    """The first of the keys that has a value, as text; empty if none has."""
    return next((str(row[key]) for key in keys if row.get(key) is not None), "")


def _asked(name: str, kind: str, question: str) -> Prompt:
    return Prompt(name, kind, ({"role": "user", "content": question},), question)
