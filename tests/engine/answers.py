"""What the engine's tests share: models with other endings, requests run step by step, answers compared."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

from engine.llm import LLM, Completion
from engine.model.loaded_model import LoadedModel
from engine.outputs import StepStats
from engine.sampling_params import SamplingParams
from engine.speculation.base import Speculator
from tests.engines import build_llm, load_tiny
from tests.scripted import Script, ScriptedSpeculator

# Only lower-case letters are ever chosen, so that the text is one letter per token.
LETTERS = tuple((token, 100.0) for token in range(97, 123))
PROMPT = tuple(b"one two one two one two")

Asked = Mapping[str, tuple[Sequence[int], SamplingParams]]
"""Prompt and parameters by request id."""


@cache
def target(max_model_len: int = 128, eos: frozenset[int] = frozenset()) -> LoadedModel:
    """The target, with the given ids, or none at all, declared to end an answer."""
    return replace(load_tiny(max_model_len=max_model_len), eos_token_ids=eos)


@cache
def plain_answer(
    params: SamplingParams, prompt: tuple[int, ...] = PROMPT, max_model_len: int = 128
) -> Completion:
    """What the target alone says, nothing ending it but its length."""
    llm = build_llm("none", target=target(max_model_len), prefix_caching=False)
    return llm.generate([prompt], params)[0]


def build_scripted(
    scripts: Script | Mapping[str, Script], model: LoadedModel | None = None, k: int = 4, **room: Any
) -> tuple[LLM, ScriptedSpeculator]:
    """An engine that drafts what the scripts say, and the speculator that follows them."""
    speculator = ScriptedSpeculator(scripts)
    return build_speculating(speculator, model, k, **room), speculator


def build_speculating(
    speculator: Speculator,
    model: LoadedModel | None = None,
    k: int = 4,
    *,
    method: str = "ngram",
    **room: Any,
) -> LLM:
    """An engine around a given speculator, which may draw its drafts if the method is one that does."""
    return build_llm(
        method,
        target=model or target(),
        speculator=speculator,
        num_draft_tokens=k,
        **room,
    )


def run(
    llm: LLM, asked: Asked, after_step: Callable[[StepStats], None] | None = None
) -> dict[str, Completion]:
    """Answers all requests together; the books are checked after every step."""
    core = llm.core
    answers: dict[str, Completion] = {}
    for request_id, (prompt, params) in asked.items():
        core.add_request(request_id, prompt, params)
        answers[request_id] = Completion(list(prompt))
    while core.has_work:
        for output in core.step():
            answers[output.request_id].add(output)
        core.scheduler.check_integrity()
        stats = core.take_stats()
        if after_step is not None:
            after_step(stats)
    assert_clean(llm)
    return answers


def essence(answer: Completion) -> tuple[object, ...]:
    """What a client sees of an answer, but for floating-point numbers."""
    tokens = [(entry.token_id, tuple(top.token_id for top in entry.top)) for entry in answer.logprobs]
    return answer.token_ids, answer.text, answer.finish_reason, answer.stop_reason, tokens


def assert_clean(llm: LLM) -> None:
    """No part of the engine remembers a request."""
    core = llm.core
    scheduler = core.scheduler
    scheduler.check_integrity()
    assert not scheduler.has_work
    assert scheduler.kv.pool.num_free == scheduler.kv.pool.num_blocks
    assert not core._requests
    assert not core._records
    assert not core._outputs._answers
    assert not core._prompt_logprobs._collected
    if core._drafting is not None:
        assert not core._drafting._outgrown._known
        assert not core._drafting._methods
        for drafter in core._drafting._drafters:
            for books in ("known", "_progress", "_proposed", "_readers"):
                assert not getattr(drafter.speculator, books, None), books
        for known in core._drafting._measurements.methods:
            assert not known.book.own_rates()
