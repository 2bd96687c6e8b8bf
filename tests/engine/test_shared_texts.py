"""Suffix decoding over earlier answers, through the engine: what is learnt from, and what is not."""

from dataclasses import replace

from engine.core.request import RequestStatus
from engine.llm import LLM, Completion
from engine.sampling_params import SamplingParams, SpeculationParams
from engine.speculation.text_store import TextStore
from tests.engine.answers import assert_clean, essence
from tests.engines import build_llm

PROMPT = "the quick brown fox"
# Hot enough that the answer hardly repeats itself.
WISHES = SamplingParams(temperature=1.5, seed=3, max_tokens=40, ignore_eos=True, cache_scope="ann")


def ask(llm: LLM, **changed: object) -> Completion:
    [answer] = llm.generate([PROMPT], replace(WISHES, **changed))  # type: ignore[arg-type]
    assert_clean(llm)
    return answer


def store_of(llm: LLM) -> TextStore:
    drafting = llm.core._drafting
    assert drafting is not None
    store = drafting._drafters[-1].needs.text_store
    assert store is not None
    return store


def test_a_second_answer_is_drafted_from_the_first_and_is_the_same() -> None:
    llm = build_llm("suffix", num_draft_tokens=8)
    first, second = ask(llm), ask(llm)
    assert essence(first) == essence(second) == essence(ask(build_llm("none")))
    assert second.speculation.num_steps < first.speculation.num_steps / 3


def test_another_scope_is_served_as_if_nobody_had_been_before() -> None:
    llm = build_llm("suffix", num_draft_tokens=8, prefix_caching=False)
    first = ask(llm)
    assert ask(llm, cache_scope="bob").speculation == first.speculation
    assert ask(llm, cache_scope="").speculation == first.speculation
    assert ask(llm).speculation != first.speculation


def test_a_request_without_speculation_leaves_no_text() -> None:
    llm = build_llm("suffix", num_draft_tokens=8)
    ask(llm, speculation=SpeculationParams(enabled=False))
    assert len(store_of(llm)) == 0


def test_a_preempted_text_is_entered_once_and_at_its_end() -> None:
    llm = build_llm("suffix", num_kv_blocks=33)
    core = llm.core
    for number in range(3):
        core.add_request(f"r{number}", llm.tokenizer.encode(PROMPT), replace(WISHES, seed=number))
    num_preempted = num_ended = 0
    while core.has_work:
        num_ended += sum(output.finish_reason is not None for output in core.step())
        num_preempted += core.take_stats().num_preemptions
        assert len(store_of(llm)) == num_ended
    assert num_preempted > 0
    assert num_ended == 3


def test_an_aborted_answer_counts_as_far_as_it_came() -> None:
    llm = build_llm("suffix")
    core = llm.core
    core.add_request("gone", llm.tokenizer.encode(PROMPT), WISHES)
    for _ in range(3):
        core.step()
    request = core._requests["gone"]
    core.abort("gone")
    assert request.status is RequestStatus.FINISHED
    assert len(store_of(llm)) == 1
    core.add_request("early", llm.tokenizer.encode(PROMPT), WISHES)
    core.abort("early")
    assert len(store_of(llm)) == 1
    assert_clean(llm)
