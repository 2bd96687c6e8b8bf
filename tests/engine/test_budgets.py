"""Draft tokens count against the token budget of a step."""

from dataclasses import replace

import pytest
import torch

from engine.llm import LLM, Completion
from engine.model.input_batch import InputBatch
from engine.model.model_runner import ModelRunner
from engine.sampling_params import SamplingParams
from engine.speculation.draft_model import DraftModelSpeculator
from tests.engine.answers import assert_clean, build_scripted, essence, plain_answer, target
from tests.engines import build_llm, load_tiny
from tests.scripted import forced

WISHES = SamplingParams(temperature=0.9, seed=3, max_tokens=40, ignore_eos=True)
SHORT = [tuple(b"short %d" % i) for i in range(8)]
LONG = tuple((b"a long prompt, " * 20)[:200])
MAX_MODEL_LEN = 256


def watched(runner: ModelRunner) -> list[int]:
    """The number of tokens of each pass of a model from here on."""
    sizes: list[int] = []
    forward = runner.forward

    def counting(batch: InputBatch) -> torch.Tensor:
        sizes.append(len(batch.input_ids))
        return forward(batch)

    runner.forward = counting  # type: ignore[method-assign]
    return sizes


def answer_with_a_late_comer(llm: LLM) -> dict[str, Completion]:
    """Eight requests decode; a long prompt arrives in their middle."""
    core = llm.core
    prompts = {f"short {i}": prompt for i, prompt in enumerate(SHORT)}
    for request_id, prompt in prompts.items():
        core.add_request(request_id, prompt, WISHES)
    answers = {request_id: Completion(list(prompt)) for request_id, prompt in prompts.items()}
    answers["long"] = Completion(list(LONG))
    num_steps = 0
    while core.has_work:
        for output in core.step():
            answers[output.request_id].add(output)
        core.scheduler.check_integrity()
        num_steps += 1
        if num_steps == 3:
            core.add_request("long", LONG, WISHES)
    assert_clean(llm)
    return answers


def assert_plain(answers: dict[str, Completion]) -> None:
    for name, answer in answers.items():
        expected = plain_answer(WISHES, tuple(answer.prompt_token_ids), MAX_MODEL_LEN)
        assert essence(answer) == essence(expected), name


@pytest.mark.parametrize("budget", [64, 44, 17])
@pytest.mark.parametrize("k", [4, 16])
def test_no_step_exceeds_the_budget(k: int, budget: int) -> None:
    scripts = {
        name: forced(plain_answer(WISHES, prompt, MAX_MODEL_LEN).token_ids, changed_at=range(5, 40, 6))
        for name, prompt in {"long": LONG, **{f"short {i}": prompt for i, prompt in enumerate(SHORT)}}.items()
    }
    llm, _ = build_scripted(
        scripts, target(MAX_MODEL_LEN), k, max_num_batched_tokens=budget, max_num_seqs=9, num_kv_blocks=400
    )
    sizes = watched(llm.core._runner)
    answers = answer_with_a_late_comer(llm)
    assert max(sizes) <= budget
    # The budget is used: with drafts the long prompt does not fit behind eight tokens a step.
    assert max(sizes) > budget - 5
    assert_plain(answers)
    assert sum(answer.speculation.num_accepted_tokens for answer in answers.values()) > 50


def test_neither_the_target_nor_the_draft_model_exceeds_the_budget() -> None:
    llm = build_llm(
        "draft_model",
        target=target(MAX_MODEL_LEN),
        draft=load_tiny(noise=0.1, max_model_len=MAX_MODEL_LEN),
        max_num_batched_tokens=64,
        max_num_seqs=9,
        num_kv_blocks=400,
    )
    assert llm.core._drafting is not None
    speculator = llm.core._drafting._drafters[-1].speculator
    assert isinstance(speculator, DraftModelSpeculator)
    targets, drafts = watched(llm.core._runner), watched(speculator._runner)
    answers = answer_with_a_late_comer(llm)
    assert max(targets) <= 64
    assert max(drafts) <= 64
    assert_plain(answers)
    assert sum(answer.speculation.num_accepted_tokens for answer in answers.values()) > 20


@pytest.mark.parametrize("max_tokens", [1, 2])
def test_prompt_lookup_keeps_to_max_tokens(max_tokens: int) -> None:
    wishes = SamplingParams(temperature=0.0, max_tokens=max_tokens)
    prompt = tuple(b"one two one two one two")
    [answer] = build_llm("ngram", target=target(), num_draft_tokens=3).generate([prompt], wishes)
    expected = plain_answer(replace(wishes, max_tokens=20), prompt)
    assert answer.token_ids == expected.token_ids[:max_tokens]
    assert answer.finish_reason == "length"
    assert answer.speculation.num_committed_tokens == max_tokens


def test_the_first_drafted_token_is_checked_too() -> None:
    """Prompt lookup proposes a fourth 7, which the target does not say."""
    prompt = (7, 7, 7)
    wishes = SamplingParams(temperature=0.0, max_tokens=4, logit_bias=((7, -100.0),))
    [answer] = build_llm("ngram", target=target(), num_draft_tokens=1).generate([prompt], wishes)
    assert answer.token_ids == plain_answer(wishes, prompt).token_ids
    llm, _ = build_scripted(lambda request: forced([7] * 4)(request), k=1)
    [answer] = llm.generate([prompt], wishes)
    assert answer.token_ids == plain_answer(wishes, prompt).token_ids
    assert answer.speculation.num_draft_tokens > 0
    assert answer.speculation.num_accepted_tokens == 0
