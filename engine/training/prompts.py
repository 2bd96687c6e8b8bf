"""Prompts for the target to answer: one question, several turns, or a conversation that is to go on."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from engine.errors import StartupError

PROMPTS_FORMAT = (
    "an object per line with `prompt` or `question` (a question), `turns` (questions of one conversation) or "
    "`messages` (a conversation)"
)

Message = Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Conversation:
    """What is asked.

    Attributes:
        name: Unique among all prompts of a training.
        begun: Messages before the first answer.
        more: What the user says after each answer, until there is no more.
    """

    name: str
    begun: tuple[Message, ...]
    more: tuple[str, ...]


def read_prompts(paths: Sequence[Path]) -> list[Conversation]:
    """The prompts of all files.

    Raises:
        StartupError: One cannot be read, or a line is no prompt; names the line.
    """
    return [conversation for path in paths for conversation in _read(path)]


def _read(path: Path) -> Iterator[Conversation]:
    try:
        lines = path.read_text("utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise StartupError(f"cannot read {path}: {error}") from error
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError as error:
            raise StartupError(f"{path}, line {number} is not JSON: {error}") from error
        found = _conversation(f"{path.stem}:{number}", row) if isinstance(row, dict) else None
        if found is None:
            raise StartupError(f"{path}, line {number}: not a prompt; a file of prompts has {PROMPTS_FORMAT}")
        yield found


def _conversation(name: str, row: Mapping[str, object]) -> Conversation | None:
    messages, turns = row.get("messages"), row.get("turns")
    if isinstance(messages, list):
        return _going_on(name, messages)
    if turns is None:
        turns = [row.get("question") or row.get("prompt")]
    if not isinstance(turns, list) or not turns or not all(isinstance(turn, str) and turn for turn in turns):
        return None
    return Conversation(name, ({"role": "user", "content": turns[0]},), tuple(turns[1:]))


def _going_on(name: str, messages: Sequence[object]) -> Conversation | None:
    """A conversation, with the answers in it given anew: of the assistant's own words nothing is kept."""
    begun: list[Message] = []
    more: list[str] = []
    for message in messages:
        if not isinstance(message, dict) or not isinstance(message.get("content"), str):
            return None
        role, content = message.get("role"), message["content"]
        if role == "user" and any(item["role"] == "user" for item in begun):
            more.append(content)
        elif role in ("system", "user"):
            begun.append({"role": role, "content": content})
        elif role != "assistant":
            return None
    return Conversation(name, tuple(begun), tuple(more)) if begun and begun[-1]["role"] == "user" else None
