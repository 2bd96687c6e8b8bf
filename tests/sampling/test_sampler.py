"""The sampler as an engine uses it, step after step: the match rule, batches, reports."""

from dataclasses import replace

import pytest
import torch

from engine.sampling.choosing import choose_tokens
from engine.sampling.logprobs import row_logprobs
from engine.sampling.noise import NoiseKey, Stream
from engine.sampling.sampler import Sampler, SamplingTask
from engine.sampling_params import SamplingParams
from engine.token_tree import EMPTY_TREE, TokenTree
from tests.sampling.drafts import draw_tokens
from tests.sampling.table_model import (
    DRAFT,
    DRAFTERS,
    EOS,
    MIXED,
    MODEL,
    PROMPT,
    REJECTION,
    VOCAB,
    Drafter,
    Line,
    generate,
    model_chain,
    no_draft,
    random_trees,
    tasks_of,
)


@pytest.mark.parametrize("drafter", DRAFTERS.values(), ids=DRAFTERS)
def test_match_yields_the_plain_run_whatever_is_drafted(drafter: Drafter) -> None:
    assert generate(MIXED, drafter, 24) == generate(MIXED, no_draft, 24)


def test_a_draft_that_is_the_plain_run_is_accepted_whole() -> None:
    plain = generate(MIXED, no_draft, 6)
    tasks = [line.task(TokenTree.chain(tokens[:5])) for line, tokens in zip(MIXED, plain, strict=True)]
    runs = Sampler()(MODEL.rows(tasks), tasks)
    assert [run.token_ids for run in runs] == plain
    assert all(run.accepted_nodes == (1, 2, 3, 4, 5) for run in runs)


@pytest.mark.parametrize("wrong", range(5))
def test_a_changed_draft_token_is_corrected_at_its_place(wrong: int) -> None:
    plain = generate(MIXED, no_draft, 6)
    drafts = [[*tokens[:5]] for tokens in plain]
    for draft in drafts:
        draft[wrong] = (draft[wrong] + 1) % VOCAB
    tasks = [line.task(TokenTree.chain(draft)) for line, draft in zip(MIXED, drafts, strict=True)]
    runs = Sampler()(MODEL.rows(tasks), tasks)
    assert [run.token_ids for run in runs] == [tokens[: wrong + 1] for tokens in plain]


def mixed_tasks() -> list[SamplingTask]:
    lines = [Line(line.params, (*PROMPT, place)) for place, line in enumerate(MIXED)]
    sampled = SamplingParams(temperature=1.1, top_p=0.95, speculation=REJECTION)
    ratio_lines = [Line(replace(sampled, seed=seed)) for seed in range(6)]
    tasks = tasks_of(lines, random_trees) + tasks_of(ratio_lines, model_chain(DRAFT, Stream.DRAFT))
    return [replace(task, params=replace(task.params, logprobs=3)) for task in tasks]


def test_a_task_alone_and_among_others_is_the_same_bit_for_bit() -> None:
    tasks = mixed_tasks()
    together = Sampler()(MODEL.rows(tasks), tasks)
    assert [Sampler()(MODEL.rows([task]), [task])[0] for task in tasks] == together
    backwards = tasks[::-1]
    assert Sampler()(MODEL.rows(backwards), backwards)[::-1] == together


def test_the_size_of_chunks_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    tasks = mixed_tasks()
    together = Sampler()(MODEL.rows(tasks), tasks)
    monkeypatch.setattr("engine.sampling.logits.CHUNK_ELEMENTS", 3 * VOCAB)
    assert Sampler()(MODEL.rows(tasks), tasks) == together


def test_logprobs_come_from_the_raw_row_that_chose_the_token() -> None:
    tasks = mixed_tasks()
    runs = Sampler()(MODEL.rows(tasks), tasks)
    assert any(run.accepted_nodes for run in runs)
    for task, run in zip(tasks, runs, strict=True):
        histories = [[*task.token_ids, *run.token_ids[:place]] for place in range(len(run.token_ids))]
        rows = torch.stack([MODEL.row(history) for history in histories])
        assert run.logprobs == tuple(row_logprobs(rows, run.token_ids, 3))


def test_logprobs_are_left_out_unless_asked_for() -> None:
    tasks = [Line(SamplingParams(temperature=0.0, logprobs=count)).task() for count in (None, 0, 2)]
    none, chosen_only, two = (run.logprobs for run in Sampler()(MODEL.rows(tasks), tasks))
    assert none is None
    assert chosen_only is not None
    assert chosen_only[0].top == ()
    assert two is not None
    assert two[0].top[0] == (two[0].token_id, two[0].logprob)


def test_greedy_takes_the_lowest_id_among_equals() -> None:
    logits = torch.zeros(1, 5000)
    logits[0, [3000, 77, 4999]] = 2.5
    assert Sampler()(logits, [Line(SamplingParams(temperature=0.0)).task()])[0].token_ids == (77,)
    among_sampled = [Line(SamplingParams(seed=1)).task(), Line(SamplingParams(temperature=0.0)).task()]
    assert Sampler()(logits.repeat(2, 1), among_sampled)[1].token_ids == (77,)


def test_greedy_acts_on_processed_rows() -> None:
    best = int(MODEL.row(PROMPT).argmax())
    banned = SamplingParams(temperature=0.0, logit_bias=((best, -100.0),))
    forced = SamplingParams(temperature=0.0, logit_bias=((best, -100.0), (5, 100.0)))
    tasks = [Line(banned).task(), Line(forced).task()]
    first, second = Sampler()(MODEL.rows(tasks), tasks)
    assert first.token_ids[0] != best
    assert second.token_ids == (5,)


def test_bias_of_a_hundred_decides_sampled_tokens() -> None:
    forced = [Line(SamplingParams(seed=seed, logit_bias=((5, 100.0),))) for seed in range(50)]
    assert generate(forced, random_trees, 4) == [(5, 5, 5, 5)] * 50
    banned = [Line(SamplingParams(seed=seed, logit_bias=((5, -100.0),))) for seed in range(50)]
    assert not any(5 in tokens for tokens in generate(banned, random_trees, 20))


def test_eos_is_banned_for_tokens_not_for_steps() -> None:
    """The chain always ends in EOS: it must fall while min_tokens is not reached, and stand right after."""
    eager = SamplingParams(temperature=0.0, min_tokens=4, logit_bias=((11, 100.0),))
    plain = generate([Line(eager)], no_draft, 5)[0]
    assert plain.index(11) == 4
    for length in range(1, 5):
        chain = TokenTree.chain([*plain[:length], 11])
        (tokens,) = generate([Line(eager)], lambda lines, chain=chain: [chain], 5)  # type: ignore[misc]
        assert tokens == plain
    task = Line(eager).task(TokenTree.chain([*plain[:4], 11]))
    assert Sampler()(MODEL.rows([task]), [task])[0].token_ids[:5] == plain


def test_two_choices_and_two_seeds_differ() -> None:
    lines = [
        Line(SamplingParams(seed=seed, choice=choice))
        for seed in (-1, 2**63 - 1, -(2**63))
        for choice in (0, 1)
    ]
    texts = generate(lines, no_draft, 16)
    assert len(set(texts)) == len(texts)
    assert generate(lines, no_draft, 16) == texts


def test_a_preemption_changes_nothing() -> None:
    # The same tokens, seen as a prompt: only the place in the sequence counts.
    line = Line(SamplingParams(seed=8))
    (tokens,) = generate([line], no_draft, 10)
    resumed = Line(line.params, PROMPT + tokens[:6])
    task = SamplingTask(line.params, resumed.token_ids, len(resumed.token_ids), EMPTY_TREE, EOS)
    assert Sampler()(MODEL.rows([task]), [task])[0].token_ids == tokens[6:7]


def test_rows_and_tasks_must_agree() -> None:
    with pytest.raises(ValueError, match="logits have 3 rows, but the requests have 1"):
        Sampler()(torch.zeros(3, VOCAB), [Line(SamplingParams(seed=1)).task()])


def test_no_tasks_no_runs() -> None:
    assert Sampler()(torch.empty(0, VOCAB), []) == []


def test_coupled_and_greedy_draws_have_no_distribution() -> None:
    processed = MODEL.row(PROMPT).expand(2, -1)
    coupled, greedy = draw_tokens(processed, [NoiseKey(1, 0, 3, Stream.TARGET), None])
    assert coupled.distribution is None
    assert greedy.distribution is None
    assert greedy.token_id == int(processed[0].argmax())


def test_choosing_among_mixed_rows_uses_each_rows_own_noise() -> None:
    logits = torch.randn(6, 500, generator=torch.Generator().manual_seed(0))
    keys = [None if row % 3 == 0 else NoiseKey(row, 0, 9, Stream.TARGET) for row in range(6)]
    together = choose_tokens(logits, keys).tolist()
    assert together == [int(choose_tokens(logits[row][None], [keys[row]])) for row in range(6)]
