"""Answers of the target to prompts, in a file that grows by rounds of answers and is never begun anew."""

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from engine.errors import InvalidRequest, StartupError
from engine.llm import LLM, Completion
from engine.outputs import FinishReason
from engine.sampling_params import SamplingParams
from engine.training.prompts import Conversation, Message


@dataclass(frozen=True, slots=True)
class Wishes:
    """How the target is to answer.

    Attributes:
        temperatures: Each prompt is answered once with each.
        max_tokens: Of an answer.
        seed: Of answers with a temperature.
        at_once: Conversations that are answered together.
    """

    temperatures: tuple[float, ...]
    max_tokens: int
    seed: int
    at_once: int


@dataclass(slots=True)
class _Talk:
    """A conversation at one temperature, as far as it has got.

    Attributes:
        messages: Answers included.
        waiting: What the user will still say.
        temperature: Of the answers.
        turn: Answers so far.
    """

    name: str
    messages: list[Message]
    waiting: list[str]
    temperature: float
    turn: int = 0

    @property
    def row_id(self) -> str:
        """The name of the next answer."""
        return f"{self.name}/{self.temperature:g}/{self.turn}"


class Generator:
    """Has prompts answered.

    Args:
        llm: The target.
        path: The file of answers.
        wishes: How.

    Raises:
        StartupError: The file is damaged, or the model has no chat template.
    """

    def __init__(self, llm: LLM, path: Path, wishes: Wishes) -> None:
        if not llm.model.has_chat_template:
            raise StartupError(f"{llm.model.name} has no chat template for --prompts; give --chat-template")
        self._llm = llm
        self._path = path
        self._wishes = wishes
        self._known = _read_known(path)

    def run(
        self,
        conversations: Sequence[Conversation],
        on_answers: Callable[[int, int], None],
        stop: Callable[[], bool],
    ) -> None:
        """Answers all prompts; those that are answered already are not answered again.

        Args:
            conversations: What is asked.
            on_answers: Told of conversations done and all of them.
            stop: Asked between rounds whether to leave off.
        """
        talks = [
            _Talk(item.name, list(item.begun), list(item.more), temperature)
            for item in conversations
            for temperature in self._wishes.temperatures
        ]
        for begin in range(0, len(talks), self._wishes.at_once):
            together = talks[begin : begin + self._wishes.at_once]
            while together:
                together = self._round(together)
                if stop():
                    return
            on_answers(min(begin + self._wishes.at_once, len(talks)), len(talks))

    def _round(self, talks: Sequence[_Talk]) -> list[_Talk]:
        """One answer for each; returns those that go on."""
        asked: list[tuple[_Talk, list[int]]] = []
        answers: dict[str, tuple[list[int], bool]] = {}
        for talk in talks:
            prompt = self._prompt(talk)
            if prompt is None:
                continue
            known = self._known.get(talk.row_id)
            if known is None or known[0] != _digest(prompt):
                asked.append((talk, prompt))
            else:
                answers[talk.row_id] = known[1], len(known[1]) < self._wishes.max_tokens
        params = [self._params(talk) for talk, _ in asked]
        completions = self._llm.generate([prompt for _, prompt in asked], params) if asked else []
        self._append(asked, completions)
        for (talk, _), answer in zip(asked, completions, strict=True):
            answers[talk.row_id] = answer.token_ids, answer.finish_reason is FinishReason.STOP
        return [
            talk for talk in talks if talk.row_id in answers and self._goes_on(talk, *answers[talk.row_id])
        ]

    def _prompt(self, talk: _Talk) -> list[int] | None:
        """The tokens that are asked; None where the template refuses them or no answer fits behind them."""
        try:
            prompt = self._llm.tokenizer.apply_chat_template(talk.messages)
        except InvalidRequest:
            return None
        return prompt if len(prompt) + self._wishes.max_tokens <= self._llm.model.max_model_len else None

    def _goes_on(self, talk: _Talk, answer: list[int], is_whole: bool) -> bool:
        """Adds an answer, and what the user says to it; not to one that was cut short."""
        if not talk.waiting or not is_whole:
            return False
        text = self._llm.tokenizer.decode(answer, skip_special_tokens=True)
        talk.messages += [
            {"role": "assistant", "content": text},
            {"role": "user", "content": talk.waiting.pop(0)},
        ]
        talk.turn += 1
        return True

    def _params(self, talk: _Talk) -> SamplingParams:
        digest = hashlib.blake2b(f"{self._wishes.seed}/{talk.row_id}".encode(), digest_size=4).digest()
        return SamplingParams(
            temperature=talk.temperature,
            max_tokens=self._wishes.max_tokens,
            seed=int.from_bytes(digest, "big") >> 1,
        )

    def _append(self, asked: Sequence[tuple[_Talk, list[int]]], completions: Sequence[Completion]) -> None:
        with self._path.open("a", encoding="utf-8") as file:
            for (talk, prompt), answer in zip(asked, completions, strict=True):
                row = {
                    "id": talk.row_id,
                    "prompt_token_ids": prompt,
                    "output_token_ids": answer.token_ids,
                }
                file.write(json.dumps(row) + "\n")
                self._known[talk.row_id] = _digest(prompt), answer.token_ids


def _read_known(path: Path) -> dict[str, tuple[str, list[int]]]:
    """By id, the digest of the prompt and the answer; what an interruption left of a line is cut off."""
    path.touch()
    lines = path.read_text("utf-8").split("\n")
    if lines.pop():
        path.write_text("".join(f"{line}\n" for line in lines), "utf-8")
    known = {}
    for number, line in enumerate(lines, 1):
        try:
            row = json.loads(line)
            known[str(row["id"])] = _digest(row["prompt_token_ids"]), list(row["output_token_ids"])
        except (ValueError, KeyError, TypeError) as error:
            raise StartupError(f"{path}, line {number} is damaged ({error!r}): delete that line") from error
    return known


def _digest(token_ids: Sequence[int]) -> str:
    return hashlib.blake2b(json.dumps(list(token_ids)).encode(), digest_size=12).hexdigest()
