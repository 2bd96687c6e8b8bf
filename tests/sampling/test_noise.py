import itertools

import pytest
import torch

from engine.sampling.noise import NoiseKey, Stream, gumbel_noise, uniform, uniform_rows
from tests.sampling import chi_square

CPU = torch.device("cpu")
MASK = 2**64 - 1
EXTREME_SEEDS = (0, 1, -1, 2**63 - 1, -(2**63))


def keys_of_seeds(
    count: int, stream: Stream = Stream.TARGET, choice: int = 0, position: int = 5
) -> list[NoiseKey]:
    return [NoiseKey(seed, choice, position, stream) for seed in range(count)]


def choices(keys: list[NoiseKey], logits: torch.Tensor) -> torch.Tensor:
    return (logits + gumbel_noise(keys, len(logits), CPU)).argmax(dim=-1)


def splitmix64(state: int, count: int) -> list[int]:
    """The published generator, written down again in plain integers."""
    numbers = []
    for _ in range(count):
        state = (state + 0x9E3779B97F4A7C15) & MASK
        z = state
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
        numbers.append(z ^ (z >> 31))
    return numbers


def test_the_reference_is_the_published_generator() -> None:
    # First outputs of SplitMix64 from state 1234567, as published with its C source's test vectors.
    assert splitmix64(1234567, 3) == [6457827717110365317, 3203168211198807973, 9817491932198370423]


@pytest.mark.parametrize("seed", EXTREME_SEEDS)
def test_tensors_hold_the_integers_of_splitmix64(seed: int) -> None:
    key = NoiseKey(seed, 3, 10_000_000, Stream.DRAFT)
    expected = [((word >> 12) + 0.5) / 2**52 for word in splitmix64(key.mixed(), 300)]
    assert uniform_rows([key], 300, CPU)[0].tolist() == expected
    assert uniform([key]) == expected[:1]


def test_numbers_are_strictly_between_zero_and_one() -> None:
    numbers = uniform_rows(keys_of_seeds(20), 50_000, CPU)
    assert 0.0 < float(numbers.min()) < 1e-5
    assert 1.0 - 1e-5 < float(numbers.max()) < 1.0
    assert bool(gumbel_noise(keys_of_seeds(20), 50_000, CPU).isfinite().all())


@pytest.mark.parametrize("word", [0, 2**64 - 1])
def test_the_extreme_words_are_neither_zero_nor_one(word: int, monkeypatch: pytest.MonkeyPatch) -> None:
    signed = word - 2**64 if word >= 2**63 else word
    monkeypatch.setattr("engine.sampling.noise._mix_in_place", lambda state, scratch: state.fill_(signed))
    monkeypatch.setattr("engine.sampling.noise._mix", lambda state: word)
    key = NoiseKey(0, 0, 0, Stream.TARGET)
    for number in (uniform([key])[0], float(uniform_rows([key], 1, CPU))):
        assert 0.0 < number < 1.0
    assert bool(gumbel_noise([key], 1, CPU).isfinite().all())


def test_every_part_of_the_key_counts() -> None:
    keys = [NoiseKey(*parts) for parts in itertools.product(EXTREME_SEEDS, (0, 1), (0, 1, 2), tuple(Stream))]
    numbers = uniform_rows(keys, 16, CPU).flatten().tolist()
    assert len(set(numbers)) == len(numbers)


def test_a_row_does_not_depend_on_its_neighbours() -> None:
    keys = keys_of_seeds(7)
    together = gumbel_noise(keys, 1001, CPU)
    for row, key in enumerate(keys):
        assert torch.equal(together[row], gumbel_noise([key], 1001, CPU)[0])


def test_the_keyed_argmax_has_the_law_of_the_softmax() -> None:
    logits = torch.tensor([0.0, 1.0, -1.0, 2.0, 0.5, 0.5, -2.0, 1.5], dtype=torch.float64)
    counts = choices(keys_of_seeds(20_000), logits).bincount(minlength=8)
    assert chi_square.statistic(counts, logits.softmax(0)) < chi_square.CRITICAL[7]


def test_the_keyed_argmax_has_its_law_over_positions_of_one_seed() -> None:
    logits = torch.linspace(-1, 1, 8, dtype=torch.float64)
    keys = [NoiseKey(42, 0, position, Stream.TARGET) for position in range(20_000)]
    counts = choices(keys, logits).bincount(minlength=8)
    assert chi_square.statistic(counts, logits.softmax(0)) < chi_square.CRITICAL[7]


@pytest.mark.parametrize(
    "other",
    [
        keys_of_seeds(20_000, Stream.DRAFT),
        keys_of_seeds(20_000, choice=1),
        keys_of_seeds(20_000, position=6),
        keys_of_seeds(20_001)[1:],
    ],
    ids=["stream", "choice", "position", "seed"],
)
def test_rows_of_different_keys_are_independent(other: list[NoiseKey]) -> None:
    logits = torch.tensor([0.0, 0.3, -0.3, 0.1], dtype=torch.float64)
    first, second = choices(keys_of_seeds(20_000), logits), choices(other, logits)
    counts = (first * 4 + second).bincount(minlength=16)
    law = logits.softmax(0)[:, None] * logits.softmax(0)
    assert chi_square.statistic(counts, law) < chi_square.CRITICAL[15]


def test_coins_are_uniform_and_independent_from_position_to_position() -> None:
    coins = torch.tensor(uniform([NoiseKey(9, 0, position, Stream.ACCEPT) for position in range(20_001)]))
    cells = (coins * 16).long()
    counts = (cells[:-1] * 16 + cells[1:]).bincount(minlength=256)
    assert chi_square.statistic(counts, torch.full((256,), 1 / 256)) < chi_square.CRITICAL[255]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_gpu_draws_the_same_numbers() -> None:
    keys = [NoiseKey(seed, 1, 77, Stream.TARGET) for seed in EXTREME_SEEDS]
    cuda = torch.device("cuda")
    assert torch.equal(uniform_rows(keys, 151_936, cuda).cpu(), uniform_rows(keys, 151_936, CPU))
    torch.testing.assert_close(
        gumbel_noise(keys, 151_936, cuda).cpu(), gumbel_noise(keys, 151_936, CPU), rtol=1e-14, atol=1e-14
    )
