"""Generated requests say the same with speculation on and off: options, batches and room nobody thought of.

Engines are shared between examples, so that the prefix cache and what is left of earlier requests take part.
The examples are the same in every run. What a failure shrinks to becomes a test of its own below.
"""

from functools import cache
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine.llm import LLM, Completion
from engine.sampling_params import SamplingParams, SpeculationParams
from tests.engine.answers import assert_clean, essence
from tests.engines import METHODS, TREES, build_llm
from tests.tiny import EOS

ROOM: dict[str, dict[str, Any]] = {
    "roomy": {},
    "small steps": {"max_num_batched_tokens": 13},
    "a dry pool": {"num_kv_blocks": 33},
}


@cache
def engine(method: str, room: str) -> LLM:
    return build_llm(method, **ROOM[room])


@cache
def plain_answer(prompt: str, params: SamplingParams) -> Completion:
    """What the target says to the prompt alone."""
    return plain_engine().generate([prompt], params)[0]


@cache
def plain_engine() -> LLM:
    return build_llm("none", prefix_caching=False)


def penalties() -> st.SearchStrategy[float]:
    return st.sampled_from([0.0, 0.0, 1.5, -1.5, 2.0, -2.0, 0.3])


@st.composite
def wishes(draw: st.DrawFn) -> SamplingParams:
    max_tokens = draw(st.integers(1, 20))
    biased = draw(st.lists(st.sampled_from([EOS, 32, 97, 98, 101, 111]), max_size=2, unique=True))
    return SamplingParams(
        max_tokens=max_tokens,
        min_tokens=draw(st.sampled_from([0, 0, min(5, max_tokens)])),
        temperature=draw(st.sampled_from([0.0, 0.0, 0.5, 1.0, 2.0])),
        top_p=draw(st.sampled_from([1.0, 1.0, 0.9, 0.4])),
        top_k=draw(st.sampled_from([0, 0, 1, 3, 40])),
        min_p=draw(st.sampled_from([0.0, 0.0, 0.05, 0.5])),
        presence_penalty=draw(penalties()),
        frequency_penalty=draw(penalties()),
        repetition_penalty=draw(st.sampled_from([1.0, 1.0, 1.5, 0.8])),
        logit_bias=tuple((token, draw(st.sampled_from([8.0, 40.0, -100.0]))) for token in biased),
        seed=draw(st.integers(-3, 3)),
        choice=draw(st.integers(0, 2)),
        stop=tuple(draw(st.lists(st.sampled_from(["o", " t", "aa", "\n", "e"]), max_size=2, unique=True))),
        stop_token_ids=tuple(draw(st.sets(st.integers(97, 122), max_size=3))),
        ignore_eos=draw(st.booleans()),
        logprobs=draw(st.sampled_from([None, None, 0, 2])),
        prompt_logprobs=draw(st.sampled_from([None, None, None, 1])),
        include_stop_str_in_output=draw(st.booleans()),
        speculation=SpeculationParams(num_draft_tokens=draw(st.sampled_from([None, None, 1, 3, 17]))),
    )


PROMPTS = st.one_of(
    st.sampled_from(["one two one two one", "abcabcabcabc", "x = 1\ny = 2\nx", "q", "zzzzzzzzzzzzzzzz"]),
    st.text(alphabet="abo t\n", min_size=1, max_size=30),
)
BATCHES = st.lists(st.tuples(PROMPTS, wishes()), min_size=1, max_size=4)


def check(method: str, room: str, batch: list[tuple[str, SamplingParams]]) -> None:
    llm = engine(method, room)
    answers = llm.generate([prompt for prompt, _ in batch], [params for _, params in batch])
    for (prompt, params), answer in zip(batch, answers, strict=True):
        assert essence(answer) == essence(plain_answer(prompt, params)), (prompt, params)
    assert_clean(llm)


@pytest.mark.parametrize("method", [*METHODS, *TREES])
@settings(
    max_examples=18,
    derandomize=True,
    deadline=None,
    database=None,
    suppress_health_check=[HealthCheck.too_slow],
)
@given(room=st.sampled_from(sorted(ROOM)), batch=BATCHES)
def test_generated_requests(method: str, room: str, batch: list[tuple[str, SamplingParams]]) -> None:
    check(method, room, batch)
