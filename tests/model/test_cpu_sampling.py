"""The operators that truncate and choose, against the pipeline in plain torch."""

import pytest
import torch

from engine.sampling.choosing import Choice, choose_at_once, choose_tokens
from engine.sampling.logits import process_logits
from engine.sampling.noise import NoiseKey, Stream, gumbel_noise, noise_starts
from engine.sampling.row_group import RowGroup
from engine.sampling.sampler import Sampler, SamplingTask
from engine.sampling_params import SamplingParams
from engine.token_tree import TokenTree
from tests.operators import need_operators

VOCAB_SIZE = 5003
OPTIONS = [
    SamplingParams(seed=1),
    SamplingParams(seed=1, temperature=0.3),
    SamplingParams(seed=1, temperature=1e-30),
    SamplingParams(seed=1, top_k=1),
    SamplingParams(seed=1, top_k=50),
    SamplingParams(seed=1, top_k=3000),
    SamplingParams(seed=1, top_k=VOCAB_SIZE),
    SamplingParams(seed=1, top_p=0.9),
    SamplingParams(seed=1, top_p=0.05, temperature=1.7),
    SamplingParams(seed=1, top_p=1e-9),
    SamplingParams(seed=1, min_p=0.05),
    SamplingParams(seed=1, min_p=1.0),
    SamplingParams(seed=1, top_k=40, top_p=0.95, min_p=0.02, temperature=0.8),
    SamplingParams(temperature=0.0),
]


def rows_of_logits(*, ties: bool) -> torch.Tensor:
    generator = torch.Generator().manual_seed(5)
    logits = torch.randn(len(OPTIONS), VOCAB_SIZE, generator=generator) * 4
    return logits.round() if ties else logits


def groups() -> list[RowGroup]:
    return [RowGroup(params, [1, 2, 3], 2, frozenset()) for params in OPTIONS]


@pytest.mark.parametrize("ties", [False, True], ids=["distinct", "ties"])
def test_truncation_is_that_of_plain_torch(ties: bool) -> None:
    logits = rows_of_logits(ties=ties)
    before = logits.clone()
    wanted = process_logits(logits, groups())
    got = process_logits(logits, groups(), need_operators())
    assert torch.equal(logits, before)
    assert torch.equal(got == -torch.inf, wanted == -torch.inf)
    assert torch.equal(got, wanted)


def test_mass_that_lies_far_below_the_likeliest_token() -> None:
    """Each far token has next to nothing, and all of them more than is left out."""
    logits = -13 - torch.rand(1, VOCAB_SIZE, generator=torch.Generator().manual_seed(6))
    logits[0, 70] = 0.0
    for top_p in (0.99, 0.996, 0.998):
        group = [RowGroup(SamplingParams(seed=1, top_p=top_p), [1], 1, frozenset())]
        got, wanted = (process_logits(logits, group, operators) for operators in (need_operators(), None))
        # Where masses of a millionth are added up in another order, the border may move by a token.
        assert int(((got == -torch.inf) != (wanted == -torch.inf)).sum()) <= 1
        assert (int((got > -torch.inf).sum()) == 1) == (top_p == 0.99)
        assert got[0, 70] == 0.0


def test_rows_that_only_some_options_leave_alone() -> None:
    logits = rows_of_logits(ties=False)
    logits[:, 100:] = -torch.inf
    wanted = process_logits(logits, groups())
    assert torch.equal(process_logits(logits, groups(), need_operators()), wanted)


def choices(seed: int) -> list[Choice]:
    keys = [NoiseKey(seed, 0, 7 + row, Stream.TARGET) for row in range(len(OPTIONS))]
    return [
        Choice(row, params, None if params.is_greedy else key)
        for row, (params, key) in enumerate(zip(OPTIONS, keys, strict=True))
    ]


@pytest.mark.parametrize("ties", [False, True], ids=["distinct", "ties"])
def test_choosing_at_once_is_processing_and_choosing(ties: bool) -> None:
    logits = rows_of_logits(ties=ties)
    processed = process_logits(logits, groups())
    # Cut like logits whose embedding is padded: rows that do not lie side by side.
    padded = torch.cat((logits, torch.full((len(OPTIONS), 5), 99.0)), dim=1)[:, :VOCAB_SIZE]
    for seed in range(40):
        wanted = choose_tokens(processed, [choice.key for choice in choices(seed)]).tolist()
        assert choose_at_once(padded, choices(seed), need_operators()) == wanted


@pytest.mark.parametrize("threads", [1, 2])
def test_a_choice_does_not_depend_on_others_or_on_threads(threads: int) -> None:
    logits, wanted, operators = rows_of_logits(ties=False), choices(3), need_operators()
    alone = [choose_at_once(logits, [choice], operators)[0] for choice in wanted]
    operators.use_threads(threads)
    try:
        assert choose_at_once(logits, wanted, operators) == alone
        assert choose_at_once(logits, wanted[::-1], operators) == alone[::-1]
    finally:
        operators.use_threads(0)


def test_a_choice_from_a_row_that_is_not_there_is_refused() -> None:
    with pytest.raises(RuntimeError, match="there is no row 2"):
        choose_at_once(torch.zeros(2, 9), [Choice(2, OPTIONS[0], None)], need_operators())


@pytest.mark.parametrize("spread", [0.01, 0.3, 3.4, 40.0])
@pytest.mark.parametrize("top_p", [0.5, 0.95, 0.9999])
def test_borders_of_a_large_vocabulary(spread: float, top_p: float) -> None:
    """Rows of a size at which the likely ones are many, few, or all but one beyond the first buckets."""
    logits = torch.randn(2, 60_001, generator=torch.Generator().manual_seed(11)) * spread
    params = SamplingParams(seed=1, top_p=top_p)
    got = process_logits(logits, [RowGroup(params, [1], 1, frozenset())] * 2, need_operators())
    kept = got > -torch.inf
    assert torch.equal(got[kept], (logits - logits.amax(-1, keepdim=True))[kept])
    least, best_dropped = logits.where(kept, torch.inf).amin(-1), logits.where(~kept, -torch.inf).amax(-1)
    assert bool((least >= best_dropped).all())
    by_mass = logits.double().sort(descending=True, dim=-1).values.softmax(-1)
    exact = (by_mass.cumsum(-1) < top_p).sum(-1) + 1
    assert int((kept.sum(-1) - exact).abs().max()) <= 1
    keys = [NoiseKey(row, 0, 7, Stream.TARGET) for row in range(2)]
    tokens = choose_at_once(logits, [Choice(row, params, keys[row]) for row in range(2)], need_operators())
    assert tokens == choose_tokens(got, keys).tolist()


def test_what_is_not_a_number_is_the_likeliest_as_argmax_has_it() -> None:
    logits = torch.zeros(3, VOCAB_SIZE)
    logits[0, [4000, 4500]] = torch.nan
    logits[1, VOCAB_SIZE - 1] = torch.nan
    logits[2, [2000, 3000]] = 1.0
    wanted = [Choice(row, OPTIONS[-1], None) for row in range(3)]
    assert choose_at_once(logits, wanted, need_operators()) == logits.argmax(-1).tolist()


@pytest.mark.parametrize("spread", [0.5, 5.0])
def test_the_highest_scores_are_those_of_plain_torch(spread: float) -> None:
    """Also where an entry has the noise of another token than its number says."""
    size, count = 1003, 3
    logits = torch.randn(200, size, generator=torch.Generator().manual_seed(8)) * spread
    keys = [NoiseKey(seed, 0, 0, Stream.DRAFT) for seed in range(200)]
    ids = torch.arange(size) * 37 + 5
    noise = gumbel_noise(keys, int(ids[-1]) + 1, logits.device)
    for own_ids, own_noise in ((None, noise[:, :size]), (ids, noise[:, ids])):
        tokens, scores = need_operators().top_rows(logits, noise_starts(keys, logits.device), count, own_ids)
        wanted = (logits.double() + own_noise).topk(count, dim=-1)
        assert torch.equal(tokens, wanted.indices)
        torch.testing.assert_close(scores, wanted.values, rtol=1e-12, atol=1e-12)


def test_drafts_fare_as_with_plain_torch() -> None:
    """Sampled and greedy requests in one batch, some with penalties; drafts stand for a while."""
    size = 300
    generator = torch.Generator().manual_seed(12)
    tasks, rows = [], []
    for seed in range(30):
        params = SamplingParams(
            temperature=0.0 if seed % 5 == 4 else 0.7,
            top_p=0.95,
            seed=seed,
            repetition_penalty=1.2 if seed % 3 == 0 else 1.0,
        )
        tokens = torch.randint(0, size, (4,), generator=generator).tolist()
        own = torch.randn(5, size, generator=generator)
        own[torch.arange(4), tokens] += 5.0
        rows.append(own)
        tasks.append(SamplingTask(params, [1, 2, 3], 2, TokenTree.chain(tokens), frozenset()))
    logits = torch.cat(rows)
    before = logits.clone()
    runs = Sampler(need_operators())(logits, tasks)
    assert runs == Sampler()(logits, tasks)
    assert torch.equal(logits, before)
    assert {len(run.accepted_nodes) for run in runs} > {1, 4}


@pytest.mark.parametrize("spread", [0.0, 1.0, 4.0, 30.0])
def test_choices_are_those_of_plain_torch(spread: float) -> None:
    generator = torch.Generator().manual_seed(9)
    logits = torch.randn(64, VOCAB_SIZE, generator=generator) * spread
    logits[::3, 17:4000] = -torch.inf
    keys: list[NoiseKey | None] = [
        None if row % 5 == 4 else NoiseKey(row, 0, 7, Stream.TARGET) for row in range(64)
    ]
    assert torch.equal(choose_tokens(logits, keys, need_operators()), choose_tokens(logits, keys))


def test_a_token_can_win_by_noise_alone() -> None:
    # Among equals only the noise decides, so its bound must never hide a token.
    keys: list[NoiseKey | None] = [NoiseKey(seed, 0, 0, Stream.TARGET) for seed in range(2000)]
    logits = torch.zeros(2000, 50)
    chosen = choose_tokens(logits, keys, need_operators())
    assert torch.equal(chosen, choose_tokens(logits, keys))
    assert len(set(chosen.tolist())) == 50


def test_one_token_is_left() -> None:
    logits = torch.full((2, VOCAB_SIZE), -torch.inf)
    logits[0, 4711], logits[1, 0] = -3.0, 2.0
    keys: list[NoiseKey | None] = [NoiseKey(1, 0, 0, Stream.TARGET)] * 2
    assert choose_tokens(logits, keys, need_operators()).tolist() == [4711, 0]


def test_of_equal_entries_the_first_is_the_likeliest() -> None:
    rows = torch.full((3, 70), -torch.inf)
    rows[0, [9, 40, 69]] = 2.0
    rows[1, [33, 34]] = -5.0
    # Cut like logits whose embedding is padded: rows that do not lie side by side.
    for logits in (rows, torch.cat((rows, torch.full((3, 10), 9.0)), dim=1)[:, :70]):
        assert choose_tokens(logits, [None] * 3, need_operators()).tolist() == [9, 33, 0]
        mixed = choose_tokens(logits, [None, NoiseKey(1, 0, 2, Stream.TARGET), None], need_operators())
        assert mixed[[0, 2]].tolist() == [9, 0]
