"""Engines in this process: the one place of the command that builds them."""

import gc
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from engine.config import EngineConfig
from engine.errors import InvalidRequest
from engine.factory import Engine, assemble
from engine.inspection import Inspector
from engine.llm import LLM, Completion
from engine.model.cache_type import rounding_type
from engine.model.loader import load_causal_lm
from engine.outputs import TokenLogprob
from engine.sampling_params import SamplingParams
from engine.speculation.factory import load_drafts
from server.bench.prompts import Prompt
from server.bench.records import DraftCounts
from server.verify.subject import Answer, Ask, Entry, History, Law, OnDone, Token, first_difference

log = logging.getLogger(__name__)


class EngineSubject:
    """An engine.

    Args:
        engine: Nobody else may use it meanwhile.
        at_once: Requests that it runs at the same time.
        precision: Type that decides how far rounding may lead; see Subject.
    """

    def __init__(self, engine: Engine, at_once: int, precision: str) -> None:
        self._llm = LLM(engine)
        self._inspector = Inspector(engine)
        self._prompts: dict[str, list[int]] = {}
        self._failures: set[str] = set()
        self.at_once = at_once
        self.precision = precision
        self.method = engine.model.method

    def answer(self, asks: Sequence[Ask], at_once: int, on_done: OnDone) -> list[tuple[Answer, ...]]:
        """See Subject."""
        singles = [
            replace(ask, params=replace(ask.params, choice=choice), n=1)
            for ask in asks
            for choice in range(ask.n)
        ]
        answers: list[Answer] = []
        for begin in range(0, len(singles), at_once):
            answers += self._batch(singles[begin : begin + at_once])
            for answer in answers[begin:]:
                on_done(answer)
        rest = iter(answers)
        return [tuple(next(rest) for _ in range(ask.n)) for ask in asks]

    def gap(self, ask: Ask, expected: Answer, got: Answer, choice: int) -> float | None:
        """The lead in processed logits, the seed's noise included, computed anew from the target alone."""
        place = first_difference(expected.tokens, got.tokens)
        if place is None or place >= min(len(expected.tokens), len(got.tokens)):
            return None
        params = replace(ask.params, choice=choice)
        tokens = (int(expected.tokens[place]), int(got.tokens[place]))
        return self._inspector.lead(self._ids(ask), _as_ids(expected.tokens[:place]), params, tokens)

    def laws(self, ask: Ask, histories: Sequence[History], least: float) -> list[Law] | None:
        """See Subject."""
        beginnings = [_as_ids(history) for history in histories]
        return [
            dict[Token, float](law.items())
            for law in self._inspector.laws(self._ids(ask), beginnings, ask.params, least)
        ]

    def _batch(self, asks: Sequence[Ask]) -> list[Answer]:
        try:
            completions = self._llm.generate([self._ids(ask) for ask in asks], [ask.params for ask in asks])
        except InvalidRequest as error:
            if len(asks) == 1:
                return [Answer(error=str(error), is_refused=True)]
            return [answer for ask in asks for answer in self._batch([ask])]
        except Exception as error:
            # Whatever breaks in the engine is a finding, and is reported as one.
            message = f"{type(error).__name__}: {error}"
            if message not in self._failures:
                self._failures.add(message)
                log.exception("the engine failed")
            return [Answer(error=message)] * len(asks)
        return [_answer(completion, ask.params) for completion, ask in zip(completions, asks, strict=True)]

    def _ids(self, ask: Ask) -> list[int]:
        found = self._prompts.get(ask.prompt.name)
        if found is None:
            found = self._prompts[ask.prompt.name] = self._encode(ask.prompt)
        return [*found, *_as_ids(ask.begun)]

    def _encode(self, prompt: Prompt) -> list[int]:
        """As a conversation where prompt and model allow it, else as a text."""
        tokenizer = self._llm.tokenizer
        if prompt.messages is not None and (tokenizer.has_chat_template or prompt.text is None):
            return tokenizer.apply_chat_template(prompt.messages)
        return tokenizer.encode(prompt.text or "")


def engine_subjects(configs: Mapping[str, EngineConfig]) -> Iterator[EngineSubject]:
    """An engine per method over one target, each gone before the next is built.

    Args:
        configs: By method; they differ in their speculation only.

    Raises:
        StartupError: A model cannot be loaded, or a setting cannot hold.
    """
    target = None
    for config in configs.values():
        target = target or load_causal_lm(config.model)
        drafts = load_drafts(config.speculation, target, config.model)
        engine = assemble(config, target, drafts)
        precision = rounding_type(target, engine.runner.cache.dtype)
        yield EngineSubject(engine, config.scheduler.max_num_seqs, str(precision).removeprefix("torch."))
        del drafts, engine
        gc.collect()


def _as_ids(history: History) -> list[int]:
    return [int(token) for token in history]


def _answer(completion: Completion, params: SamplingParams) -> Answer:
    stop = "" if completion.stop_reason is None else f" at {completion.stop_reason!r}"
    stats = completion.speculation
    return Answer(
        text=completion.text,
        tokens=tuple(completion.token_ids),
        entries=() if params.logprobs is None else tuple(map(_entry, completion.logprobs)),
        ending=f"{completion.finish_reason}{stop}",
        drafts=DraftCounts(stats.num_draft_tokens, stats.num_accepted_tokens, stats.num_steps),
        num_tokens=len(completion.token_ids),
    )


def _entry(logprob: TokenLogprob) -> Entry:
    top = tuple((item.token_id, item.logprob) for item in logprob.top)
    return Entry(logprob.token_id, logprob.token, logprob.logprob, top)
