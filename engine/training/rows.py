"""Rows: token sequences to train on, and which of their tokens the target has to have said.

Two kinds of files have them: *generations* (`id`, `prompt_token_ids`, `output_token_ids`) and *texts*
(`messages` of a conversation, or a `text`), whose tokens are trained on as they stand.
"""

import hashlib
import json
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.errors import StartupError
from engine.tokenizer import Tokenizer

GENERATIONS_FORMAT = "an object per line with `id`, `prompt_token_ids` and `output_token_ids`"
TEXTS_FORMAT = "an object per line with `messages` (a conversation) or `text`"

_MOST_IDS = 2**63
"""Of any model: digests take ids as whole numbers of 64 bits."""

Message = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Span:
    """Places from `begin` up to, not including, `end`."""

    begin: int
    end: int


@dataclass(frozen=True, slots=True)
class Row:
    """A sequence to train on.

    Attributes:
        key: Digest of its tokens: the same sequence has the same key.
        prompt: The tokens before the first answer.
        token_ids: All tokens.
        answers: Where the tokens are that a head is to draft; in order, without overlap.
    """

    key: str
    prompt: tuple[int, ...]
    token_ids: tuple[int, ...]
    answers: tuple[Span, ...]

    @property
    def num_answer_tokens(self) -> int:
        """Tokens in answers."""
        return sum(span.end - span.begin for span in self.answers)


def make_row(token_ids: Sequence[int], answers: Sequence[Span]) -> Row:
    """A row of tokens, with its key."""
    key = hashlib.blake2b(array("q", token_ids).tobytes(), digest_size=12).hexdigest()
    return Row(key, tuple(token_ids[: answers[0].begin]), tuple(token_ids), tuple(answers))


def check_generations(path: Path) -> int:
    """Looks through a file of generations before there is a model; returns how many it has.

    Raises:
        StartupError: The file cannot be read, or a line is no generation; names the line.
    """
    return sum(1 for _ in read_generations(path))


def check_texts(path: Path) -> int:
    """Looks through a file of texts before there is a tokenizer; returns how many it has.

    Raises:
        StartupError: The file cannot be read, or a line is no text; names the line.
    """
    return sum(1 for _ in _texts(path))


def read_generations(path: Path, vocab_size: int | None = None) -> Iterator[Row]:
    """The rows of a file of generations; a last line that is still being written is left out.

    Args:
        path: The file.
        vocab_size: Ids of the model are below it; None if that is not known yet.

    Raises:
        StartupError: The file cannot be read, or a line is no generation; names the line.
    """
    for place, row in _read(path, GENERATIONS_FORMAT):
        prompt = _ids(row.get("prompt_token_ids"), vocab_size)
        output = _ids(row.get("output_token_ids"), vocab_size)
        if prompt is None or output is None or not prompt:
            below = "" if vocab_size is None else f" below {vocab_size}"
            raise StartupError(
                f"{path}, {place}: not a generation of this model; a file of generations has "
                f"{GENERATIONS_FORMAT}, lists of ids{below}"
            )
        if output:
            yield make_row(prompt + output, [Span(len(prompt), len(prompt) + len(output))])


def read_texts(path: Path, tokenizer: Tokenizer) -> Iterator[Row]:
    """The rows of a file of texts.

    What the assistant says is an answer, and so is a plain text from its second token on.

    Raises:
        StartupError: The file cannot be read, or a line is no text; names the line.
    """
    for content in _texts(path):
        if isinstance(content, str):
            ids = tokenizer.encode(content)
            spans = [Span(1, len(ids))] if len(ids) > 1 else []
        else:
            ids, spans = _conversation(content, tokenizer)
        if spans:
            yield make_row(ids, spans)


def roots(prompts: Sequence[tuple[int, ...]]) -> dict[tuple[int, ...], tuple[int, ...]]:
    """For each prompt the shortest one that it begins with: the first turn of its conversation."""
    found: dict[tuple[int, ...], tuple[int, ...]] = {}
    root: tuple[int, ...] | None = None
    # In this order a prompt comes right before those it begins.
    for prompt in sorted(set(prompts)):
        if root is None or prompt[: len(root)] != root:
            root = prompt
        found[prompt] = root
    return found


def is_held_out(prompt: tuple[int, ...], share: float) -> bool:
    """Whether a prompt is one of those kept for the evaluation: decided by its tokens alone."""
    digest = hashlib.blake2b(array("q", prompt).tobytes(), digest_size=8).digest()
    return int.from_bytes(digest, "big") < share * 2**64


def _read(path: Path, wanted: str) -> Iterator[tuple[str, Mapping[str, object]]]:
    try:
        text = path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise StartupError(f"cannot read {path}: {error}") from error
    lines = text.split("\n")
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError as error:
            if number == len(lines):
                return  # Without its newline it is still being written.
            raise StartupError(f"{path}, line {number} is not JSON: {error}") from error
        if not isinstance(row, dict):
            raise StartupError(f"{path}, line {number}: not an object; the file has {wanted}")
        yield f"line {number}", row


def _texts(path: Path) -> Iterator[str | list[Message]]:
    """Texts and conversations."""
    for place, row in _read(path, TEXTS_FORMAT):
        messages, text = row.get("messages"), row.get("text")
        if isinstance(text, str):
            yield text
        elif (conversation := _messages(messages)) is not None:
            yield conversation
        else:
            raise StartupError(f"{path}, {place}: not a text; a file of texts has {TEXTS_FORMAT}")


def _ids(value: object, vocab_size: int | None) -> list[int] | None:
    """A list of token ids, or None if it is none."""
    if not isinstance(value, list):
        return None
    end = _MOST_IDS if vocab_size is None else vocab_size
    return value if all(type(item) is int and 0 <= item < end for item in value) else None


def _messages(value: object) -> list[Message] | None:
    """A conversation, or None if it is none."""
    if not isinstance(value, list) or not value:
        return None
    are_messages = all(isinstance(item, dict) and isinstance(item.get("content"), str) for item in value)
    return value if are_messages else None


def _conversation(messages: Sequence[Message], tokenizer: Tokenizer) -> tuple[list[int], list[Span]]:
    """The tokens of a conversation, turn by turn, and where the assistant speaks."""
    ids: list[int] = []
    spans: list[Span] = []
    for place, message in enumerate(messages):
        if message.get("role") != "assistant":
            continue
        before = tokenizer.apply_chat_template(messages[:place])
        if before[: len(ids)] != ids:
            break  # A template that rewrites earlier turns: what follows is another text.
        answer = tokenizer.encode(message["content"], add_special_tokens=False)
        closing = _closing(tokenizer, messages[: place + 1], before, answer)
        ids = [*before, *answer, *closing]
        spans.append(Span(len(before), len(ids)))
    return ids, spans


def _closing(
    tokenizer: Tokenizer, messages: Sequence[Mapping[str, object]], before: list[int], answer: list[int]
) -> list[int]:
    """The token that ends an answer, which the template writes after it."""
    user = {"role": "user", "content": "-"}
    whole = tokenizer.apply_chat_template([*messages, user])
    begun = [*before, *answer]
    return whole[len(begun) : len(begun) + 1] if whole[: len(begun)] == begun else []
