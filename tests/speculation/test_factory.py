"""From the configuration to a speculator."""

from pathlib import Path

import pytest

from engine.config import (
    CacheConfig,
    DraftModelSpeculation,
    EngineConfig,
    ModelConfig,
    NgramSpeculation,
    NoSpeculation,
    SpeculationConfig,
)
from engine.errors import StartupError
from engine.model.loaded_model import LoadedModel
from engine.model.loader import wrap_model
from engine.sampling_params import SamplingParams
from engine.speculation.factory import build_speculator, load_drafts, lookup_settings
from tests.operators import share_operators
from tests.speculation.drafting import BLOCK_SIZE, NUM_BLOCKS, Blocks, Text, greedy_chain, propose
from tests.tiny import EOS, VOCAB_SIZE, byte_tokenizer, save_tiny, tiny_model


def make_target() -> LoadedModel:
    return wrap_model(tiny_model("llama", seed=1), byte_tokenizer(), name="target")


def make_config(speculation: SpeculationConfig, tmp_path: Path) -> EngineConfig:
    return EngineConfig(
        # The target's own length and template must not reach the draft.
        model=ModelConfig(
            model="target",
            revision="v1",
            device="cpu",
            max_model_len=100_000,
            chat_template=tmp_path / "missing.jinja",
            dtype="float32",
            cache_dir=tmp_path / "cache",
            offline=True,
        ),
        cache=CacheConfig(block_size=BLOCK_SIZE),
        speculation=speculation,
    )


def test_plain_decoding_has_no_speculator(tmp_path: Path) -> None:
    config = make_config(NoSpeculation(), tmp_path)
    target = make_target()
    assert load_drafts(config.speculation, target, config.model) == []
    assert build_speculator(config, target, [], NUM_BLOCKS) is None


def test_prompt_lookup_takes_its_sizes_and_the_targets_eos(tmp_path: Path) -> None:
    config = make_config(NgramSpeculation(ngram_min=2, ngram_max=2), tmp_path)
    target = make_target()
    assert load_drafts(config.speculation, target, config.model) == []
    speculator = build_speculator(config, target, [], NUM_BLOCKS)
    assert speculator is not None
    assert not speculator.requirements.has_cache
    params = SamplingParams(temperature=0.0)
    too_short = Text("a", [1, 2, 3, 2], Blocks(), params)
    ending = Text("b", [1, 2, 3, EOS, 4, 1, 2], Blocks(), params)
    trees = propose(speculator, too_short.ask(4), ending.ask(4))
    assert [tree.tokens for tree in trees] == [(), (3, EOS)]


@pytest.mark.parametrize("rows", [VOCAB_SIZE, VOCAB_SIZE + 61])
def test_a_draft_model_is_loaded_like_the_target(tmp_path: Path, rows: int) -> None:
    """With an embedding of the target's size, or padded."""
    share_operators(tmp_path / "cache")
    folder = save_tiny(tmp_path / "draft", "llama", seed=2, vocab_size=rows, max_position_embeddings=64)
    config = make_config(DraftModelSpeculation(draft_model=str(folder)), tmp_path)
    target = make_target()
    [draft] = load_drafts(config.speculation, target, config.model)
    assert draft.dtype == target.dtype
    speculator = build_speculator(config, target, [draft], NUM_BLOCKS)
    assert speculator is not None
    assert speculator.requirements.has_cache
    assert speculator.requirements.max_model_len == 64
    text = Text("a", list(b"hello, world"), Blocks())
    [tree] = propose(speculator, text.ask(5))
    plain = tiny_model("llama", seed=2, attention="eager", vocab_size=rows, max_position_embeddings=64)
    assert tree.tokens == greedy_chain(plain, text.tokens, 5)


def test_a_draft_of_another_vocabulary_size_is_refused(tmp_path: Path) -> None:
    folder = save_tiny(tmp_path / "draft", "llama", vocab_size=VOCAB_SIZE - 3)
    config = make_config(DraftModelSpeculation(draft_model=str(folder)), tmp_path)
    with pytest.raises(StartupError, match=rf"{VOCAB_SIZE - 3} tokens.*{VOCAB_SIZE}"):
        load_drafts(config.speculation, make_target(), config.model)


def test_a_draft_with_two_ids_swapped_is_refused(tmp_path: Path) -> None:
    folder = save_tiny(tmp_path / "draft", "llama")
    path = folder / "tokenizer.json"
    text = path.read_text(encoding="utf-8")
    swapped = text.replace('"h": 104', '"h": 105').replace('"i": 105', '"i": 104')
    assert swapped.count('"h": 105') == swapped.count('"i": 104') == 1
    path.write_text(swapped, encoding="utf-8")
    config = make_config(DraftModelSpeculation(draft_model=str(folder)), tmp_path)
    with pytest.raises(StartupError, match="token id 104 is 'h' to the target target but 'i' to the draft"):
        load_drafts(config.speculation, make_target(), config.model)


@pytest.mark.parametrize(("lookup", "method"), [("none", None), ("ngram", "ngram"), ("suffix", "suffix")])
def test_a_lookup_beside_a_draft_model_has_its_own_settings(lookup: str, method: str | None) -> None:
    settings = lookup_settings(DraftModelSpeculation.model_validate({"draft_model": "x", "lookup": lookup}))
    assert (settings and settings.method) == method
    assert lookup_settings(NgramSpeculation()) is None
