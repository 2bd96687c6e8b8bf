"""An engine whose target and draft replay recorded passes says what it says without them."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest

from engine import factory
from engine.config import KVCacheDType
from engine.llm import LLM
from engine.model import cache_type
from engine.model.attention.reference import ReferenceAttention
from engine.model.attention.tiles import SplitRules
from engine.sampling_params import SamplingParams
from engine.speculation import factory as speculation_factory
from tests.engines import build_llm, load_tiny
from tests.model.tape import TapeRecorder

pytest.importorskip("triton", reason="triton is not installed; it comes for Linux on x86-64 alone")

from engine.model.attention import triton as backend_module
from engine.model.attention import triton_kernels
from engine.model.attention.triton import TritonAttention

RULES = SplitRules(wanted_programs=1, min_slots=16)
SIZES = {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1}
PROMPTS = [[5, 6, 7, 8, 9, 10, 11], [5, 6, 7, 20]]


def texts(build: Callable[[], LLM], max_tokens: int) -> list[Any]:
    params = [SamplingParams(temperature=0.0, max_tokens=max_tokens), SamplingParams(seed=4, max_tokens=7)]
    return [output.token_ids for output in build().generate(PROMPTS, params)]


def drafted_by_a_model(*, enforce_eager: bool = False, kv_cache_dtype: KVCacheDType = "auto") -> LLM:
    target = load_tiny(**SIZES)  # type: ignore[arg-type]
    draft = load_tiny(noise=0.05, **SIZES)  # type: ignore[arg-type]
    return build_llm(
        "draft_model 2,1",
        target=target,
        draft=draft,
        enforce_eager=enforce_eager,
        kv_cache_dtype=kv_cache_dtype,
    )


def drafted_by_a_head(*, enforce_eager: bool = False) -> LLM:
    target = load_tiny(num_attention_heads=2, num_key_value_heads=1)
    return build_llm("eagle3 2,1", target=target, enforce_eager=enforce_eager)


@dataclass
class Chosen:
    """What a tape in the place of CUDA graphs has seen.

    Attributes:
        recorder: The tape.
        records: For each backend whether it was to record.
    """

    recorder: TapeRecorder
    records: list[bool]


@pytest.fixture
def chosen(monkeypatch: pytest.MonkeyPatch) -> Chosen:
    """Triton's attention for all that is built."""
    seen = Chosen(TapeRecorder(triton_kernels), [])

    def choose(operators: object, device: object, *, records: bool = False) -> TritonAttention:
        seen.records.append(records)
        return TritonAttention(RULES, seen.recorder if records else None)

    for module in (factory, speculation_factory):
        monkeypatch.setattr(module, "choose_backend", choose)
    monkeypatch.setattr(speculation_factory, "stack_head", lambda *_: None)
    monkeypatch.setattr(backend_module, "kernels", seen.recorder)
    return seen


@pytest.mark.parametrize(("build", "max_tokens"), [(drafted_by_a_model, 16), (drafted_by_a_head, 8)])
def test_the_texts_are_the_same(
    build: Callable[[], LLM], max_tokens: int, request: pytest.FixtureRequest
) -> None:
    expected = texts(build, max_tokens)
    chosen: Chosen = request.getfixturevalue("chosen")
    assert texts(build, max_tokens) == expected
    assert chosen.records == [True, True]
    assert chosen.recorder.num_replays > 2 * len(chosen.recorder.tapes) > 0


def test_they_are_the_same_over_eight_bits(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache_type, "check_cache_type", lambda wanted, device: None)
    # Plain torch knows such caches, and the C++ operators do not.
    for module in (factory, speculation_factory):
        monkeypatch.setattr(module, "choose_backend", lambda *_, records: ReferenceAttention())
    build = partial(drafted_by_a_model, kv_cache_dtype="fp8")
    expected = texts(build, 6)
    chosen: Chosen = request.getfixturevalue("chosen")
    assert texts(build, 6) == expected
    assert chosen.recorder.num_replays > 0


def test_eager_means_that_nothing_is_recorded(chosen: Chosen) -> None:
    texts(lambda: drafted_by_a_model(enforce_eager=True), 4)
    assert chosen.records == [False, False]
    assert not chosen.recorder.tapes
