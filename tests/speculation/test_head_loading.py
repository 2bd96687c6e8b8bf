"""From the settings to a head that drafts; heads that do not fit are refused by what is wrong with them."""

from pathlib import Path
from typing import Any

import pytest
import torch

from engine.config import CacheConfig, EngineConfig, ModelConfig
from engine.errors import EngineError, ModelNotFound, ModelNotSupported, StartupError
from engine.factory import assemble, build_engine
from engine.head_config import EagleSpeculation, MedusaSpeculation
from engine.llm import LLM
from engine.model.hidden_states import HiddenSelection
from engine.sampling_params import SamplingParams
from engine.speculation.factory import build_speculator, load_drafts
from engine.speculation.head_rates import HeadRates
from engine.speculation.heads.medusa_tree import PRIOR_HEAD_RATES
from engine.speculation.heads.writing import save_eagle_head, save_medusa_heads
from engine.speculation.loaded_head import LoadedEagle, LoadedMedusa
from engine.speculation.target_ends import TargetEnds
from engine.token_tree import TokenTree
from tests.engines import drafter_of, load_tiny
from tests.heads import DRAFT_IDS, eagle_config, features_of, random_eagle, random_medusa
from tests.operators import share_operators
from tests.tiny import VOCAB_SIZE, save_tiny, tiny_model

GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)


def save_eagle(folder: Path, **changes: Any) -> Path:
    save_eagle_head(folder, random_eagle(eagle_config("eagle3", **changes)), target="tiny")
    return folder


def settings(tmp_path: Path, speculation: EagleSpeculation | MedusaSpeculation) -> EngineConfig:
    share_operators(tmp_path)
    return EngineConfig(
        model=ModelConfig(model=str(tmp_path / "target"), dtype="float32", cache_dir=tmp_path, offline=True),
        cache=CacheConfig(block_size=4, num_kv_blocks=64),
        speculation=speculation,
    )


def test_an_eagle_head_from_a_folder(tmp_path: Path) -> None:
    config = settings(tmp_path, EagleSpeculation(head=str(save_eagle(tmp_path / "head")), tree="2,1"))
    target = load_tiny()
    [loaded] = load_drafts(config.speculation, target, config.model)
    assert isinstance(loaded, LoadedEagle)
    assert loaded.hidden_states == HiddenSelection((0, 1, 0))
    assert loaded.numbers_per_block == 96
    speculator = build_speculator(config, target, [loaded], 64)
    assert speculator is not None
    assert speculator.requirements.follows
    assert speculator.requirements.branches
    [answer] = LLM(assemble(config, target, [loaded])).generate(["one two"], GREEDY)
    assert answer.speculation.num_draft_tokens > 0


def test_the_convention_of_layer_ids_can_be_overridden(tmp_path: Path) -> None:
    head = save_eagle(tmp_path / "head", features=(1, 0, 1))
    found = []
    for convention in ("auto", "hidden_states", "layer_outputs"):
        speculation = EagleSpeculation(head=str(head), layer_convention=convention)
        [loaded] = load_drafts(speculation, load_tiny(num_hidden_layers=3), ModelConfig(offline=True))
        assert isinstance(loaded, LoadedEagle)
        found.append(loaded.hidden_states.layers)
    assert found == [(1, 0, 1), (1, 0, 1), (2, 1, 2)]


def test_medusa_heads_from_a_folder(tmp_path: Path) -> None:
    save_medusa_heads(tmp_path / "head", random_medusa(4), target="tiny")
    config = settings(tmp_path, MedusaSpeculation(head=str(tmp_path / "head"), tree="sequoia"))
    target = load_tiny()
    [loaded] = load_drafts(config.speculation, target, config.model)
    assert isinstance(loaded, LoadedMedusa)
    speculator = build_speculator(config, target, [loaded], 64)
    assert speculator is not None
    assert not speculator.requirements.has_cache
    assert speculator.requirements.hidden_states == HiddenSelection(last=True)
    [answer] = LLM(assemble(config, target, [loaded])).generate(["one two"], GREEDY)
    assert answer.speculation.num_draft_tokens > 0


def test_the_tree_that_comes_with_heads(tmp_path: Path) -> None:
    choices = ((0,), (1,), (0, 0), (0, 1), (0, 0, 0))
    heads = random_medusa(3, choices=choices)
    save_medusa_heads(tmp_path / "head", heads, target="tiny")
    speculation = MedusaSpeculation(head=str(tmp_path / "head"), medusa_choices=True, planner="fixed")
    config, target = settings(tmp_path, speculation), load_tiny()
    [loaded] = load_drafts(config.speculation, target, config.model)
    llm = LLM(assemble(config, target, [loaded]))
    speculator = drafter_of(llm).speculator
    trees: list[TokenTree] = []
    propose = speculator.propose
    speculator.propose = lambda context: trees.extend(propose(context)) or trees[-1:]  # type: ignore
    llm.generate(["one two"], GREEDY)
    assert trees[0].parents == (0, 0, 1, 1, 3)
    save_medusa_heads(tmp_path / "bare", random_medusa(3), target="tiny")
    speculation = MedusaSpeculation(head=str(tmp_path / "bare"), medusa_choices=True)
    [loaded] = load_drafts(speculation, target, config.model)
    with pytest.raises(StartupError, match="names no tree"):
        build_speculator(settings(tmp_path, speculation), target, [loaded], 64)


def test_medusa_choices_are_a_tree_already() -> None:
    for more in ({"tree": "2,1"}, {"num_draft_tokens": 3}):
        with pytest.raises(ValueError, match="medusa_choices is a tree"):
            MedusaSpeculation(head="x", medusa_choices=True, **more)


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda folder: folder / "missing", ModelNotFound, "there is no folder"),
        (lambda folder: save_eagle(folder, target_hidden_size=48), ModelNotSupported, "48|hidden"),
        (lambda folder: save_eagle(folder, hidden_size=48, num_heads=6), ModelNotSupported, "48"),
        (lambda folder: save_eagle(folder, vocab_size=VOCAB_SIZE + 64), EngineError, "323|vocab"),
    ],
    ids=["missing", "another hidden size", "another width", "another vocabulary"],
)
def test_a_head_that_does_not_fit_is_refused_at_start(
    tmp_path: Path, make: Any, error: type[Exception], message: str
) -> None:
    save_tiny(tmp_path / "target")
    config = settings(tmp_path, EagleSpeculation(head=str(make(tmp_path / "head"))))
    with pytest.raises(error, match=message):
        build_engine(config)


def test_a_head_of_the_other_method_is_sent_there(tmp_path: Path) -> None:
    save_medusa_heads(tmp_path / "heads", random_medusa(), target="tiny")
    with pytest.raises(ModelNotSupported, match="serve it with the method medusa"):
        load_drafts(EagleSpeculation(head=str(tmp_path / "heads")), load_tiny(), ModelConfig(offline=True))


@pytest.mark.parametrize("arch", ["llama", "gemma2", "gpt2"])
def test_the_targets_output_layer_with_all_that_it_does(arch: str) -> None:
    """Gemma 2 caps its logits."""
    changes: dict[str, Any] = {"final_logit_softcapping": 2.0} if arch == "gemma2" else {}
    module = tiny_model(arch, attention="eager", **changes)
    tokens = list(b"one two")
    logits = module(torch.tensor([tokens]), use_cache=False).logits[0]
    ours = TargetEnds(module, VOCAB_SIZE).score(features_of(module, tokens, "last"))
    assert torch.allclose(ours, logits, atol=1e-5)


def test_rows_of_a_smaller_vocabulary_find_their_ids() -> None:
    spread = TargetEnds(tiny_model(), 200).spread(torch.arange(130.0)[None], DRAFT_IDS)
    assert spread.shape == (1, 200)
    kept = DRAFT_IDS < 200
    assert torch.equal(spread[0, DRAFT_IDS[kept]], torch.arange(130.0)[kept])
    assert int((spread > -torch.inf).sum()) == int(kept.sum())


def test_medusa_rates_are_measured_per_head() -> None:
    rates = HeadRates(3)
    assert len(rates.best_shape(7, 2)) == 7
    assert max(rates.best_shape(40, 2).depths()) == 2
    chain = TokenTree.chain((1, 2, 3))
    for _ in range(500):
        assert rates.note(chain, [1, 9]) == 2
    first, second, third = (head.rates()[0] for head in rates._heads)
    assert first > 0.9
    assert second < 0.1
    assert third == PRIOR_HEAD_RATES[2][0], "never reached"
    # One head that is always right and one that is never: the breadth is below the first.
    assert max(rates.best_shape(4, 3).depths()) == 1 or rates.best_shape(4, 3).parents[:1] == (0,)
