"""Prompt lookup against a search that looks at everything."""

import random
from collections.abc import Iterator, Sequence

import pytest

from engine.sampling_params import SamplingParams
from engine.speculation.base import DraftRequest, ProposalContext
from engine.speculation.ngram import NgramSpeculator
from engine.token_tree import Proposal

EOS = 9


def make(ngram_min: int = 1, ngram_max: int = 3) -> NgramSpeculator:
    return NgramSpeculator(ngram_min, ngram_max, frozenset({EOS}))


def request(
    tokens: Sequence[int], budget: int = 4, *, request_id: str = "a", params: SamplingParams | None = None
) -> DraftRequest:
    return DraftRequest(
        request_id=request_id,
        token_ids=tokens,
        num_prompt_tokens=1,
        num_computed_tokens=len(tokens) - 1,
        num_cached_tokens=0,
        block_table=(),
        params=params or SamplingParams(seed=0),
        budget=budget,
    )


def draft(speculator: NgramSpeculator, *args: object, **kwargs: object) -> list[int]:
    [tree] = speculator.propose(ProposalContext((request(*args, **kwargs),)))  # type: ignore[arg-type]
    assert tree.proposal is Proposal.DETERMINISTIC
    assert tree.parents == tuple(range(len(tree)))
    return list(tree.tokens)


def brute_force(tokens: Sequence[int], budget: int, sizes: Sequence[int]) -> list[int]:
    for size in sizes:
        for end in range(len(tokens) - 1, size - 1, -1):
            if list(tokens[end - size : end]) == list(tokens[len(tokens) - size :]):
                text = list(tokens)
                for place in range(end, end + budget):
                    text.append(text[place])
                return text[len(tokens) :]
    return []


def test_the_longest_ngram_wins_over_a_later_shorter_one() -> None:
    tokens = [1, 2, 3, 70, 5, 3, 80, 1, 2, 3]
    assert draft(make(), tokens, 1) == [70]
    assert draft(make(1, 1), tokens, 1) == [80]


def test_the_latest_of_equal_ngrams_wins() -> None:
    assert draft(make(2, 2), [1, 2, 70, 1, 2, 80, 5, 1, 2], 2) == [80, 5]


def test_nothing_shorter_than_ngram_min_is_looked_up() -> None:
    assert draft(make(2, 3), [1, 70, 1], 2) == []


@pytest.mark.parametrize("tokens", [[7], [7, 8], [1, 2, 3, 4]])
def test_nothing_repeats_nothing_is_proposed(tokens: list[int]) -> None:
    assert draft(make(), tokens) == []


def test_a_match_that_overlaps_the_end() -> None:
    assert draft(make(), [7, 7, 7], 1) == [7]
    assert draft(make(3, 3), [7, 7, 7], 1) == []
    assert draft(make(3, 3), [7, 7, 7, 7], 1) == [7]


def test_text_that_runs_into_the_end_goes_on_as_a_loop() -> None:
    assert draft(make(2, 2), [5, 1, 2, 3, 1, 2], 8) == [3, 1, 2, 3, 1, 2, 3, 1]
    assert draft(make(), [7, 7, 7], 4) == [7, 7, 7, 7]


def test_nothing_is_drafted_behind_the_end_of_the_answer() -> None:
    tokens = [1, 2, EOS, 4, 1, 2]
    assert draft(make(), tokens) == [EOS]
    assert draft(make(), tokens, params=SamplingParams(ignore_eos=True)) == [EOS, 4, 1, 2]
    stops = SamplingParams(ignore_eos=True, stop_token_ids=(4,))
    assert draft(make(), tokens, params=stops) == [EOS, 4]


@pytest.mark.parametrize(("ngram_min", "ngram_max"), [(1, 1), (1, 3), (2, 3), (2, 5)])
def test_the_growing_index_equals_a_search_of_everything(ngram_min: int, ngram_max: int) -> None:
    rng = random.Random(ngram_max)
    for _ in range(20):
        speculator = make(ngram_min, ngram_max)
        tokens = [rng.randrange(4) for _ in range(rng.randint(1, 12))]
        for _ in range(25):
            budget = rng.randint(0, 6)
            expected = brute_force(tokens, budget, range(ngram_max, ngram_min - 1, -1))
            assert draft(speculator, list(tokens), budget) == expected, tokens
            tokens += [rng.randrange(4) for _ in range(rng.randint(0, 5))]


def test_an_id_that_comes_back_starts_anew() -> None:
    speculator = make(1, 1)
    assert draft(speculator, [1, 2, 3, 1], 2) == [2, 3]
    speculator.release("a")
    assert draft(speculator, [4, 5, 6, 7, 1], 2) == []


def test_fewer_tokens_than_indexed_start_anew() -> None:
    speculator = make(1, 1)
    assert draft(speculator, [1, 2, 3, 1], 2) == [2, 3]
    assert draft(speculator, [5, 1], 2) == []
    assert draft(speculator, [5, 1, 5], 2) == [1, 5]


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


def test_a_step_reads_in_proportion_to_its_new_tokens() -> None:
    rng = random.Random(0)
    tokens = CountingTokens([rng.randrange(50) for _ in range(4000)])
    speculator = make(1, 3)
    draft(speculator, tokens, 5)
    for _ in range(20):
        tokens.tokens += [rng.randrange(50), rng.randrange(50)]
        tokens.num_read = 0
        draft(speculator, tokens, 5)
        # Two new ends of three n-grams (12 reads), a look-up (6), five tokens to propose.
        assert tokens.num_read <= 23


def test_sizes_in_disorder_are_refused() -> None:
    with pytest.raises(ValueError, match="got 3 and 2"):
        make(3, 2)
