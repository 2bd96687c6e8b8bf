"""The sampler under the rules that judge by distributions: its walk is the enumerated one, its coins fair."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from engine.sampling import judging, sampler, verification
from engine.sampling.choosing import choose_tokens
from engine.sampling.noise import NoiseKey, Stream, uniform
from engine.sampling.odds import BlockOdds, SiblingOdds, TypicalOdds, drawn_distinct, drawn_independently
from engine.sampling.row_group import RowGroup
from engine.sampling.sampler import Sampler
from engine.sampling_params import SamplingParams, SpeculationParams
from engine.token_tree import EMPTY_TREE, Proposal, TokenTree
from tests.sampling import chi_square, rules
from tests.sampling.rules import follow_typical, verify_block, verify_siblings
from tests.sampling.table_model import (
    BLOCK,
    DRAFT,
    MODEL,
    PROMPT,
    REJECTION,
    TYPICAL,
    VOCAB,
    Drafter,
    Line,
    Recorder,
    TableModel,
    drawn_trees,
    generate,
    generate_next,
    tasks_of,
)

SAMPLED, DISTINCT = Proposal.SAMPLED, Proposal.SAMPLED_DISTINCT


def lines_of(speculation: SpeculationParams, num_seeds: int, temperature: float = 1.2) -> list[Line]:
    params = SamplingParams(temperature=temperature, speculation=speculation)
    return [Line(replace(params, seed=seed, choice=seed % 3)) for seed in range(num_seeds)]


@pytest.mark.parametrize(
    ("speculation", "proposal", "widths"),
    [
        (REJECTION, SAMPLED, (3, 2, 1)),
        (REJECTION, DISTINCT, (3, 2, 1)),
        (REJECTION, DISTINCT, (1, 1, 1, 1)),
        (BLOCK, SAMPLED, (1, 1, 1, 1)),
        (TYPICAL, SAMPLED, (3, 2, 1)),
    ],
)
def test_the_walk_is_the_enumerated_function(
    speculation: SpeculationParams, proposal: Proposal, widths: Sequence[int]
) -> None:
    """Same function, same laws, and coins by their documented keys; then the next token, by its own."""
    lines = lines_of(speculation, 60)
    tasks = tasks_of(lines, drawn_trees(DRAFT, widths, proposal))
    runs = Sampler()(MODEL.rows(tasks), tasks)
    lengths = set()
    for line, task, run in zip(lines, tasks, runs, strict=True):
        tree, params = task.tree, task.params

        def law_at(node: int, line: Line = line, tree: TokenTree = tree) -> torch.Tensor:
            row = MODEL.row([*line.token_ids, *tree.path_tokens(node)])
            return (row / line.params.temperature).softmax(dim=-1)

        def draft_law_of(node: int, tree: TokenTree = tree) -> torch.Tensor:
            law = tree.distributions[node - 1]
            assert isinstance(law, torch.Tensor)
            return law

        def accepts(node: int, chance: float, line: Line = line, tree: TokenTree = tree) -> bool:
            seed, choice = line.params.seed or 0, line.params.choice
            if speculation is BLOCK:
                place = len(PROMPT) | node << 32
            else:
                rank = tree.children(tree.parents[node - 1]).index(node)
                place = (len(PROMPT) + tree.depths()[node] - 1) | rank << 32
            return uniform([NoiseKey(seed, choice, place, Stream.ACCEPT)])[0] < chance

        if speculation is TYPICAL:
            verdict = follow_typical(tree, law_at)
        elif speculation is BLOCK:
            verdict = verify_block(tree, law_at, draft_law_of, accepts)
        else:
            laws = drawn_distinct if proposal is DISTINCT else drawn_independently
            verdict = verify_siblings(tree, law_at, draft_law_of, laws, accepts)
        assert run.accepted_nodes == verdict.accepted
        end = verdict.accepted[-1] if verdict.accepted else 0
        law = law_at(end) if verdict.residual is None else verdict.residual
        stream = Stream.TARGET if verdict.residual is None else Stream.RESIDUAL
        key = NoiseKey(params.seed or 0, params.choice, len(PROMPT) + len(verdict.accepted), stream)
        assert run.token_ids[-1] == int(choose_tokens(law.log()[None], [key]))
        lengths.add(len(verdict.accepted))
    assert lengths == set(range(len(widths) + 1))


def test_the_sampler_calls_the_enumerated_functions() -> None:
    for function in (SiblingOdds, BlockOdds, TypicalOdds, drawn_distinct, drawn_independently):
        assert vars(judging)[function.__name__] is function
    for odds in (SiblingOdds, BlockOdds, TypicalOdds):
        assert vars(rules)[odds.__name__] is odds
    for module in (rules, sampler):
        assert vars(module)["verdict"] is verification.verdict


FLAT_MODEL = TableModel(3, vocab_size=4, spread=1.0)
FLAT_DRAFT = TableModel(4, vocab_size=4, spread=1.0)


def statistic_of_two_tokens(
    drafter: Drafter, speculation: SpeculationParams = REJECTION, num_seeds: int = 1000
) -> float:
    """Two tokens of so many seeds through the whole sampler, against their exact law."""
    params = SamplingParams(temperature=1.5, speculation=speculation)
    lines = [Line(replace(params, seed=seed)) for seed in range(num_seeds)]
    texts = torch.tensor(generate(lines, drafter, 2, FLAT_MODEL))
    counts = (texts[:, 0] * 4 + texts[:, 1]).bincount(minlength=16)
    first = (FLAT_MODEL.row(PROMPT).double() / 1.5).softmax(0)
    second = torch.stack([FLAT_MODEL.row([*PROMPT, token]) for token in range(4)])
    return chi_square.statistic(counts, first[:, None] * (second.double() / 1.5).softmax(-1))


KINDS = {
    "chain of one": (REJECTION, SAMPLED, (1,)),
    "chain": (REJECTION, SAMPLED, (1, 1)),
    "with replacement": (REJECTION, SAMPLED, (3, 2)),
    "without replacement": (REJECTION, DISTINCT, (3, 2)),
    "block": (BLOCK, SAMPLED, (1, 1, 1)),
}


@pytest.mark.parametrize(("speculation", "proposal", "widths"), KINDS.values(), ids=KINDS)
def test_drawn_drafts_keep_the_law(
    speculation: SpeculationParams, proposal: Proposal, widths: Sequence[int]
) -> None:
    statistic = statistic_of_two_tokens(drawn_trees(FLAT_DRAFT, widths, proposal), speculation)
    assert statistic < chi_square.CRITICAL[15]


@pytest.mark.parametrize(("speculation", "proposal", "widths"), KINDS.values(), ids=KINDS)
@pytest.mark.parametrize("record", [lambda q: torch.full_like(q, 1 / 4)], ids=["said to be even"])
def test_the_law_is_missed_when_something_else_is_recorded(
    speculation: SpeculationParams, proposal: Proposal, widths: Sequence[int], record: Recorder
) -> None:
    """A planted error: the draft says that it drew evenly from all tokens."""
    statistic = statistic_of_two_tokens(drawn_trees(FLAT_DRAFT, widths, proposal, record), speculation, 800)
    assert statistic > 3 * chi_square.CRITICAL[15]


def test_the_law_is_missed_when_a_deterministic_draft_says_it_was_drawn() -> None:
    def likeliest(lines: Sequence[Line]) -> list[TokenTree]:
        rows = [(FLAT_DRAFT.row(line.token_ids) / 1.5).softmax(0) for line in lines]
        return [TokenTree(tuple(row.topk(2).indices.tolist()), (0, 0), DISTINCT, (row, row)) for row in rows]

    assert statistic_of_two_tokens(likeliest) > 2 * chi_square.CRITICAL[15]


@pytest.mark.parametrize(("speculation", "widths"), [(BLOCK, (1, 1, 1)), (REJECTION, (1, 1, 1))])
def test_noise_that_a_verdict_looked_at_is_not_met_again(
    monkeypatch: pytest.MonkeyPatch, speculation: SpeculationParams, widths: Sequence[int]
) -> None:
    """A step's verdict must not look at noise on which an earlier one depends; the next draft is new to it.

    Token by token, the coins and draws behind the first rejected token are not looked at, so they may be met
    again at their places. A block's verdict looks at all of them.
    """
    looked_at: list[NoiseKey] = []
    noise_key = RowGroup.noise_key

    def watched(self: RowGroup, depth: int, stream: Stream, rank: int = 0) -> NoiseKey:
        key = noise_key(self, depth, stream, rank)
        if stream in (Stream.DRAFT, Stream.ACCEPT):
            looked_at.append(key)
        return key

    monkeypatch.setattr(RowGroup, "noise_key", watched)
    drafter = drawn_trees(DRAFT, widths, SAMPLED)
    (line,) = lines_of(speculation, 1)
    spent: set[NoiseKey] = set()
    for _ in range(20):
        looked_at.clear()
        (task,) = tasks_of([line], drafter)
        (run,) = Sampler()(MODEL.rows([task]), [task])
        decided = len(widths) if speculation is BLOCK else len(run.token_ids)
        places = [
            key for key in looked_at if speculation is BLOCK or key.position < len(line.token_ids) + decided
        ]
        assert spent.isdisjoint(places)
        assert len(places) > 1
        spent.update(places)
        line = line.taking(run)


@pytest.mark.parametrize("proposal", [SAMPLED, DISTINCT])
def test_the_first_of_the_siblings_stands_where_draft_and_target_are_one(proposal: Proposal) -> None:
    lines = [replace(line, params=replace(line.params, top_p=0.9)) for line in lines_of(REJECTION, 100)]
    tasks = tasks_of(lines, drawn_trees(MODEL, (2, 2), proposal))
    runs = Sampler()(MODEL.rows(tasks), tasks)
    assert all(run.accepted_nodes == (1, 3) for run in runs)
    ends = [
        Line(line.params, line.token_ids + run.token_ids[:2]) for line, run in zip(lines, runs, strict=True)
    ]
    assert [(run.token_ids[2],) for run in runs] == generate_next(ends)


def test_more_siblings_are_accepted_more_often() -> None:
    counts = []
    for widths in ((1,), (2,), (4,)):
        tasks = tasks_of(lines_of(REJECTION, 300), drawn_trees(DRAFT, widths, DISTINCT))
        counts.append(sum(len(run.accepted_nodes) for run in Sampler()(MODEL.rows(tasks), tasks)))
    assert counts[0] * 1.15 < counts[1]
    assert counts[1] * 1.15 < counts[2]


def test_siblings_that_the_draft_had_no_mass_for_still_stand_by_the_targets_chance() -> None:
    """A draft whose top_k is 1 has one token to draw; the sibling behind it is whatever was put there."""
    certain = torch.nn.functional.one_hot(torch.tensor(5), VOCAB).float()
    line = Line(SamplingParams(seed=0, logit_bias=((5, -100.0), (7, 100.0)), speculation=REJECTION))
    task = line.task(TokenTree((5, 7), (0, 0), DISTINCT, (certain, certain)))
    (run,) = Sampler()(MODEL.rows([task]), [task])
    assert run.accepted_nodes == (2,)


def test_block_verification_of_a_tree_that_branches_is_refused() -> None:
    flat = torch.full((VOCAB,), 1 / VOCAB)
    tree = TokenTree((1, 2), (0, 0), SAMPLED, (flat, flat))
    with pytest.raises(ValueError, match="block verification takes chains"):
        Sampler()(torch.zeros(3, VOCAB), [Line(SamplingParams(seed=1, speculation=BLOCK)).task(tree)])


@pytest.mark.parametrize("speculation", [REJECTION, BLOCK, TYPICAL])
def test_an_empty_draft_is_the_plain_run(speculation: SpeculationParams) -> None:
    lines = lines_of(speculation, 50)
    tasks = [line.task(EMPTY_TREE) for line in lines]
    assert [run.token_ids for run in Sampler()(MODEL.rows(tasks), tasks)] == generate_next(lines)


def test_typical_acceptance_ends_with_the_targets_own_choice() -> None:
    lines = lines_of(TYPICAL, 50)
    tasks = tasks_of(lines, drawn_trees(DRAFT, (3, 3), SAMPLED))
    runs = Sampler()(MODEL.rows(tasks), tasks)
    ends = [
        Line(line.params, line.token_ids + run.token_ids[:-1]) for line, run in zip(lines, runs, strict=True)
    ]
    assert [run.token_ids[-1:] for run in runs] == generate_next(ends)
    assert any(run.accepted_nodes for run in runs)
