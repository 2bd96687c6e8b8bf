import math
from collections import Counter

import pytest
import torch

from engine.sampling import logits as pipeline
from engine.sampling.logits import process_logits
from engine.sampling.noise import NoiseKey, Stream
from engine.sampling.row_group import RowGroup
from engine.sampling_params import SamplingParams
from engine.token_tree import TokenTree

VOCAB = 40
PROMPT = [1, 2, 2, 3]
OUTPUT = [3, 4, 4, 4, 5]
EOS = frozenset({7})
INF = math.inf


def random_logits(rows: int, vocab_size: int = VOCAB, seed: int = 0) -> torch.Tensor:
    return 3 * torch.randn(rows, vocab_size, generator=torch.Generator().manual_seed(seed))


def group(params: SamplingParams, paths: tuple[tuple[int, ...], ...] = ((),)) -> RowGroup:
    return RowGroup(params, PROMPT + OUTPUT, len(PROMPT), EOS, paths)


def process_one(row: list[float], params: SamplingParams) -> list[float]:
    result: list[float] = process_logits(torch.tensor([row]), [group(params)])[0].tolist()
    return result


def kept(row: list[float], params: SamplingParams) -> list[int]:
    return [token for token, value in enumerate(process_one(row, params)) if value > -INF]


def logits_of(*probabilities: float) -> list[float]:
    return [math.log(probability) for probability in probabilities]


def reference(row: torch.Tensor, params: SamplingParams, prompt: list[int], output: list[int]) -> list[float]:
    """The pipeline once more: one row, plain Python, float64, written from its documentation."""
    values: list[float] = row.double().tolist()
    for token in set(prompt + output):
        penalty = params.repetition_penalty
        values[token] = values[token] / penalty if values[token] > 0 else values[token] * penalty
    for token, count in Counter(output).items():
        values[token] -= params.frequency_penalty * count + params.presence_penalty
    for token, bias in params.logit_bias:
        values[token] += bias
    if len(output) < params.min_tokens:
        for token in set(params.stop_token_ids) | EOS:
            values[token] = -INF
    return values if params.is_greedy else reference_truncation(values, params)


def reference_truncation(values: list[float], params: SamplingParams) -> list[float]:
    best = max(values)
    values = [(value - best) / params.temperature for value in values]
    if params.top_k:
        border = sorted(values, reverse=True)[min(params.top_k, len(values)) - 1]
        values = [value if value >= border else -INF for value in values]
    total = sum(math.exp(value) for value in values)
    mass = 0.0
    for token in sorted(range(len(values)), key=lambda token: (-values[token], token)):
        probability = math.exp(values[token]) / total
        if params.top_p < 1.0 and mass >= params.top_p:
            values[token] = -INF
        mass += probability
    return [value if math.exp(value) >= params.min_p else -INF for value in values]


OPTIONS = [
    SamplingParams(temperature=0.0),
    SamplingParams(),
    SamplingParams(temperature=0.0, repetition_penalty=1.3),
    SamplingParams(temperature=0.0, frequency_penalty=1.7),
    SamplingParams(temperature=0.0, presence_penalty=-1.1),
    SamplingParams(temperature=0.0, logit_bias=((3, 5.0), (6, -100.0))),
    SamplingParams(temperature=0.0, min_tokens=7, stop_token_ids=(9, 11)),
    SamplingParams(temperature=0.7, top_k=5),
    SamplingParams(temperature=1.5, top_p=0.8),
    SamplingParams(temperature=0.6, min_p=0.1),
    SamplingParams(temperature=0.8, top_k=12, top_p=0.9, min_p=0.02),
    SamplingParams(
        temperature=1.2,
        repetition_penalty=0.8,
        frequency_penalty=0.6,
        presence_penalty=0.4,
        logit_bias=((0, 2.0), (5, -3.0)),
        min_tokens=8,
        stop_token_ids=(2,),
        top_k=20,
        top_p=0.95,
        min_p=0.01,
    ),
]


@pytest.mark.parametrize("params", OPTIONS)
def test_each_option_does_what_the_documentation_says(params: SamplingParams) -> None:
    logits = random_logits(20)
    rows = process_logits(logits, [group(params)] * 20)
    for raw, row in zip(logits, rows, strict=True):
        expected = torch.tensor(reference(raw, params, PROMPT, OUTPUT), dtype=torch.float32)
        torch.testing.assert_close(row, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("params", OPTIONS)
def test_a_row_of_a_tree_equals_plain_processing_of_its_path(params: SamplingParams) -> None:
    tree = TokenTree((4, 3, 4, 30, 4), (0, 0, 1, 2, 3))
    logits = random_logits(6, seed=1)
    together = process_logits(logits, [group(params, RowGroup.tree_paths(tree))])
    for node in range(6):
        history = [*PROMPT, *OUTPUT, *tree.path_tokens(node)]
        plain = process_logits(logits[node][None], [RowGroup(params, history, len(PROMPT), EOS)])
        assert torch.equal(together[node], plain[0])


def test_rows_do_not_depend_on_their_neighbours_or_order() -> None:
    groups = [group(params, ((), (4,), (4, 3))) for params in OPTIONS]
    logits = random_logits(3 * len(groups), vocab_size=1501, seed=2)
    together = process_logits(logits, groups)
    order = list(reversed(range(len(groups))))
    rows = [3 * place + row for place in order for row in range(3)]
    assert torch.equal(process_logits(logits[rows], [groups[place] for place in order]), together[rows])
    for place, one in enumerate(groups):
        part = slice(3 * place, 3 * place + 3)
        assert torch.equal(process_logits(logits[part], [one]), together[part])


def test_rows_do_not_depend_on_the_size_of_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    groups = [group(params, ((), (4,))) for params in OPTIONS]
    logits = random_logits(2 * len(groups), seed=3)
    expected = process_logits(logits, groups)
    monkeypatch.setattr(pipeline, "CHUNK_ELEMENTS", 3 * VOCAB)
    assert torch.equal(process_logits(logits, groups), expected)


def test_the_raw_logits_are_left_alone() -> None:
    logits = random_logits(len(OPTIONS))
    before = logits.clone()
    process_logits(logits, [group(params) for params in OPTIONS])
    assert torch.equal(logits, before)


def test_rows_without_options_are_not_even_copied() -> None:
    logits = random_logits(2)
    assert process_logits(logits, [group(SamplingParams(temperature=0.0))] * 2) is logits


def test_a_wrong_number_of_rows_is_refused() -> None:
    with pytest.raises(ValueError, match="logits have 3 rows, but the requests have 2"):
        process_logits(random_logits(3), [group(SamplingParams(), ((), (1,)))])


def test_top_k_keeps_all_that_equal_the_last() -> None:
    assert kept([1.0, 3.0, 2.0, 2.0, 0.0], SamplingParams(top_k=2)) == [1, 2, 3]
    assert kept([1.0, 3.0, 2.0, 2.0, 0.0], SamplingParams(top_k=1)) == [1]
    assert kept([1.0, 3.0, 2.0, 2.0, 0.0], SamplingParams(top_k=5000)) == [0, 1, 2, 3, 4]


def test_top_p_keeps_the_smallest_set_that_reaches_the_mass() -> None:
    row = logits_of(0.1, 0.5, 0.15, 0.25)
    assert kept(row, SamplingParams(top_p=0.45)) == [1]
    assert kept(row, SamplingParams(top_p=0.74)) == [1, 3]
    assert kept(row, SamplingParams(top_p=0.76)) == [1, 2, 3]
    assert kept(row, SamplingParams(top_p=1e-9)) == [1]
    assert kept(row, SamplingParams(top_p=0.999999)) == [0, 1, 2, 3]


def test_top_p_breaks_ties_by_the_lowest_id() -> None:
    assert kept([0.0] * 8, SamplingParams(top_p=0.3)) == [0, 1, 2]
    assert kept([0.0, 5.0, 0.0, 0.0], SamplingParams(top_p=0.985)) == [0, 1]


def test_a_row_that_is_no_numbers_does_not_end_the_step_of_its_neighbours() -> None:
    params = SamplingParams(top_p=0.9)
    rows = random_logits(3)
    alone = process_logits(rows[:1], [group(params)])
    rows[1] = math.nan
    rows[2] = -INF
    assert torch.equal(process_logits(rows, [group(params)] * 3)[:1], alone)


def test_min_p_is_relative_to_the_best() -> None:
    row = logits_of(0.5, 0.3, 0.15, 0.05)
    assert kept(row, SamplingParams(min_p=0.25)) == [0, 1, 2]
    assert kept(row, SamplingParams(min_p=1.0)) == [0]


@pytest.mark.parametrize("top_p", [0.5, 0.9, 0.9999])
def test_top_p_of_flat_rows_looks_beyond_the_first_candidates(top_p: float) -> None:
    # The first row is flat: its mass is spread over more tokens than are looked at in the first place.
    logits = random_logits(3, vocab_size=5000, seed=4) * torch.tensor([[0.1], [1.0], [2.0]])
    params = SamplingParams(top_p=top_p)
    counts = (process_logits(logits, [group(params)] * 3) > -INF).sum(dim=-1)
    assert int(counts[0]) > 1024
    ranked = logits.double().softmax(dim=-1).sort(dim=-1, descending=True).values.cumsum(dim=-1)
    expected = (ranked < top_p).sum(dim=-1) + 1
    # float32 probabilities may place the border one token off the float64 one.
    assert int((counts - expected).abs().max()) <= 1


def test_min_tokens_counts_tokens_and_ends() -> None:
    paths = tuple(tuple([20] * depth) for depth in range(5))
    params = SamplingParams(temperature=0.0, min_tokens=len(OUTPUT) + 3, stop_token_ids=(9,))
    rows = process_logits(random_logits(5), [group(params, paths)])
    assert (rows[:, 7] == -INF).tolist() == [True, True, True, False, False]
    assert (rows[:, 9] == -INF).tolist() == [True, True, True, False, False]
    assert int((rows == -INF).sum()) == 6


def test_ignored_eos_is_an_ordinary_token_and_stop_ids_are_not() -> None:
    params = SamplingParams(temperature=0.0, min_tokens=100, stop_token_ids=(9, 10**6), ignore_eos=True)
    assert (process_logits(random_logits(1), [group(params)])[0] == -INF).nonzero().tolist() == [[9]]


def test_bias_of_a_hundred_decides() -> None:
    row = [0.0] * VOCAB
    forced = process_one(row, SamplingParams(logit_bias=((13, 100.0),)))
    assert max(value for token, value in enumerate(forced) if token != 13) <= forced[13] - 100.0
    banned = process_one(row, SamplingParams(logit_bias=((13, -100.0),)))
    assert banned[13] <= max(banned) - 100.0
    assert max(banned) == banned[0] == 0.0


@pytest.mark.parametrize("temperature", [1e-3, 1e-20, 1e-300, 5e-324])
def test_tiny_temperatures_neither_overflow_nor_yield_nan(temperature: float) -> None:
    row = process_one([90.0, 89.0, 90.0, -500.0], SamplingParams(temperature=temperature, top_p=0.99))
    assert row[0] == row[2] == 0.0
    assert row[1] == row[3] == -INF


@pytest.mark.parametrize("penalty", [5e-324, 1e-300, 1e-40, 1e40, 1e300])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_extreme_repetition_penalties_neither_overflow_nor_yield_nan(
    penalty: float, temperature: float
) -> None:
    row = [-1.0] * VOCAB
    row[1:6], row[10] = [2.0, 3.0, 0.0, -1.0, 1.0], 9.0
    params = SamplingParams(temperature=temperature, top_p=0.9, repetition_penalty=penalty)
    processed = process_one(row, params)
    assert not any(math.isnan(value) or value == INF for value in processed)
    # Seen are 1 to 5: they win by far, or what has not been said does.
    assert processed.index(max(processed)) == (2 if penalty < 1 else 10)


def test_noise_keys_name_the_place_in_the_whole_sequence() -> None:
    params = SamplingParams(seed=-5, choice=2)
    keys = group(params, ((), (4,), (4, 3))).noise_keys(Stream.TARGET)
    assert keys == tuple(NoiseKey(-5, 2, 9 + depth, Stream.TARGET) for depth in range(3))
    assert group(SamplingParams(temperature=0.0)).noise_keys(Stream.TARGET) == (None,)


def test_an_unresolved_seed_is_refused() -> None:
    with pytest.raises(ValueError, match=r"seed .* must be resolved"):
        group(SamplingParams()).noise_keys(Stream.TARGET)
