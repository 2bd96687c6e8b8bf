"""Each place of a draft is processed as if the tokens before it had already been said."""

from dataclasses import replace

import pytest

from engine.llm import Completion
from engine.sampling_params import SamplingParams
from tests.engine.answers import LETTERS, PROMPT, build_scripted, essence, plain_answer, run, target
from tests.engines import METHODS, build_llm
from tests.scripted import Script, forced

GREEDY = SamplingParams(temperature=0.0, max_tokens=24, logprobs=3)
SEEDED = replace(GREEDY, temperature=1.2, seed=5)
OPTIONS = {
    "frequency penalty": {"frequency_penalty": 2.0},
    "negative frequency penalty": {"frequency_penalty": -2.0},
    "presence penalty": {"presence_penalty": 2.0},
    "negative presence penalty": {"presence_penalty": -2.0},
    "repetition penalty": {"repetition_penalty": 1.8},
    "reward for repetition": {"repetition_penalty": 0.6},
}
WISHES = {
    f"{kind}, {name}": replace(base, **option)  # type: ignore[arg-type]
    for kind, base in {"greedy": GREEDY, "seeded": SEEDED}.items()
    for name, option in OPTIONS.items()
}


def assert_same_logprobs(found: Completion, expected: Completion) -> None:
    """Entry by entry; the numbers may differ in their last bits with the shape of the batch."""
    assert len(found.logprobs) == len(found.token_ids)
    for ours, theirs in zip(found.logprobs, expected.logprobs, strict=True):
        assert ours.token_id == theirs.token_id
        assert ours.logprob == pytest.approx(theirs.logprob, abs=1e-4)
        assert [top.token_id for top in ours.top] == [top.token_id for top in theirs.top]
        assert [top.logprob for top in ours.top] == pytest.approx([t.logprob for t in theirs.top], abs=1e-4)


def every_wrong_place(answer: Completion) -> dict[str, Script]:
    """A draft that is right, one that branches, and one with another token in each place."""
    scripts = {f"wrong at {place}": forced(answer.token_ids, changed_at=[place]) for place in range(1, 12)}
    scripts["right"] = forced(answer.token_ids)
    scripts["branching"] = forced(answer.token_ids, branching=True)
    scripts["wrong everywhere"] = forced(answer.token_ids, changed_at=range(24))
    return scripts


@pytest.mark.parametrize("wishes", WISHES.values(), ids=WISHES.keys())
def test_penalties_and_logprobs_at_every_place_of_a_draft(wishes: SamplingParams) -> None:
    expected = plain_answer(wishes)
    scripts = every_wrong_place(expected)
    llm, _ = build_scripted(scripts, k=4)
    answers = run(llm, dict.fromkeys(scripts, (PROMPT, wishes)))
    for name, answer in answers.items():
        assert essence(answer) == essence(expected), name
        assert_same_logprobs(answer, expected)
    assert (
        answers["right"].speculation.num_accepted_tokens == answers["right"].speculation.num_draft_tokens > 15
    )
    assert answers["branching"].speculation.num_accepted_tokens > 8
    assert answers["wrong everywhere"].speculation.num_accepted_tokens == 0


@pytest.mark.parametrize("base", [GREEDY, SEEDED], ids=["greedy", "seeded"])
def test_the_penalties_change_these_answers(base: SamplingParams) -> None:
    """Otherwise the test above would show nothing."""
    bare = plain_answer(base).token_ids
    changed = [plain_answer(replace(base, **option)).token_ids != bare for option in OPTIONS.values()]  # type: ignore[arg-type]
    assert all(changed), changed


def test_greedy_tokens_are_first_of_their_own_list() -> None:
    answer = plain_answer(GREEDY)
    llm, _ = build_scripted(forced(answer.token_ids), k=4)
    found = run(llm, {"a": (PROMPT, replace(GREEDY, max_tokens=12))})["a"]
    assert [entry.top[0].token_id for entry in found.logprobs] == found.token_ids == answer.token_ids[:12]
    assert len({entry.logprob for entry in found.logprobs}) == 12


@pytest.mark.parametrize("k", [1, 4, 8])
@pytest.mark.parametrize("place", [0, 3, 6])
def test_min_tokens_counts_tokens_not_steps(place: int, k: int) -> None:
    """EOS is by far the likeliest all along, so it comes as soon as it may: as token min_tokens + 1."""
    eos = ord("Z")
    model = target(eos=frozenset({eos}))
    wishes = replace(
        GREEDY,
        min_tokens=6,
        repetition_penalty=1.2,
        logit_bias=(*((letter, 40.0) for letter, _ in LETTERS), (eos, 99.0)),
    )
    [plain] = build_llm("none", target=model).generate([PROMPT], wishes)
    assert len(plain.token_ids) == 7
    assert plain.token_ids[-1] == eos
    llm, _ = build_scripted(forced([*plain.token_ids, *[97] * 20], changed_at=[place]), model, k)
    assert essence(run(llm, {"a": (PROMPT, wishes)})["a"]) == essence(plain)
    # A draft that ends too early is wrong, not obeyed.
    llm, _ = build_scripted(forced([eos] * 30), model, k)
    assert essence(run(llm, {"a": (PROMPT, wishes)})["a"]) == essence(plain)


@pytest.mark.parametrize("penalty", [2.0, -2.0])
@pytest.mark.parametrize("method", METHODS)
def test_frequency_penalty_with_the_real_drafters(method: str, penalty: float) -> None:
    prompt = b"say hello hello hello hello"
    wishes = replace(GREEDY, frequency_penalty=penalty)
    [plain] = build_llm("none", target=target()).generate([prompt], wishes)
    [drafted] = build_llm(method, target=target()).generate([prompt], wishes)
    assert essence(drafted) == essence(plain)
    assert_same_logprobs(drafted, plain)
    assert drafted.speculation.num_draft_tokens > 0


def test_prompt_logprobs_beside_drafts() -> None:
    wishes = replace(SEEDED, prompt_logprobs=2)
    expected = plain_answer(wishes)
    llm, _ = build_scripted(forced(expected.token_ids), k=4, max_num_batched_tokens=9)
    found = run(llm, {"a": (PROMPT, wishes), "b": (PROMPT, SEEDED)})["a"]
    assert found.prompt_logprobs is not None
    assert expected.prompt_logprobs is not None
    assert len(found.prompt_logprobs) == len(PROMPT)
    for ours, theirs in zip(found.prompt_logprobs[1:], expected.prompt_logprobs[1:], strict=True):
        assert ours is not None
        assert theirs is not None
        assert (ours.token_id, [t.token_id for t in ours.top]) == (
            theirs.token_id,
            [t.token_id for t in theirs.top],
        )
        assert ours.logprob == pytest.approx(theirs.logprob, abs=1e-4)
