"""A draft model with a shorter context than the target's."""

import logging
from dataclasses import replace

import pytest

from engine.llm import LLM
from engine.outputs import StepStats
from engine.sampling_params import Acceptance, SamplingParams, SpeculationParams
from tests.engine.answers import essence, plain_answer, run, target
from tests.engines import build_llm, load_tiny

TARGET_LEN, DRAFT_LEN = 512, 256
WISHES = SamplingParams(temperature=0.7, seed=11, max_tokens=32, ignore_eos=True)
GREEDY = replace(WISHES, temperature=0.0)
RATIO = replace(GREEDY, speculation=SpeculationParams(acceptance=Acceptance.REJECTION))
LENGTHS = (220, 250, 255, 256, 300)


def prompt_of(length: int) -> tuple[int, ...]:
    return tuple((b"the cat sat on the mat, " * 20)[:length])


def build(k: int = 4, budget: int = 256) -> LLM:
    return build_llm(
        "draft_model",
        target=target(TARGET_LEN),
        draft=load_tiny(noise=0.05, max_model_len=DRAFT_LEN),
        num_draft_tokens=k,
        num_kv_blocks=800,
        max_num_batched_tokens=budget,
    )


@pytest.mark.parametrize("wishes", [WISHES, GREEDY, RATIO], ids=["seeded", "greedy", "ratio rule, greedy"])
@pytest.mark.parametrize("k", [4, 16])
def test_outgrown_requests_decode_plainly(
    k: int, wishes: SamplingParams, caplog: pytest.LogCaptureFixture
) -> None:
    outgrown: list[int] = []

    def note(stats: StepStats) -> None:
        outgrown.append(stats.num_outgrown)

    with caplog.at_level(logging.INFO, logger="engine.speculation.outgrown"):
        asked = {f"{length}": (prompt_of(length), wishes) for length in LENGTHS}
        answers = run(build(k, budget=100), asked, note)
    plain = replace(wishes, speculation=SpeculationParams())
    for length in LENGTHS:
        expected = plain_answer(plain, prompt_of(length), TARGET_LEN)
        assert essence(answers[f"{length}"]) == essence(expected), length
    assert answers["220"].speculation.num_draft_tokens > 0
    assert answers["250"].speculation.num_draft_tokens > 0
    assert answers["256"].speculation.num_draft_tokens == answers["300"].speculation.num_draft_tokens == 0
    # 220 + 32 tokens never reach the draft's limit; the others do, each once.
    assert sum(outgrown) == 4
    said = [record.getMessage() for record in caplog.records]
    messages = [message for message in said if message.endswith("it goes on without draft_model")]
    assert sorted(message.split()[1] for message in messages) == ["250", "255", "256", "300"]


def test_shared_beginnings_of_outgrown_requests() -> None:
    """Blocks behind the draft's limit are in the target's cache alone; a hit must not be taken for more."""
    llm = build()
    prompt = prompt_of(300)
    for length in (300, 200, 300, 251):
        [answer] = llm.generate([prompt[:length]], WISHES)
        assert essence(answer) == essence(plain_answer(WISHES, prompt[:length], TARGET_LEN))
