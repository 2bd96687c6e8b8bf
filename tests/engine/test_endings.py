"""An answer ends where plain decoding would have ended it, wherever in an accepted run that is."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from engine.llm import Completion
from engine.outputs import FinishReason
from engine.sampling_params import SamplingParams
from tests.engine.answers import LETTERS, PROMPT, build_scripted, essence, plain_answer, run, target
from tests.engines import build_llm, load_tiny
from tests.scripted import forced

LETTER_RUN = SamplingParams(temperature=1.5, seed=0, max_tokens=40, logit_bias=LETTERS)
PLACES = range(20)
DRAFT_LENGTHS = (1, 2, 5, 16)
Declare = Callable[[SamplingParams, Completion, int], SamplingParams]


def answer_with(place: int, is_new: Callable[[Completion, int], bool]) -> tuple[SamplingParams, Completion]:
    """An answer in which something occurs for the first time at `place`."""
    for seed in range(100 * place, 100 * place + 100):
        params = replace(LETTER_RUN, seed=seed)
        answer = plain_answer(params)
        if is_new(answer, place):
            return params, answer
    raise AssertionError(f"no seed has a new token at {place}")


def new_token(answer: Completion, place: int) -> bool:
    return answer.token_ids[place] not in answer.token_ids[:place]


def new_pair(answer: Completion, place: int) -> bool:
    return place > 0 and answer.text.find(answer.text[place - 1 : place + 1]) == place - 1


@pytest.mark.parametrize("k", DRAFT_LENGTHS)
@pytest.mark.parametrize("place", PLACES)
def test_eos_ends_the_answer_at_every_place_of_a_run(place: int, k: int) -> None:
    params, answer = answer_with(place, new_token)
    eos = answer.token_ids[place]
    llm, _ = build_scripted(forced(answer.token_ids), target(eos=frozenset({eos, 258})), k)
    ended = run(llm, {"a": (PROMPT, params)})["a"]
    assert ended.token_ids == answer.token_ids[: place + 1]
    assert ended.text == answer.text[:place]
    assert (ended.finish_reason, ended.stop_reason) == (FinishReason.STOP, None)
    assert ended.speculation.num_committed_tokens == place + 1


STOPS: dict[str, tuple[Callable[[Completion, int], bool], Declare, int, bool]] = {
    # name: what must be new, how it is declared, how many characters are cut, whether a stop or the length
    "stop id": (new_token, lambda p, a, i: replace(p, stop_token_ids=(a.token_ids[i],)), 1, True),
    "stop string of one token": (new_token, lambda p, a, i: replace(p, stop=(a.text[i],)), 1, True),
    "stop string of two tokens": (
        new_pair,
        lambda p, a, i: replace(p, stop=(a.text[i - 1 : i + 1],)),
        2,
        True,
    ),
    "the nearest of four stop strings": (
        new_pair,
        lambda p, a, i: replace(
            p, stop=(a.text[i - 1 : i + 5], a.text[i - 1 : i + 1], "ZZ", a.text[i : i + 9])
        ),
        2,
        True,
    ),
    "max_tokens": (lambda a, i: True, lambda p, a, i: replace(p, max_tokens=i + 1), 0, False),
}


@pytest.mark.parametrize("k", DRAFT_LENGTHS)
@pytest.mark.parametrize("kind", STOPS)
def test_every_other_ending_at_every_place_of_a_run(kind: str, k: int) -> None:
    is_new, declare, num_cut, stops = STOPS[kind]
    asked, expected, scripts = {}, {}, {}
    for place in PLACES[num_cut == 2 :]:
        params, answer = answer_with(place, is_new)
        asked[f"at {place}"] = (PROMPT, declare(params, answer, place))
        expected[f"at {place}"] = (
            answer.token_ids[: place + 1],
            answer.text[: place + 1 - num_cut],
            FinishReason.STOP if stops else FinishReason.LENGTH,
        )
        scripts[f"at {place}"] = forced(answer.token_ids)
    llm, _ = build_scripted(scripts, k=k)
    answers = run(llm, asked)
    found = {name: (a.token_ids, a.text, a.finish_reason) for name, a in answers.items()}
    assert found == expected
    assert all(a.speculation.num_committed_tokens == len(a.token_ids) for a in answers.values())


@pytest.mark.parametrize("changed_at", range(1, 8))
def test_an_end_behind_a_rejected_token(changed_at: int) -> None:
    """The stop drafted behind a wrong token does not count before the target says it."""
    params, answer = answer_with(7, new_token)
    stopped = replace(params, stop=(answer.text[7],))
    llm, _ = build_scripted(forced(answer.token_ids, changed_at=[changed_at]), k=6)
    ended = run(llm, {"a": (PROMPT, stopped)})["a"]
    assert (ended.token_ids, ended.text) == (answer.token_ids[:8], answer.text[:7])
    assert (ended.finish_reason, ended.stop_reason) == (FinishReason.STOP, answer.text[7])


def test_a_wrongly_drafted_eos_ends_nothing() -> None:
    answer = plain_answer(LETTER_RUN)
    wrong = [answer.token_ids[0], ord("Z"), *answer.token_ids[2:]]
    llm, _ = build_scripted(forced(wrong), target(eos=frozenset({ord("Z")})), k=4)
    ended = run(llm, {"a": (PROMPT, LETTER_RUN)})["a"]
    assert essence(ended) == essence(answer)


@pytest.mark.parametrize("max_tokens", [None, 8, 5, 1])
@pytest.mark.parametrize("k", [5, 16])
def test_drafts_shrink_at_the_end_of_the_context(k: int, max_tokens: int | None) -> None:
    prompt = tuple((b"one two " * 15)[:120])
    params = replace(LETTER_RUN, max_tokens=max_tokens)
    answer = plain_answer(params, prompt)
    assert len(answer.token_ids) == (max_tokens or 8)
    neighbour = plain_answer(LETTER_RUN)
    llm, _ = build_scripted(
        {"long": forced(answer.token_ids + [65] * k), "n": forced(neighbour.token_ids)}, k=k
    )
    ended = run(llm, {"long": (prompt, params), "n": (PROMPT, LETTER_RUN)})
    assert essence(ended["long"]) == essence(answer)
    assert ended["long"].finish_reason is FinishReason.LENGTH
    # Nothing is drafted that there is no room for.
    stats = ended["long"].speculation
    assert stats.num_draft_tokens == stats.num_accepted_tokens == len(answer.token_ids) - stats.num_steps
    assert essence(ended["n"]) == essence(neighbour)


@pytest.mark.parametrize("wish", ["eos", "stop", "length"])
def test_the_limit_and_another_end_on_the_same_token(wish: str) -> None:
    """What plain decoding calls such an end is what speculation calls it."""
    params, answer = answer_with(6, new_token)
    params = replace(params, max_tokens=7)
    if wish == "stop":
        params = replace(params, stop=(answer.text[6],))
    model = target(eos=frozenset({answer.token_ids[6]} if wish == "eos" else ()))
    plain, _ = build_scripted({}, model)
    drafted, _ = build_scripted(forced(answer.token_ids), model, k=8)
    expected = run(plain, {"a": (PROMPT, params)})["a"]
    assert essence(run(drafted, {"a": (PROMPT, params)})["a"]) == essence(expected)
    assert expected.finish_reason is (FinishReason.LENGTH if wish == "length" else FinishReason.STOP)


def test_text_held_back_for_a_stop_string_comes_out_at_the_end() -> None:
    answer = plain_answer(LETTER_RUN)
    params = replace(LETTER_RUN, stop=(answer.text[-3:] + "never",))
    llm, _ = build_scripted(forced(answer.token_ids), k=16)
    assert run(llm, {"a": (PROMPT, params)})["a"].text == answer.text


def test_an_ignored_eos_inside_a_run_is_a_token_like_others() -> None:
    answer = plain_answer(LETTER_RUN)
    llm, _ = build_scripted(forced(answer.token_ids), target(eos=frozenset(answer.token_ids)), k=5)
    ended = run(llm, {"a": (PROMPT, replace(LETTER_RUN, ignore_eos=True))})["a"]
    assert essence(ended) == essence(answer)
    assert ended.speculation.num_accepted_tokens == ended.speculation.num_draft_tokens > 30


def test_no_tokens_wanted_is_none_given() -> None:
    wishes = replace(LETTER_RUN, max_tokens=0, prompt_logprobs=0)
    llm, _ = build_scripted(forced([97] * 9), k=5, max_num_batched_tokens=8)
    ended = run(llm, {"a": (PROMPT, wishes), "b": (PROMPT, LETTER_RUN)})["a"]
    assert (ended.token_ids, ended.text, ended.finish_reason) == ([], "", FinishReason.LENGTH)
    assert len(ended.prompt_logprobs or ()) == len(PROMPT)
    assert ended.speculation.num_draft_tokens == 0


def test_no_draft_lies_behind_the_last_position_that_the_model_has() -> None:
    """GPT-2 looks positions up in a table, so that a draft behind its end would be an error."""
    model = load_tiny("gpt2", n_positions=128)
    prompt = tuple((b"one two " * 15)[:120])
    wishes = SamplingParams(temperature=0.0, ignore_eos=True)
    [expected] = build_llm("none", target=model).generate([prompt], wishes)
    assert len(expected.token_ids) == 8
    llm, _ = build_scripted(forced(expected.token_ids + [65] * 16), model, k=16)
    for engine in (llm, build_llm("draft_model", target=model, draft=model, num_draft_tokens=5)):
        assert essence(run(engine, {"a": (prompt, wishes)})["a"]) == essence(expected)
