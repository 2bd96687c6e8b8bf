"""A whole step of the engine, as on a device that it takes long to hear from."""

from typing import Any

import pytest

from engine import engine_core
from engine.llm import LLM
from engine.model.model_runner import ROW_LIMITS
from engine.model.recording import Recorder
from engine.model.row_graphs import RowGraphs
from engine.sampling.device_rows import DeviceRows
from engine.sampling.sampler import Sampler
from engine.sampling_params import SamplingParams
from tests.engines import build_llm
from tests.model.tape import TapeRecorder
from tests.sampling.waits import waits_in

GREEDY = SamplingParams(temperature=0.0, max_tokens=40)
SAMPLED = SamplingParams(temperature=0.9, top_p=0.95, seed=3, max_tokens=40)
PROMPT = [5, 6, 7] * 6


def far_llm(
    monkeypatch: pytest.MonkeyPatch, method: str, recorder: Recorder | None = None, **settings: Any
) -> LLM:
    launcher = None if recorder is None else RowGraphs(recorder, *ROW_LIMITS)
    monkeypatch.setattr(engine_core, "sampler_of", lambda runner: Sampler(far=DeviceRows(launcher)))
    return build_llm(method, **settings)


@pytest.mark.parametrize("method", ["none", "ngram"])
@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_each_step_waits_once(monkeypatch: pytest.MonkeyPatch, method: str, params: SamplingParams) -> None:
    """Prompts, single tokens, and drafts that are looked up; draft models wait for passes of their own."""
    core = far_llm(monkeypatch, method).core
    for number in range(3):
        core.add_request(str(number), PROMPT[number:], params)
    waits = [waits_in(core.step) for _ in range(6)]
    assert waits == [["tolist"]] * 6


@pytest.mark.parametrize("is_recorded", [False, True])
def test_the_texts_are_the_same(monkeypatch: pytest.MonkeyPatch, is_recorded: bool) -> None:
    prompts = [PROMPT, PROMPT[1:]]
    plain = build_llm("draft_model 2,1,1").generate(prompts, SAMPLED)
    tapes = TapeRecorder()
    recorder = tapes if is_recorded else None
    far = far_llm(monkeypatch, "draft_model 2,1,1", recorder).generate(prompts, SAMPLED)
    assert (tapes.num_replays > 20) is is_recorded
    assert [output.token_ids for output in far] == [output.token_ids for output in plain]
