"""The sampler as an engine uses it: step after step over a tiny "model" that is a table of logits."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import pytest
import torch

from engine.sampling.logits import process_logits
from engine.sampling.logprobs import row_logprobs
from engine.sampling.metadata import RowGroup
from engine.sampling.noise import NoiseKey, Stream
from engine.sampling.sampler import DraftToken, SampledRun, Sampler, SamplingTask, choose_tokens, draw_tokens
from engine.sampling_params import Acceptance, SamplingParams, SpeculationParams
from engine.token_tree import EMPTY_TREE, Proposal, TokenTree
from tests.sampling import chi_square

VOCAB = 12
EOS = frozenset({11})
PROMPT = (1, 2, 3)
REJECTION = SpeculationParams(acceptance=Acceptance.REJECTION)


class TableModel:
    """Logits that depend on the last two tokens."""

    def __init__(self, seed: int, vocab_size: int = VOCAB, spread: float = 2.0) -> None:
        generator = torch.Generator().manual_seed(seed)
        self._table = spread * torch.randn(vocab_size, vocab_size, vocab_size, generator=generator)

    def row(self, token_ids: Sequence[int]) -> torch.Tensor:
        return self._table[token_ids[-2], token_ids[-1]]

    def rows(self, tasks: Sequence[SamplingTask]) -> torch.Tensor:
        return torch.stack(
            [self.row([*task.token_ids, *path]) for task in tasks for path in RowGroup.tree_paths(task.tree)]
        )


MODEL = TableModel(1)
DRAFT = TableModel(2)


@dataclass(frozen=True)
class Line:
    """One request on its way."""

    params: SamplingParams
    token_ids: tuple[int, ...] = PROMPT

    def task(self, tree: TokenTree = EMPTY_TREE) -> SamplingTask:
        return SamplingTask(self.params, self.token_ids, len(PROMPT), tree, EOS)

    def taking(self, run: SampledRun) -> "Line":
        return replace(self, token_ids=self.token_ids + run.token_ids)


Drafter = Callable[[Sequence[Line]], list[TokenTree]]


def each(tree_of: Callable[[Line], TokenTree]) -> Drafter:
    return lambda lines: [tree_of(line) for line in lines]


no_draft = each(lambda line: EMPTY_TREE)


def tasks_of(lines: Sequence[Line], drafter: Drafter) -> list[SamplingTask]:
    return [line.task(tree) for line, tree in zip(lines, drafter(lines), strict=True)]


def generate(
    lines: Sequence[Line], drafter: Drafter, num_tokens: int, model: TableModel = MODEL
) -> list[tuple[int, ...]]:
    """Runs all lines side by side until each has so many tokens."""
    length = len(PROMPT) + num_tokens
    lines = list(lines)
    while any(len(line.token_ids) < length for line in lines):
        tasks = tasks_of(lines, drafter)
        runs = Sampler()(model.rows(tasks), tasks)
        lines = [line.taking(run) for line, run in zip(lines, runs, strict=True)]
    return [line.token_ids[len(PROMPT) : length] for line in lines]


def generate_next(lines: Sequence[Line]) -> list[tuple[int, ...]]:
    tasks = tasks_of(lines, no_draft)
    return [run.token_ids for run in Sampler()(MODEL.rows(tasks), tasks)]


@each
def random_trees(line: Line) -> TokenTree:
    """Another tree at each place of each request, of any shape, now and then empty."""
    generator = torch.Generator().manual_seed(1000 * len(line.token_ids) + sum(line.token_ids))
    size = int(torch.randint(8, (), generator=generator))
    tokens = torch.randint(VOCAB, (size,), generator=generator).tolist()
    parents = [int(torch.randint(node, (), generator=generator)) for node in range(1, size + 1)]
    return TokenTree(tuple(tokens), tuple(parents))


def model_chain(model: TableModel, stream: Stream, length: int = 3) -> Drafter:
    """A draft model that draws chains with the noise of a stream."""

    def draft(lines: Sequence[Line]) -> list[TokenTree]:
        drawn: list[list[DraftToken]] = [[] for _ in lines]
        for _ in range(length):
            groups = [
                RowGroup(line.params, line.token_ids, len(PROMPT), EOS, (tuple(t.token_id for t in chain),))
                for line, chain in zip(lines, drawn, strict=True)
            ]
            rows = torch.stack([model.row([*group.token_ids, *group.paths[0]]) for group in groups])
            keys = [key for group in groups for key in group.noise_keys(stream)]
            for chain, token in zip(drawn, draw_tokens(process_logits(rows, groups), keys), strict=True):
                chain.append(token)
        return [as_tree(line, chain) for line, chain in zip(lines, drawn, strict=True)]

    def as_tree(line: Line, chain: list[DraftToken]) -> TokenTree:
        tokens = [token.token_id for token in chain]
        if line.params.is_greedy:
            return TokenTree.chain(tokens)
        if stream is Stream.DRAFT:
            return TokenTree.chain(tokens, Proposal.SAMPLED, [token.distribution for token in chain])
        return TokenTree.chain(tokens, Proposal.COUPLED)

    return draft


MIXED = [
    Line(SamplingParams(temperature=0.0)),
    Line(SamplingParams(temperature=0.0, frequency_penalty=2.0)),
    Line(SamplingParams(temperature=0.0, frequency_penalty=-2.0, min_tokens=9)),
    Line(SamplingParams(temperature=0.0, repetition_penalty=1.4, presence_penalty=0.5)),
    Line(SamplingParams(seed=-1)),
    Line(SamplingParams(seed=2**63 - 1, temperature=0.7, top_k=4, top_p=0.9)),
    Line(SamplingParams(seed=-(2**63), min_p=0.05, logit_bias=((4, 3.0), (5, -100.0)))),
    Line(
        SamplingParams(
            seed=3, presence_penalty=1.0, frequency_penalty=0.7, min_tokens=6, stop_token_ids=(4, 6)
        )
    ),
    Line(SamplingParams(seed=3, choice=1, temperature=2.0)),
]
DRAFTERS: dict[str, Drafter] = {
    "random trees": random_trees,
    "coupled draft model": model_chain(DRAFT, Stream.TARGET),
    "coupled target": model_chain(MODEL, Stream.TARGET, length=5),
    "sampled draft model": model_chain(DRAFT, Stream.DRAFT),
}


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


FLAT_MODEL = TableModel(3, vocab_size=4, spread=1.0)
FLAT_DRAFT = TableModel(4, vocab_size=4, spread=1.0)


def chi_square_of_two_tokens(drafter: Drafter) -> float:
    """Two tokens of 1500 seeds through the whole sampler, against their exact law."""
    params = SamplingParams(temperature=1.5, speculation=REJECTION)
    lines = [Line(replace(params, seed=seed)) for seed in range(1500)]
    texts = torch.tensor(generate(lines, drafter, 2, FLAT_MODEL))
    counts = (texts[:, 0] * 4 + texts[:, 1]).bincount(minlength=16)
    first = (FLAT_MODEL.row(PROMPT).double() / 1.5).softmax(0)
    second = torch.stack([FLAT_MODEL.row([*PROMPT, token]) for token in range(4)])
    return chi_square.statistic(counts, first[:, None] * (second.double() / 1.5).softmax(-1))


@pytest.mark.parametrize("length", [1, 2])
def test_sampled_drafts_under_rejection_keep_the_law(length: int) -> None:
    statistic = chi_square_of_two_tokens(model_chain(FLAT_DRAFT, Stream.DRAFT, length))
    assert statistic < chi_square.CRITICAL[15]


def test_the_law_is_missed_when_the_recorded_distribution_is_not_the_drafts() -> None:
    """A planted error: the draft says that it drew evenly from all tokens."""

    def mislabelled(lines: Sequence[Line]) -> list[TokenTree]:
        trees = model_chain(FLAT_DRAFT, Stream.DRAFT, 1)(lines)
        return [replace(tree, distributions=(torch.full((4,), 1 / 4),)) for tree in trees]

    assert chi_square_of_two_tokens(mislabelled) > 3 * chi_square.CRITICAL[15]


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


def test_sampled_trees_that_branch_are_refused() -> None:
    flat = torch.full((VOCAB,), 1 / VOCAB)
    tree = TokenTree((1, 2), (0, 0), Proposal.SAMPLED, (flat, flat))
    with pytest.raises(ValueError, match="sampled trees must be chains"):
        Sampler()(torch.zeros(3, VOCAB), [Line(SamplingParams(seed=1)).task(tree)])


@pytest.mark.parametrize("distribution", [None, torch.full((VOCAB + 1,), 1 / VOCAB)])
def test_distributions_of_another_shape_are_refused(distribution: object) -> None:
    tree = TokenTree.chain([1], Proposal.SAMPLED, [distribution])
    with pytest.raises(ValueError, match=f"tensor of {VOCAB} probabilities"):
        Sampler()(torch.zeros(2, VOCAB), [Line(SamplingParams(seed=1, speculation=REJECTION)).task(tree)])


def test_rows_and_tasks_must_agree() -> None:
    with pytest.raises(ValueError, match="logits have 3 rows, but the requests have 1"):
        Sampler()(torch.zeros(3, VOCAB), [Line(SamplingParams(seed=1)).task()])


def test_no_tasks_no_runs() -> None:
    assert Sampler()(torch.empty(0, VOCAB), []) == []


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
