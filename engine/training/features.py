"""FeatureStore: the target's hidden states and likeliest tokens of many sequences, on disk.

    rows.jsonl      a line per sequence: key, where it lies, its answers, whether it is held out
    tokens.i32      [places]               token ids
    hidden.f16      [places, width]        hidden states side by side, the one after the final norm last
    top_ids.i32     [answer tokens, K]     likeliest tokens in each answer token's place
    top_logprobs.f16

A line is written after its data, so an interrupted run leaves at most a tail that the next one cuts off.
"""

import json
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType

import numpy as np
import torch

from engine.errors import StartupError
from engine.training.rows import Row, Span
from engine.training.target import Captured

GIB = 2**30
_FILES = {
    "tokens.i32": np.int32,
    "hidden.f16": np.float16,
    "top_ids.i32": np.int32,
    "top_logprobs.f16": np.float16,
}


@dataclass(frozen=True, slots=True)
class StoreFormat:
    """What a store holds; another model's features, or other ones, do not mix with it.

    Attributes:
        model: The target's name.
        features: Which states EAGLE-3 reads.
        hidden_size: Width of each.
        vocab_size: The target's.
        top_k: Likeliest tokens kept.
    """

    model: str
    features: tuple[int, ...]
    hidden_size: int
    vocab_size: int
    top_k: int

    @property
    def width(self) -> int:
        """Numbers per place."""
        return (len(self.features) + 1) * self.hidden_size

    def num_bytes(self, row: Row) -> int:
        """What a sequence takes."""
        return len(row.token_ids) * (4 + 2 * self.width) + row.num_answer_tokens * 6 * self.top_k


@dataclass(frozen=True, slots=True)
class Stored:
    """A sequence in a store.

    Attributes:
        key: Its row's.
        begin: Its first place.
        num_tokens: Its places.
        first_target: Index of its first answer token among all answer tokens of the store.
        answers: Where its answers are, counted from its own first token.
        held_out: Whether it is kept for the evaluation.
    """

    key: str
    begin: int
    num_tokens: int
    first_target: int
    answers: tuple[Span, ...]
    held_out: bool

    @property
    def num_answer_tokens(self) -> int:
        """Tokens in answers."""
        return sum(span.end - span.begin for span in self.answers)


class FeatureStore:
    """Appends to a folder of features.

    Args:
        folder: Where it is, or is to be.
        form: What it holds.

    Raises:
        StartupError: It holds something else, or is damaged.
    """

    def __init__(self, folder: Path, form: StoreFormat) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self.format = form
        self._check_format()
        self.rows = _read_index(folder / "rows.jsonl")
        self._places = sum(row.num_tokens for row in self.rows)
        self._targets = sum(row.num_answer_tokens for row in self.rows)
        self._cut()
        self._stack = ExitStack()
        self._files = {name: self._stack.enter_context((folder / name).open("ab")) for name in _FILES}
        self._index = self._stack.enter_context((folder / "rows.jsonl").open("a", encoding="utf-8"))

    def __enter__(self) -> "FeatureStore":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    @property
    def num_bytes(self) -> int:
        """What it takes on disk, its index left out."""
        form = self.format
        return self._places * (4 + 2 * form.width) + self._targets * 6 * form.top_k

    def add(self, row: Row, captured: Captured, *, held_out: bool) -> None:
        """Appends a sequence."""
        for name, data in (
            ("tokens.i32", torch.tensor(row.token_ids, dtype=torch.int32)),
            ("hidden.f16", captured.hidden),
            ("top_ids.i32", captured.top_ids),
            ("top_logprobs.f16", captured.top_logprobs),
        ):
            self._files[name].write(data.contiguous().numpy().data)
            self._files[name].flush()
        stored = Stored(row.key, self._places, len(row.token_ids), self._targets, row.answers, held_out)
        self._index.write(json.dumps(asdict(stored)) + "\n")
        self._index.flush()
        self.rows.append(stored)
        self._places += stored.num_tokens
        self._targets += stored.num_answer_tokens

    def _check_format(self) -> None:
        path = self._folder / "format.json"
        wanted = json.loads(json.dumps(asdict(self.format)))
        if not path.exists():
            path.write_text(json.dumps(wanted, indent=1) + "\n", "utf-8")
        try:
            found = json.loads(path.read_text("utf-8"))
        except ValueError as error:
            raise StartupError(f"{path} is damaged ({error}): delete the folder {self._folder}") from error
        if found != wanted:
            raise StartupError(
                f"{self._folder} holds features of another kind ({found}) than asked for ({wanted}): delete "
                "it, or choose another --work"
            )

    def _cut(self) -> None:
        """Drops what an interrupted run left without its line in the index."""
        counts = {"tokens.i32": self._places, "hidden.f16": self._places * self.format.width}
        for name, kind in _FILES.items():
            path = self._folder / name
            size = counts.get(name, self._targets * self.format.top_k) * np.dtype(kind).itemsize
            path.touch()
            if path.stat().st_size < size:
                raise StartupError(
                    f"{path} has {path.stat().st_size} bytes and should have {size}: delete {self._folder}"
                )
            with path.open("r+b") as file:
                file.truncate(size)


class Features:
    """A store to be read; its files are mapped, not loaded.

    Args:
        folder: Where it is.
        form: What it holds.
        rows: Its sequences.
    """

    def __init__(self, folder: Path, form: StoreFormat, rows: Sequence[Stored]) -> None:
        self.format = form
        self.train = [row for row in rows if not row.held_out]
        self.held_out = [row for row in rows if row.held_out]
        shapes = {"tokens.i32": (-1,), "hidden.f16": (-1, form.width)}
        self._maps = {
            name: np.memmap(folder / name, kind, "r").reshape(shapes.get(name, (-1, form.top_k)))
            for name, kind in _FILES.items()
            if rows
        }

    def tokens(self, row: Stored) -> torch.Tensor:
        """int64 [num_tokens]."""
        return self._slice("tokens.i32", row.begin, row.num_tokens).long()

    def hidden(self, row: Stored) -> torch.Tensor:
        """float16 [num_tokens, width]."""
        return self._slice("hidden.f16", row.begin, row.num_tokens)

    def top_ids(self, row: Stored) -> torch.Tensor:
        """int64 [num_answer_tokens, K]."""
        return self._slice("top_ids.i32", row.first_target, row.num_answer_tokens).long()

    def top_logprobs(self, row: Stored) -> torch.Tensor:
        """float32 [num_answer_tokens, K]."""
        return self._slice("top_logprobs.f16", row.first_target, row.num_answer_tokens).float()

    def answer_counts(self) -> torch.Tensor:
        """int64 [vocab_size], how often each token is said in the answers that are trained on."""
        counts = torch.zeros(self.format.vocab_size, dtype=torch.long)
        for row in self.train:
            tokens = self.tokens(row)
            for span in row.answers:
                counts += torch.bincount(tokens[span.begin : span.end], minlength=self.format.vocab_size)
        return counts

    def _slice(self, name: str, begin: int, count: int) -> torch.Tensor:
        # A copy: the map is read only, and torch has no tensors that are.
        return torch.from_numpy(np.array(self._maps[name][begin : begin + count]))


def _read_index(path: Path) -> list[Stored]:
    path.touch()
    lines = path.read_text("utf-8").split("\n")
    # What follows the last newline is a line that was cut short.
    whole = lines[:-1]
    if lines[-1]:
        path.write_text("".join(f"{line}\n" for line in whole), "utf-8")
    return list(_stored(whole, path))


def _stored(lines: Sequence[str], path: Path) -> Iterator[Stored]:
    for number, line in enumerate(lines, 1):
        try:
            fields = json.loads(line)
            answers = tuple(Span(**span) for span in fields.pop("answers"))
            yield Stored(**fields, answers=answers)
        except (ValueError, TypeError, KeyError) as error:
            raise StartupError(f"{path}, line {number} is damaged ({error}): delete its folder") from error
