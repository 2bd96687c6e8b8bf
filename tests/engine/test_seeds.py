"""An answer depends on its own seed and on nothing that runs beside it."""

from dataclasses import replace

import pytest

from engine.llm import Completion
from engine.sampling_params import SEED_MAX, SEED_MIN, Acceptance, SamplingParams, SpeculationParams
from tests.engine.answers import essence, run, target
from tests.engines import METHODS, build_llm

REPEAT = tuple(b"repeat this sentence ten times. repeat this")
OTHERS = [
    tuple(text.encode()) for text in ("abcabcabc", "one two one two", "zzzz", "x = 1\nx =", "q", "the the")
]
SEEDED = SamplingParams(temperature=0.9, seed=1, max_tokens=24)
COLD = replace(SEEDED, temperature=0.0)
RATIO = replace(SEEDED, speculation=SpeculationParams(acceptance=Acceptance.REJECTION))
BLOCK = replace(SEEDED, speculation=SpeculationParams(acceptance=Acceptance.BLOCK))


def crowd(base: SamplingParams) -> dict[str, tuple[tuple[int, ...], SamplingParams]]:
    """Six copies of one seeded request, six others with seeds of their own, and one without a seed."""
    asked = {f"copy {i}": (REPEAT, base) for i in range(6)}
    asked |= {f"other {i}": (prompt, replace(base, seed=i + 2)) for i, prompt in enumerate(OTHERS)}
    return {**asked, "seedless": (REPEAT, replace(base, seed=None))}


def alone(method: str, prompt: tuple[int, ...], params: SamplingParams) -> Completion:
    return build_llm(method, target=target(), prefix_caching=False).generate([prompt], params)[0]


@pytest.mark.parametrize(
    ("method", "base"),
    [
        *[(method, base) for method in ("none", *METHODS) for base in (SEEDED, COLD)],
        ("none", RATIO),
        ("draft_model", RATIO),
        ("draft_model", BLOCK),
    ],
)
def test_neighbours_change_nothing(method: str, base: SamplingParams) -> None:
    asked = crowd(base)
    answers = run(build_llm(method, target=target(), max_num_seqs=13, num_kv_blocks=600), asked)
    expected = {"copy": alone(method, *asked["copy 0"])}
    expected |= {name: alone(method, *asked[name]) for name in asked if name.startswith("other")}
    for name, answer in answers.items():
        if name != "seedless":
            assert essence(answer) == essence(expected.get(name, expected["copy"])), name


@pytest.mark.parametrize("method", ["none", *METHODS])
def test_the_same_seed_twice_and_different_seeds(method: str) -> None:
    llm = build_llm(method, target=target())
    seeds = [1, 1, 2, -1, -7, 0, SEED_MAX, SEED_MIN]
    answers = llm.generate([REPEAT] * len(seeds), [replace(SEEDED, seed=seed) for seed in seeds])
    assert answers[0].token_ids == answers[1].token_ids
    assert len({tuple(answer.token_ids) for answer in answers}) == len(seeds) - 1


def test_seedless_requests_differ_from_each_other() -> None:
    llm = build_llm("ngram", target=target())
    answers = llm.generate([REPEAT] * 4, replace(SEEDED, seed=None))
    assert len({tuple(answer.token_ids) for answer in answers}) == 4


def test_choices_of_one_seed_differ_and_repeat() -> None:
    llm = build_llm("draft_model", target=target())
    wishes = [replace(SEEDED, choice=choice) for choice in (0, 1, 2, 0, 1, 2)]
    answers = [tuple(answer.token_ids) for answer in llm.generate([REPEAT] * 6, wishes)]
    assert answers[:3] == answers[3:]
    assert len(set(answers)) == 3
