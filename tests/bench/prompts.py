"""Prompts for the benchmark: a few of our own, or a file in one of the formats such sets come in."""

import json
from dataclasses import dataclass
from pathlib import Path

from engine.tokenizer import Tokenizer

EDIT = """Repeat this file exactly, but rename the function `load` to `read`. Answer with the code only.

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
OWN = (
    ("code", "Write a Python function that returns the n-th prime number, with type hints and a docstring."),
    ("edit", EDIT),
    ("chat", "Why is the sky blue? Explain it to a child in one short paragraph."),
    ("list", "List the planets of the solar system, one per line, each with its number of moons."),
)


@dataclass(frozen=True, slots=True)
class BenchPrompt:
    """One prompt.

    Attributes:
        name: What the report calls it.
        token_ids: What the engine gets.
    """

    name: str
    token_ids: list[int]


def load_prompts(path: Path | None, count: int, tokenizer: Tokenizer) -> list[BenchPrompt]:
    """The first `count` prompts of a file, or our own.

    A .json file is a list of objects with `messages`; a .jsonl file has an object per line with `turns`
    (the first is asked), `question`, or a raw `prompt` to be continued.
    """
    own: list[dict[str, object]] = [{"id": name, "question": text} for name, text in OWN]
    rows = own if path is None else _read(path)
    return [_prompt(row, index, tokenizer) for index, row in enumerate(rows[:count])]


def _read(path: Path) -> list[dict[str, object]]:
    text = path.read_text(encoding="utf-8")
    rows: list[dict[str, object]] = (
        [json.loads(line) for line in text.splitlines() if line.strip()]
        if path.suffix == ".jsonl"
        else json.loads(text)
    )
    return rows


def _prompt(row: dict[str, object], index: int, tokenizer: Tokenizer) -> BenchPrompt:
    name = str(row.get("id") or row.get("task_id") or row.get("question_id") or index)
    messages = row.get("messages")
    if isinstance(messages, list):
        return BenchPrompt(name, tokenizer.apply_chat_template(messages))
    turns = row.get("turns")
    question = turns[0] if isinstance(turns, list) else row.get("question")
    if isinstance(question, str):
        return _asked(name, question, tokenizer)
    raw = row.get("prompt")
    if isinstance(raw, str):
        return BenchPrompt(name, tokenizer.encode(raw))
    raise SystemExit(f"prompt {name} has none of messages, turns, question and prompt")


def _asked(name: str, question: str, tokenizer: Tokenizer) -> BenchPrompt:
    if not tokenizer.has_chat_template:
        return BenchPrompt(name, tokenizer.encode(question))
    return BenchPrompt(name, tokenizer.apply_chat_template([{"role": "user", "content": question}]))
