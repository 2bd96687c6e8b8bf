"""The trial at start: a draft that does not belong is named, one that does is not, and nothing is left."""

import logging
from pathlib import Path

import pytest
import torch

from engine.config import CacheConfig, DraftModelSpeculation, EngineConfig, ModelConfig
from engine.factory import Engine, build_engine
from engine.head_config import EagleSpeculation, MedusaSpeculation
from engine.llm import LLM
from engine.outputs import StepStats
from engine.sampling_params import SamplingParams
from engine.speculation.factory import wants_probe
from engine.speculation.heads.writing import save_eagle_head
from engine.speculation_probe import (
    MAX_SECONDS,
    MIN_DRAFTS,
    MIN_STEPS,
    PROMPTS,
    ProbeResult,
    log_probe,
    probe_speculation,
)
from tests.engine.answers import assert_clean, essence
from tests.engines import build_llm, load_tiny
from tests.heads import eagle_config, random_eagle
from tests.operators import share_operators
from tests.tiny import byte_tokenizer, save_tiny, tiny_model

LOGGER = "engine.speculation_probe"
GREEDY = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)


def shuffled(folder: Path) -> Path:
    """The tiny target with its embeddings in another order: as if it came from another tokenizer."""
    module = tiny_model()
    weight = module.get_input_embeddings().weight
    order = torch.randperm(len(weight), generator=torch.Generator().manual_seed(3))
    weight.data.copy_(weight.data[order].clone())
    module.save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder


def start(target: Path, draft: Path, tmp_path: Path, **settings: bool) -> Engine:
    share_operators(tmp_path)
    return build_engine(
        EngineConfig(
            model=ModelConfig(model=str(target), offline=True, cache_dir=tmp_path, dtype="float32"),
            cache=CacheConfig(num_kv_blocks=256, block_size=4),
            speculation=DraftModelSpeculation(draft_model=str(draft), **settings),
        )
    )


def test_the_target_as_its_own_draft_is_accepted_whole(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    target = save_tiny(tmp_path / "target")
    with caplog.at_level(logging.INFO, LOGGER):
        engine = start(target, target, tmp_path)
    assert engine.model.probed_acceptance == 1.0
    [record] = [record for record in caplog.records if record.name == LOGGER]
    assert record.levelno == logging.INFO
    assert "near chance" not in record.getMessage()


def test_a_draft_of_another_vocabulary_order_is_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    target = save_tiny(tmp_path / "target")
    with caplog.at_level(logging.INFO, LOGGER):
        engine = start(target, shuffled(tmp_path / "draft"), tmp_path)
    assert engine.model.probed_acceptance is not None
    assert engine.model.probed_acceptance < 0.1
    [record] = [record for record in caplog.records if record.name == LOGGER]
    assert record.levelno == logging.WARNING
    assert "near chance" in record.getMessage()
    assert "number their tokens alike" in record.getMessage()


def test_a_head_that_is_never_right_is_told_what_its_layer_ids_may_mean(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    target = save_tiny(tmp_path / "target")
    save_eagle_head(tmp_path / "head", random_eagle(eagle_config("eagle3")), target="tiny")
    share_operators(tmp_path)
    with caplog.at_level(logging.INFO, LOGGER):
        engine = build_engine(
            EngineConfig(
                model=ModelConfig(model=str(target), offline=True, cache_dir=tmp_path, dtype="float32"),
                cache=CacheConfig(num_kv_blocks=256, block_size=4),
                speculation=EagleSpeculation(head=str(tmp_path / "head")),
            )
        )
    [record] = [record for record in caplog.records if record.name == LOGGER]
    assert record.levelno == logging.WARNING
    assert "layer_convention: hidden_states and layer_outputs" in record.getMessage()
    assert engine.core.take_stats() == StepStats()
    assert_clean(LLM(engine))


def test_it_can_be_switched_off(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    target = save_tiny(tmp_path / "target")
    with caplog.at_level(logging.INFO, LOGGER):
        engine = start(target, shuffled(tmp_path / "draft"), tmp_path, probe=False)
    assert engine.model.probed_acceptance is None
    assert not [record for record in caplog.records if record.name == LOGGER]


def test_lookup_has_none() -> None:
    assert not wants_probe(EngineConfig().speculation)
    assert wants_probe(DraftModelSpeculation(draft_model="a"))
    assert wants_probe(MedusaSpeculation(head="a"))


def test_it_leaves_no_trace(tmp_path: Path) -> None:
    target = save_tiny(tmp_path / "target")
    engine = start(target, target, tmp_path)
    idle = engine.core.take_stats()
    assert idle == StepStats()
    assert not engine.core.scheduler.kv.pool._cached
    llm = LLM(engine)
    assert_clean(llm)
    # The first request finds nothing in the prefix cache, though the probe has asked the same.
    [answer] = llm.generate(["The capital of France is Paris, and the capital of Italy is"], GREEDY)
    assert answer.num_cached_tokens == 0
    plain = LLM(start(target, target, tmp_path, probe=False))
    [expected] = plain.generate(["The capital of France is Paris, and the capital of Italy is"], GREEDY)
    assert essence(answer) == essence(expected)
    assert_clean(llm)


def test_it_ends_in_time_and_leaves_no_request() -> None:
    llm = build_llm("draft_model")
    times = iter(range(0, 1000, int(MAX_SECONDS)))
    result = probe_speculation(llm.core, llm.tokenizer, lambda: next(times))
    assert result.num_drafts == (MIN_STEPS - 1) * len(PROMPTS) == MIN_DRAFTS
    assert_clean(llm)


def test_prompts_that_the_context_cannot_hold_are_left_out() -> None:
    llm = build_llm("draft_model", target=load_tiny(max_model_len=40), draft=load_tiny(max_model_len=40))
    result = probe_speculation(llm.core, llm.tokenizer)
    assert result.num_drafts > 0
    assert result.acceptance == 1.0
    assert_clean(llm)


@pytest.mark.parametrize(
    ("num_hits", "num_drafts", "is_near_chance"),
    [(0, 60, True), (5, 60, True), (6, 60, False), (0, 11, False), (60, 60, False)],
)
def test_what_counts_as_chance(num_hits: int, num_drafts: int, is_near_chance: bool) -> None:
    assert ProbeResult(num_drafts, num_hits, 4 * num_drafts, num_hits, 1.0).is_near_chance is is_near_chance


def test_a_method_that_proposes_nothing_is_named(caplog: pytest.LogCaptureFixture) -> None:
    log_probe(ProbeResult(0, 0, 0, 0, 1.0), "draft_model")
    assert "draft_model proposed nothing" in caplog.text
