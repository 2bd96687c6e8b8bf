"""The operators that truncate and choose, against the pipeline in plain torch."""

import pytest
import torch

from engine.sampling.choosing import choose_tokens
from engine.sampling.logits import process_logits
from engine.sampling.noise import NoiseKey, Stream
from engine.sampling.row_group import RowGroup
from engine.sampling_params import SamplingParams
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
