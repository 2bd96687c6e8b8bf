"""An engine whose target and draft model replay recorded passes says what it says without them."""

from collections.abc import Callable
from typing import Any

import pytest

from engine import factory
from engine.llm import LLM
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
PARAMS = [SamplingParams(temperature=0.0, max_tokens=24), SamplingParams(seed=4, max_tokens=20)]


def texts(build: Callable[[], LLM]) -> list[Any]:
    return [output.token_ids for output in build().generate(PROMPTS, PARAMS)]


def test_the_texts_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    def build() -> LLM:
        target = load_tiny(**SIZES)  # type: ignore[arg-type]
        draft = load_tiny(noise=0.05, **SIZES)  # type: ignore[arg-type]
        return build_llm("draft_model 2,1", target=target, draft=draft)

    expected = texts(build)
    recorder = TapeRecorder(triton_kernels)
    chosen: list[bool] = []

    def choose(operators: object, device: object, *, records: bool = False) -> TritonAttention:
        chosen.append(records)
        return TritonAttention(RULES, recorder)

    for module in (factory, speculation_factory):
        monkeypatch.setattr(module, "choose_backend", choose)
    monkeypatch.setattr(backend_module, "kernels", recorder)
    assert texts(build) == expected
    assert chosen == [True, True]
    assert recorder.num_replays > 2 * len(recorder.tapes) > 0
