"""What is counted as drafted and as accepted."""

from collections import Counter
from dataclasses import replace

import pytest

from engine.outputs import SpeculationStats, StepStats
from engine.sampling_params import SamplingParams
from engine.token_tree import EMPTY_TREE
from tests.engine.answers import LETTERS, PROMPT, build_scripted, plain_answer, run
from tests.engines import build_llm
from tests.scripted import forced

WISHES = SamplingParams(temperature=1.5, seed=2, max_tokens=51, logit_bias=LETTERS)


class Totals:
    """The sums of all steps, and a check of each."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.lengths: list[int] = []

    def __call__(self, stats: StepStats) -> None:
        assert 0 <= stats.num_accepted_tokens <= stats.num_draft_tokens
        assert stats.num_accepted_tokens == sum(stats.accepted_lengths)
        assert stats.num_drafts == len(stats.accepted_lengths)
        assert stats.num_target_forwards == 1
        for name in ("num_drafts", "num_draft_tokens", "num_accepted_tokens", "num_generation_tokens"):
            self.counts[name] += getattr(stats, name)
        self.lengths += stats.accepted_lengths


def test_all_accepted_is_a_rate_of_exactly_one() -> None:
    answer = plain_answer(WISHES)
    totals = Totals()
    llm, _ = build_scripted(forced(answer.token_ids), k=4)
    stats = run(llm, {"a": (PROMPT, WISHES)}, totals)["a"].speculation
    assert stats == SpeculationStats(
        num_steps=11, num_drafts=10, num_draft_tokens=40, num_accepted_tokens=40, num_committed_tokens=51
    )
    assert totals.lengths == [4] * 10
    assert totals.counts == {
        "num_drafts": 10,
        "num_draft_tokens": 40,
        "num_accepted_tokens": 40,
        "num_generation_tokens": 51,
    }


def test_nothing_proposed_is_nothing_counted() -> None:
    totals = Totals()
    llm, speculator = build_scripted(lambda request: EMPTY_TREE, k=4)
    stats = run(llm, {"a": (PROMPT, WISHES)}, totals)["a"].speculation
    assert speculator.num_proposed > 0
    assert stats == SpeculationStats(num_steps=51, num_committed_tokens=51)
    assert totals.lengths == []
    assert totals.counts["num_draft_tokens"] == totals.counts["num_accepted_tokens"] == 0


@pytest.mark.parametrize("method", ["none", "ngram", "suffix", "draft_model"])
def test_an_engine_without_traffic(method: str) -> None:
    stats = build_llm(method).core.take_stats()
    assert stats == StepStats()


@pytest.mark.parametrize("place", range(1, 6))
def test_acceptance_by_position(place: int) -> None:
    """A draft that is wrong at its n-th token is accepted up to the one before."""
    answer = plain_answer(WISHES)
    totals = Totals()
    # The prompt's step says token 0, so that the first draft covers tokens 1 to 5.
    llm, _ = build_scripted(forced(answer.token_ids, changed_at=[place]), k=5)
    run(llm, {"a": (PROMPT, WISHES)}, totals)
    assert totals.lengths[0] == place - 1
    assert set(totals.lengths[1:-1]) == {5}


@pytest.mark.parametrize("k", [4, 8])
@pytest.mark.parametrize("place", range(1, 5))
@pytest.mark.parametrize("kind", ["id", "string"])
def test_what_lies_behind_a_stop_is_not_accepted(kind: str, place: int, k: int) -> None:
    params = next(
        wishes
        for wishes in (replace(WISHES, seed=seed) for seed in range(100))
        if len(set(plain_answer(wishes).token_ids[:5])) == 5
    )
    answer = plain_answer(params)
    if kind == "id":
        stopped = replace(params, stop_token_ids=(answer.token_ids[place],))
    else:
        stopped = replace(params, stop=(answer.text[place],))
    totals = Totals()
    llm, _ = build_scripted(forced(answer.token_ids), k=k)
    stats = run(llm, {"a": (PROMPT, stopped)}, totals)["a"].speculation
    assert totals.lengths == [place]
    assert (stats.num_draft_tokens, stats.num_accepted_tokens) == (k, place)
    assert stats.num_committed_tokens == totals.counts["num_generation_tokens"] == place + 1


def test_branches_count_as_drafted_but_only_one_path_as_accepted() -> None:
    answer = plain_answer(WISHES)
    totals = Totals()
    llm, _ = build_scripted(forced(answer.token_ids, branching=True), k=8)
    stats = run(llm, {"a": (PROMPT, WISHES)}, totals)["a"].speculation
    # Towards the end the room left shrinks the trees.
    assert totals.lengths[:8] == [4] * 8
    assert stats.num_draft_tokens == pytest.approx(2 * stats.num_accepted_tokens, abs=1)
