"""Suffix decoding: counts, trees, limits, and the texts of others."""

import random
from collections.abc import Sequence
from itertools import pairwise

import pytest

from engine.sampling_params import SamplingParams
from engine.speculation.continuation import GrowthRules
from engine.speculation.suffix import SuffixSpeculator
from engine.speculation.text_store import LEAD, TextStore
from engine.token_tree import TokenTree
from tests.speculation.lookups import EOS, propose_one, read_answer, request

Path = tuple[int, ...]


def make(
    *,
    factor: float = 99.0,
    min_probability: float = 0.0,
    is_tree: bool = True,
    max_depth: int = 64,
    store: TextStore | None = None,
) -> SuffixSpeculator:
    rules = GrowthRules(factor, min_probability, is_tree)
    return SuffixSpeculator(rules, max_depth, frozenset({EOS}), store)


def draft(
    speculator: SuffixSpeculator, tokens: Sequence[int], budget: int = 15, scope: str = ""
) -> TokenTree:
    asked = request(tokens, budget, num_prompt=len(tokens), params=SamplingParams(seed=0, cache_scope=scope))
    tree = propose_one(speculator, asked)
    speculator.release("a")
    return tree


def paths(tree: TokenTree) -> list[Path]:
    return [tree.path_tokens(node) for node in range(1, len(tree) + 1)]


def distinct(count: int, seed: int = 0) -> list[int]:
    return random.Random(seed).sample(range(100, 30_000), count)


def after_each(context: Sequence[int], followers: Sequence[int]) -> list[int]:
    """The context once per follower, the follower behind it, then the context alone."""
    fillers = iter(distinct(len(followers), 5))
    behind = [token for follower in followers for token in (*context, follower, next(fillers))]
    return [*behind, *context]


def test_the_likeliest_continuation_comes_first() -> None:
    tokens = after_each((1, 2, 3, 4), (70, 71, 70, 70, 71, 72))
    firsts = [path[0] for path in paths(draft(make(), tokens)) if len(path) == 1]
    assert firsts[:2] == [70, 71]
    # Prompt lookup would take the latest, 72.
    assert paths(draft(make(is_tree=False), tokens))[0] == (70,)


def test_a_tree_has_branches_and_a_chain_has_none() -> None:
    tokens = after_each((1, 2, 3, 4), (70, 71))
    assert {path[0] for path in paths(draft(make(), tokens))} == {70, 71}
    chain = draft(make(is_tree=False), tokens)
    assert len(chain)
    assert chain.parents == tuple(range(len(chain)))


def test_a_longer_match_outweighs_more_shorter_ones() -> None:
    long = (11, 12, 13, 14, 15, 16, 17, 4)
    tokens = [*long, 70, *after_each((4,), (71, 71, 71)), 5, *long]
    firsts = [path[0] for path in paths(draft(make(), tokens)) if len(path) == 1]
    assert firsts[0] == 70


def test_nodes_come_by_probability_so_that_a_smaller_budget_keeps_the_best() -> None:
    rng = random.Random(0)
    tokens = [rng.randrange(5) for _ in range(300)]
    whole = draft(make(), tokens, 12)
    assert len(whole) > 3
    for budget in range(1, 12):
        assert draft(make(), tokens, budget) == whole.truncated(budget)


def test_short_room_costs_levels_and_not_siblings() -> None:
    tokens = after_each((1, 2, 3, 4), (70, 71))
    speculator = make()
    assert speculator.requirements.branches
    assert not make(is_tree=False).requirements.branches
    for max_depth in (1, 2):
        asked = request(tokens, 12, num_prompt=len(tokens), max_depth=max_depth)
        tree = propose_one(speculator, asked)
        assert max(tree.depths()) == max_depth
        assert {path[0] for path in paths(tree)} == {70, 71}


def test_siblings_differ() -> None:
    rng = random.Random(1)
    for _ in range(30):
        tree = draft(make(), [rng.randrange(4) for _ in range(100)], 15)
        assert len(set(paths(tree))) == len(tree)


def test_the_factor_bounds_the_depth() -> None:
    text = distinct(100)
    tokens = [*text, *text[20:40]]
    for factor, depth in ((0.1, 2), (0.25, 5), (0.5, 10)):
        assert len(draft(make(factor=factor), tokens, 63)) == depth
    assert len(draft(make(), tokens, 63)) > 10


def test_unlikely_continuations_are_left_out() -> None:
    tokens = after_each((1, 2, 3, 4), (70, 71, 72, 73))
    assert len(draft(make(min_probability=0.1), tokens)) > 0
    assert len(draft(make(min_probability=0.3), tokens)) == 0


def test_matches_count_as_deep_as_allowed() -> None:
    text = distinct(100)
    tokens = [*text, *text[20:60]]
    lengths = [len(draft(make(max_depth=depth), tokens, 63)) for depth in (1, 4, 16, 64)]
    assert all(shorter < longer for shorter, longer in pairwise(lengths))


def test_nothing_is_drafted_behind_the_end_of_the_answer() -> None:
    copied = [1, 2, 3, 4, 5, 6, 7, 8, EOS, 10, 11]
    assert draft(make(), [*copied, *copied[:8]]).tokens == (EOS,)


def test_a_copy_is_drafted_ever_longer_and_failures_stop_drafting() -> None:
    text = distinct(200)
    steps = read_answer(make(), text, text[20:180], 63)
    assert len(steps) < 12
    unlike = [token for first in text[:60] for token in (first, first + 40_000)]
    steps = read_answer(make(), unlike, text[:60])
    assert steps[30:] == [(0, 0)] * len(steps[30:])


def test_what_is_known_depends_on_the_tokens_alone() -> None:
    rng = random.Random(3)
    for _ in range(10):
        speculator, prompt = make(), [rng.randrange(4) for _ in range(6)]
        tokens = list(prompt)
        for _ in range(20):
            asked = request(tuple(tokens), rng.randint(1, 9), num_prompt=6)
            assert propose_one(speculator, asked) == propose_one(make(), asked)
            tokens += [rng.randrange(4) for _ in range(rng.randint(0, 5))]


# Finished texts.


def test_an_earlier_answer_is_drafted_from_the_start() -> None:
    store = TextStore(10, 1000)
    prompt, answer = distinct(30), distinct(50, 8)
    store.add("ann", [*prompt, *answer], len(prompt))
    speculator = make(store=store)
    assert draft(speculator, prompt, 63, "ann").tokens[:5] == tuple(answer[:5])
    assert draft(speculator, [1, *answer[10:14]], 63, "ann").tokens[:3] == tuple(answer[14:17])


@pytest.mark.parametrize("other", ["", "bob", "ANN"])
def test_no_scope_sees_anothers_text(other: str) -> None:
    store = TextStore(10, 1000)
    prompt, answer = distinct(30), distinct(50, 8)
    store.add("ann", [*prompt, *answer], len(prompt))
    assert len(draft(make(store=store), prompt, 63, other)) == 0
    assert len(draft(make(store=store), [1, *answer[10:14]], 63, other)) == 0


def test_own_and_earlier_texts_are_counted_together() -> None:
    store = TextStore(10, 1000)
    own = after_each((1, 2, 3, 4), (70, 70, 71))
    assert draft(make(store=store), own).tokens[0] == 70
    for _ in range(3):
        store.add("", [5, 1, 2, 3, 4, 71, 6], 1)
    assert draft(make(store=store), own).tokens[0] == 71


def test_a_text_that_is_dropped_while_a_draft_of_it_is_judged() -> None:
    store = TextStore(2, 1000)
    prompt, answer = distinct(30), distinct(60, 8)
    store.add("", [*prompt, *answer], len(prompt))
    speculator, tokens = make(store=store), list(prompt)
    for seed in range(20, 26):
        params = SamplingParams(seed=0)
        tree = propose_one(speculator, request(tuple(tokens), 4, num_prompt=len(prompt), params=params))
        place = len(tokens) - len(prompt)
        assert seed > 22 or tree.tokens == tuple(answer[place : place + 4])[: len(tree)]
        tokens += answer[place : place + 5]
        store.add("", distinct(10, seed), 1)


def size_of(store: TextStore) -> int:
    """Entries in all its books."""
    return sum(
        len(index) + sum(len(latest) + len(earlier) for latest, earlier, _ in index._tables)
        for index in store._indexes.values()
    )


def test_memory_is_bounded_by_texts_and_the_oldest_go_first() -> None:
    store = TextStore(3, 10_000)
    texts = [distinct(40, seed) for seed in range(10)]
    for number, text in enumerate(texts):
        store.add(f"scope {number % 2}", text, 1)
        assert len(store) == min(number + 1, 3)
    speculator = make(store=store)
    found = [
        number for number, text in enumerate(texts)
        if len(draft(speculator, text[10:14], scope=f"scope {number % 2}"))
    ]  # fmt: skip
    assert found == [7, 8, 9]


def test_memory_is_bounded_by_tokens_and_is_really_freed() -> None:
    store = TextStore(1000, 500)
    sizes = []
    for seed in range(200):
        store.add(f"scope {seed % 7}", distinct(random.Random(seed).randint(2, 90), seed), 1)
        assert store.num_tokens <= 500
        assert store.num_tokens == sum(map(len, store._indexes.values()))
        sizes.append(size_of(store))
    assert max(sizes[100:]) <= 1.1 * max(sizes[20:100])
    store.add("last", distinct(499, 1), 0)
    assert store._indexes.keys() == {"last"}
    assert len(store) == 1


def test_of_a_text_longer_than_the_store_the_end_is_kept() -> None:
    store = TextStore(10, 50)
    text = distinct(200)
    store.add("", text, 100)
    assert store.num_tokens == 50
    speculator = make(store=store)
    assert len(draft(speculator, text[160:164])) > 0
    assert len(draft(speculator, text[120:124])) == 0


def test_of_the_prompt_only_its_end_is_kept_and_nothing_without_an_answer() -> None:
    store = TextStore(10, 1000)
    store.add("", distinct(200), 200)
    assert (len(store), store.num_tokens) == (0, 0)
    store.add("", distinct(200), 190)
    assert store.num_tokens == 10 + LEAD + 1
