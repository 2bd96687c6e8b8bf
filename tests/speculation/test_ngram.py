"""Prompt lookup: which place is followed, how far, and what it costs."""

import random
from collections.abc import Iterator, Sequence

import pytest

from engine.sampling_params import SamplingParams
from engine.speculation.ngram import NgramSpeculator
from engine.token_tree import EMPTY_TREE
from tests.speculation.lookups import EOS, propose_one, read_answer, request


def make(ngram_min: int = 1, ngram_max: int = 3) -> NgramSpeculator:
    return NgramSpeculator(ngram_min, ngram_max, frozenset({EOS}))


def draft(
    tokens: Sequence[int],
    budget: int = 4,
    *,
    speculator: NgramSpeculator | None = None,
    params: SamplingParams | None = None,
) -> list[int]:
    asked = request(tokens, budget, num_prompt=len(tokens), params=params)
    tree = propose_one(speculator or make(), asked)
    assert tree.parents == tuple(range(len(tree)))
    return list(tree.tokens)


def distinct(count: int, seed: int = 0) -> list[int]:
    """Tokens of which no two are equal."""
    return random.Random(seed).sample(range(100, 30_000), count)


def test_the_longest_match_wins_over_a_later_shorter_one() -> None:
    tokens = [1, 2, 3, 70, 5, 3, 80, 1, 2, 3]
    assert draft(tokens, 1) == [70]


def test_a_match_longer_than_any_ngram_wins_too() -> None:
    tokens = [1, 2, 3, 4, 70, 5, 2, 3, 4, 80, 1, 2, 3, 4]
    assert draft(tokens, 1) == [70]
    assert draft(tokens, 1, speculator=make(2, 2)) == [70]


def test_the_latest_of_equal_matches_wins() -> None:
    assert draft([6, 1, 2, 70, 7, 1, 2, 80, 5, 1, 2], 1, speculator=make(2, 2)) == [80]


def test_nothing_shorter_than_ngram_min_is_looked_up() -> None:
    assert draft([1, 70, 1], 2, speculator=make(2, 3)) == []
    assert draft([1, 70, 1], 2) == [70]


@pytest.mark.parametrize("tokens", [[7], [7, 8], [1, 2, 3, 4]])
def test_nothing_repeats_nothing_is_proposed(tokens: list[int]) -> None:
    assert draft(tokens) == []


def test_text_that_runs_into_the_end_goes_on_as_a_loop() -> None:
    assert draft([5, 1, 2, 3, 1, 2, 3, 1, 2, 3, 1, 2], 7) == [3, 1, 2, 3, 1, 2, 3]
    assert draft([7] * 9, 6) == [7] * 6


def test_nothing_is_drafted_behind_the_end_of_the_answer() -> None:
    copied = [1, 2, 3, 4, 5, 6, 7, 8, EOS, 10, 11]
    tokens = [*copied, *copied[:8]]
    assert draft(tokens) == [EOS]
    assert draft(tokens, params=SamplingParams(ignore_eos=True)) == [EOS, 10, 11, 1]
    assert draft(tokens, params=SamplingParams(ignore_eos=True, stop_token_ids=(10,))) == [EOS, 10]


def test_a_longer_match_warrants_a_longer_draft() -> None:
    text = distinct(200)
    lengths = [len(draft([*text, *text[50 : 50 + match]], 63)) for match in (1, 2, 4, 8, 16, 32)]
    assert lengths == sorted(lengths)
    assert 1 <= lengths[0] <= 3
    assert lengths[-1] >= 15


def test_a_copy_is_drafted_ever_longer() -> None:
    text = distinct(200)
    steps = read_answer(make(), text, text[20:180], 63)
    assert all(drafted == accepted for drafted, accepted in steps[:-1])
    assert len(steps) < 12


def test_a_changed_token_does_not_end_the_copy() -> None:
    text = distinct(120)
    edited = [*text[10:50], 7, *text[51:90]]
    for speculator in (make(4, 4), make(1, 3)):
        steps = read_answer(speculator, text, edited)[:-1]
        (wrong,) = (i for i, (drafted, accepted) in enumerate(steps) if accepted < drafted)
        # Behind the changed token drafting resumes at once, whatever the n-gram's size.
        assert steps[wrong + 1][1] > 0


def test_a_replacement_that_proved_right_is_made_again() -> None:
    old, new = 1, 2
    text = distinct(150)
    for place in (20, 50, 80, 110):
        text[place] = old
    renamed = [new if token == old else token for token in text]
    steps = read_answer(make(), text, renamed)
    # Only the first place costs; afterwards the new name is drafted.
    assert sum(accepted < drafted for drafted, accepted in steps[1:-1]) == 1
    # And a replacement that does not hold any more is dropped.
    half = [*renamed[:70], *text[70:]]
    steps = read_answer(make(), text, half)
    assert sum(accepted < drafted for drafted, accepted in steps[1:-1]) == 2


def coins(count: int, share: float) -> list[int]:
    """Two tokens in an order that nobody knows, the first of them with a chance."""
    rng = random.Random(5)
    return [21 if rng.random() < share else 31 for _ in range(count)]


@pytest.mark.parametrize(("share", "children"), [(0.5, {21, 31}), (1.0, {21})])
def test_matches_that_go_on_differently_make_branches(share: float, children: set[int]) -> None:
    text = coins(160, share)
    prompt, answer = text[:100], text[100:]
    speculator = make()
    read_answer(speculator, prompt, answer)
    tree = propose_one(speculator, request((*prompt, *answer), 15, num_prompt=len(prompt)))
    assert {tree.tokens[child - 1] for child in tree.children(0)} == children
    assert list(tree.probabilities) == sorted(tree.probabilities, reverse=True)


def test_a_rival_that_is_wrong_as_well_is_no_branch() -> None:
    prompt = [token for filler in distinct(60, 7) for token in (10, filler)]
    answer = [token for filler in distinct(60, 8) for token in (10, filler)]
    speculator = make()
    read_answer(speculator, prompt, [*answer, 10])
    assert propose_one(speculator, request((*prompt, *answer, 10), 15, num_prompt=len(prompt))) == EMPTY_TREE


def alternating(count: int) -> tuple[list[int], list[int]]:
    """A prompt of pairs, and an answer that repeats their first tokens, never the second."""
    firsts = distinct(count, 3)
    return [token for first in firsts for token in (first, first + 40_000)], firsts


def test_a_request_whose_lookups_fail_stops_drafting() -> None:
    prompt, answer = alternating(60)
    steps = read_answer(make(), prompt, answer)
    drafted = [count for count, _ in steps]
    assert sum(drafted) <= 12
    assert drafted[20:] == [0] * len(drafted[20:])


def test_it_drafts_again_where_that_would_have_been_right() -> None:
    prompt, answer = alternating(60)
    steps = read_answer(make(), prompt, [*answer, *prompt[20:100]])
    assert steps[-1][0] > 0
    assert sum(accepted for _, accepted in steps[58:]) > 40


@pytest.mark.parametrize(("ngram_min", "ngram_max"), [(1, 1), (1, 3), (2, 3), (2, 5)])
def test_what_is_known_depends_on_the_tokens_alone(ngram_min: int, ngram_max: int) -> None:
    """And not on how many came at a time, or on what was drafted in between."""
    rng = random.Random(ngram_max)
    for _ in range(15):
        speculator, prompt = make(ngram_min, ngram_max), [rng.randrange(4) for _ in range(6)]
        tokens = list(prompt)
        for _ in range(25):
            asked = request(tuple(tokens), rng.randint(1, 6), num_prompt=6)
            assert propose_one(speculator, asked) == propose_one(make(ngram_min, ngram_max), asked), tokens
            tokens += [rng.randrange(4) for _ in range(rng.randint(0, 5))]


def test_an_id_that_comes_back_starts_anew() -> None:
    speculator = make(1, 1)
    assert draft([1, 2, 3, 1], 2, speculator=speculator) == [2]
    speculator.release("a")
    assert draft([4, 5, 6, 7, 1], 2, speculator=speculator) == []


def test_fewer_tokens_than_known_start_anew() -> None:
    speculator = make(1, 1)
    assert draft([1, 2, 3, 1], 2, speculator=speculator) == [2]
    assert draft([5, 1], 2, speculator=speculator) == []
    assert draft([5, 1, 5], 2, speculator=speculator) == [1]


class CountingTokens(Sequence[int]):
    """Counts how many tokens are read."""

    def __init__(self, tokens: list[int]) -> None:
        self.tokens = tokens
        self.num_read = 0

    def __len__(self) -> int:
        return len(self.tokens)

    def __iter__(self) -> Iterator[int]:
        raise AssertionError("a loop over the whole sequence")

    def __getitem__(self, index):  # type: ignore[no-untyped-def]
        part = self.tokens[index]
        self.num_read += len(part) if isinstance(part, list) else 1
        return part


def test_a_step_reads_its_new_tokens_once() -> None:
    rng = random.Random(0)
    tokens = CountingTokens([rng.randrange(50) for _ in range(4000)])
    speculator = make(1, 3)
    propose_one(speculator, request(tokens, 5, num_prompt=4000))
    for _ in range(20):
        tokens.tokens += [rng.randrange(50), rng.randrange(50)]
        tokens.num_read = 0
        propose_one(speculator, request(tokens, 5, num_prompt=4000))
        assert tokens.num_read == 2


def test_sizes_in_disorder_are_refused() -> None:
    with pytest.raises(ValueError, match="got 3 and 2"):
        make(3, 2)
