"""The sampler under the rejection rule: chains, and what falls back to the match rule."""

from dataclasses import replace

import pytest
import torch

from engine.sampling.choosing import choose_tokens
from engine.sampling.logits import process_logits
from engine.sampling.noise import NoiseKey, Stream
from engine.sampling.row_group import RowGroup
from engine.sampling.sampler import Sampler
from engine.sampling_params import SamplingParams, SpeculationParams
from engine.token_tree import Proposal, TokenTree
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
    Line,
    generate,
    generate_next,
    model_chain,
    no_draft,
    random_trees,
    tasks_of,
)


def test_rejection_at_temperature_zero_is_the_plain_run() -> None:
    lines = [
        Line(replace(line.params, temperature=0.0, speculation=REJECTION), line.token_ids) for line in MIXED
    ]
    for drafter in DRAFTERS.values():
        assert generate(lines, drafter, 24) == generate(lines, no_draft, 24)


def test_a_sampled_chain_at_temperature_zero_is_matched() -> None:
    line = Line(SamplingParams(temperature=0.0, speculation=REJECTION))
    (plain,) = generate([line], no_draft, 3)
    wrong = (plain[1] + 1) % VOCAB
    certain = [torch.nn.functional.one_hot(torch.tensor(token), VOCAB).float() for token in (plain[0], wrong)]
    task = line.task(TokenTree.chain([plain[0], wrong], Proposal.SAMPLED, certain))
    (run,) = Sampler()(MODEL.rows([task]), [task])
    assert run.accepted_nodes == (1,)
    assert run.token_ids == plain[:2]


def test_a_rejected_token_is_replaced_with_noise_of_its_own() -> None:
    # The bias makes the target refuse token 5, so that every run ends in a replacement.
    q = torch.full((VOCAB,), 1 / VOCAB)
    for seed in range(40):
        line = Line(SamplingParams(seed=seed, logit_bias=((5, -100.0),), speculation=REJECTION))
        task = line.task(TokenTree.chain([5], Proposal.SAMPLED, [q]))
        rows = MODEL.rows([task])
        (run,) = Sampler()(rows, [task])
        group = RowGroup(line.params, line.token_ids, len(PROMPT), EOS)
        p = process_logits(rows[:1], [group]).softmax(-1)
        key = NoiseKey(seed, 0, len(PROMPT), Stream.RESIDUAL)
        expected = choose_tokens((p - q).clamp(min=0).log(), [key]).tolist()
        assert (run.accepted_nodes, list(run.token_ids)) == ((), expected)


def test_rejection_of_drafts_that_were_not_sampled_is_the_plain_run() -> None:
    lines = [Line(replace(line.params, speculation=REJECTION)) for line in MIXED]
    for drafter in (random_trees, model_chain(DRAFT, Stream.TARGET)):
        assert generate(lines, drafter, 24) == generate(lines, no_draft, 24)


def test_a_draft_equal_to_the_target_is_always_accepted_by_ratio() -> None:
    lines = [Line(SamplingParams(seed=seed, top_p=0.9, speculation=REJECTION)) for seed in range(200)]
    tasks = tasks_of(lines, model_chain(MODEL, Stream.DRAFT))
    runs = Sampler()(MODEL.rows(tasks), tasks)
    assert all(run.accepted_nodes == (1, 2, 3) for run in runs)
    assert all(run.token_ids[:3] == task.tree.tokens for run, task in zip(runs, tasks, strict=True))
    # What follows is the plain run's choice there: the bonus is drawn with the target's own noise.
    ends = [
        Line(line.params, line.token_ids + run.token_ids[:3]) for line, run in zip(lines, runs, strict=True)
    ]
    assert [(run.token_ids[3],) for run in runs] == generate_next(ends)


def test_the_ratio_rule_accepts_more_than_the_match_rule_on_sampled_drafts() -> None:
    # Proof that the two are told apart at all: independent noise rarely meets the target's own choice.
    accepted = []
    for speculation in (REJECTION, SpeculationParams()):
        lines = [
            Line(SamplingParams(seed=seed, temperature=2.0, speculation=speculation)) for seed in range(200)
        ]
        tasks = tasks_of(lines, model_chain(MODEL, Stream.DRAFT))
        accepted.append(sum(len(run.accepted_nodes) for run in Sampler()(MODEL.rows(tasks), tasks)))
    assert accepted[0] > 2 * accepted[1]


@pytest.mark.parametrize("distribution", [None, torch.full((VOCAB + 1,), 1 / VOCAB)])
def test_distributions_of_another_shape_are_refused(distribution: object) -> None:
    tree = TokenTree.chain([1], Proposal.SAMPLED, [distribution])
    with pytest.raises(ValueError, match=f"tensor of {VOCAB} probabilities"):
        Sampler()(torch.zeros(2, VOCAB), [Line(SamplingParams(seed=1, speculation=REJECTION)).task(tree)])


def test_draws_report_what_they_were_drawn_from() -> None:
    processed = process_logits(MODEL.row(PROMPT)[None], [RowGroup(SamplingParams(top_k=3), PROMPT, 3, EOS)])
    keys = [NoiseKey(seed, 0, 3, Stream.DRAFT) for seed in range(4000)]
    drawn = draw_tokens(processed.expand(4000, -1), keys)
    law = drawn[0].distribution
    assert law is not None
    assert torch.equal(law, processed[0].softmax(0))
    assert int((law > 0).sum()) == 3
    counts = torch.tensor([token.token_id for token in drawn]).bincount(minlength=VOCAB)
    assert int(counts[law == 0].sum()) == 0
    torch.testing.assert_close(counts / 4000, law, rtol=0, atol=0.03)
