"""bad_words and allowed_token_ids: kept at every place of a draft, so that speculation changes nothing."""

from dataclasses import replace

import pytest

from engine.errors import InvalidRequest
from engine.llm import Completion
from engine.sampling_params import (
    MAX_BAD_WORDS,
    Constraint,
    ConstraintKind,
    SamplingParams,
    SpeculationParams,
)
from tests.engine.answers import LETTERS, assert_clean, essence
from tests.engines import build_llm
from tests.tiny import EOS

PROMPTS = ["one two one two", "abcabcabc", "zzzz", "the cat sat on the mat"]
GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
SEEDED = SamplingParams(temperature=0.9, seed=11, max_tokens=24, ignore_eos=True)
BOTH = pytest.mark.parametrize("wishes", [GREEDY, SEEDED], ids=["greedy", "seeded"])
ABC = tuple(b"abc")


def plain(wishes: SamplingParams | list[SamplingParams]) -> list[Completion]:
    return build_llm("none", prefix_caching=False).generate(PROMPTS, wishes)


def has(answer: Completion, word: tuple[int, ...]) -> bool:
    ids = tuple(answer.token_ids)
    return any(ids[i : i + len(word)] == word for i in range(len(ids)))


def words_of(answer: Completion) -> tuple[tuple[int, ...], ...]:
    """A token, a pair and a triple that the answer has."""
    ids = tuple(answer.token_ids)
    return ids[3:4], ids[8:10], ids[14:17]


@BOTH
@pytest.mark.parametrize("method", ["ngram", "draft_model", "draft_model 3,2,1,1"])
def test_bad_words_are_not_said_and_drafts_change_nothing(method: str, wishes: SamplingParams) -> None:
    free = plain(wishes)
    asked = [replace(wishes, bad_words=words_of(answer)) for answer in free]
    expected = plain(asked)
    for answer, before, own in zip(expected, free, asked, strict=True):
        assert all(has(before, word) for word in own.bad_words)
        assert not any(has(answer, word) for word in own.bad_words)
    predicting = [
        replace(own, speculation=SpeculationParams(prediction=tuple(before.token_ids)))
        for own, before in zip(asked, free, strict=True)
    ]
    llm = build_llm(method)
    for each in (asked, predicting):
        assert list(map(essence, llm.generate(PROMPTS, each))) == list(map(essence, expected))
    assert_clean(llm)


def test_a_word_of_several_tokens_may_begin_and_a_prompt_may_end_with_its_beginning() -> None:
    [answer] = build_llm("none").generate(["ab"], replace(GREEDY, logit_bias=tuple((t, 100.0) for t in ABC)))
    first = answer.token_ids[0]
    again = replace(GREEDY, logit_bias=tuple((t, 100.0) for t in ABC), bad_words=((ord("b"), first),))
    [same] = build_llm("none").generate(["ab"], again)
    assert same.token_ids[0] == first, "the prompt's tokens are not the answer's"


@BOTH
@pytest.mark.parametrize("method", ["ngram", "draft_model", "draft_model 3,2,1,1"])
def test_only_allowed_ids_are_chosen(method: str, wishes: SamplingParams) -> None:
    wishes = replace(wishes, allowed_token_ids=ABC)
    expected = plain(wishes)
    assert {token for answer in expected for token in answer.token_ids} <= set(ABC)
    assert list(map(essence, build_llm(method).generate(PROMPTS, wishes))) == list(map(essence, expected))


def test_an_end_that_is_not_allowed_does_not_come() -> None:
    likely = replace(GREEDY, ignore_eos=False, logit_bias=((EOS, 100.0),))
    [ended] = build_llm("none").generate(["x"], likely)
    [goes_on] = build_llm("none").generate(["x"], replace(likely, allowed_token_ids=ABC))
    assert ended.token_ids == [EOS]
    assert len(goes_on.token_ids) == 24


@BOTH
def test_what_would_leave_nothing_yields(wishes: SamplingParams) -> None:
    [answer] = build_llm("none").generate(
        ["x"], replace(wishes, allowed_token_ids=(97, EOS), bad_words=((97,), (EOS,)), min_tokens=4)
    )
    assert set(answer.token_ids) <= {97, EOS}
    [early] = build_llm("none").generate(
        ["x"], replace(wishes, ignore_eos=False, allowed_token_ids=(EOS,), min_tokens=4)
    )
    assert early.token_ids == [EOS] * 5, "there is nothing else to say until an end may end"


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(InvalidRequest, match=f"at most {MAX_BAD_WORDS}"):
        SamplingParams(bad_words=((1,),) * (MAX_BAD_WORDS + 1))
    with pytest.raises(InvalidRequest, match="empty word"):
        SamplingParams(bad_words=((),))
    format_ = Constraint(ConstraintKind.REGEX, "a+")
    for ban in ({"bad_words": ((1,),)}, {"allowed_token_ids": (1,)}):
        with pytest.raises(InvalidRequest, match="cannot be had with structured_outputs"):
            SamplingParams(constraint=format_, **ban)
    for name in ("bad_words", "allowed_token_ids"):
        value = ((259,),) if name == "bad_words" else (259,)
        with pytest.raises(InvalidRequest, match=f"token id 259 in {name}"):
            build_llm("none").generate(["x"], replace(GREEDY, **{name: value}))  # type: ignore[arg-type]


def test_penalties_and_bans_go_together() -> None:
    wishes = replace(
        SEEDED, frequency_penalty=1.0, logit_bias=LETTERS, bad_words=((97,), (98, 99)), logprobs=2
    )
    expected = plain(wishes)
    assert list(map(essence, build_llm("draft_model").generate(PROMPTS, wishes))) == list(
        map(essence, expected)
    )
