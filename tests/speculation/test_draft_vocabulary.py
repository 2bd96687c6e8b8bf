"""A draft model's output layer read in part: rows are the whole layer's, and texts bring their own tokens."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from engine.errors import StartupError
from engine.model.input_batch import SequenceSlice
from engine.model.kv_cache import PagedKVCache
from engine.model.loaded_model import LoadedModel
from engine.model.model_runner import ModelRunner
from engine.model.panel_linear import PANEL
from engine.sampling_params import SamplingParams
from engine.speculation.base import DraftRequest
from engine.speculation.chain_growth import ChainGardener
from engine.speculation.draft_model import DraftLimits, DraftModelSpeculator
from engine.speculation.draft_vocabulary import DraftVocabulary, choose_vocabulary
from engine.speculation.drawing import DrawingStyle
from engine.speculation.growing import TreeGrower
from engine.speculation.target_ends import TargetEnds
from tests.engines import load_tiny
from tests.operators import make_backend, need_operators
from tests.speculation.drafting import GREEDY, Blocks, Text, propose
from tests.tiny import EOS, VOCAB_SIZE

SIZE = 48
KINDS: dict[str, dict[str, Any]] = {
    "float32": {},
    "int8": {"dtype": "int8"},
    "int4": {"dtype": "int4"},
    "tied": {"arch": "gpt2"},
    "capped logits": {"arch": "gemma2", "final_logit_softcapping": 3.0},
    "padded embedding": {"vocab_size": 320},
}


def runner_of(model: LoadedModel, vocab_size: int = VOCAB_SIZE) -> ModelRunner:
    cache = PagedKVCache(model.layers, 96, 4, torch.float32, model.device)
    backend = make_backend("reference" if model.operators is None else "cpu")
    return ModelRunner(model.module, cache, backend, vocab_size, model.operators, model.weights)


def vocabulary_of(model: LoadedModel, size: int = SIZE, always: Sequence[int] = (EOS,)) -> DraftVocabulary:
    ends = TargetEnds(model.module, VOCAB_SIZE)
    return DraftVocabulary(runner_of(model), ends, size, always)


def request(name: str, tokens: Sequence[int], **wishes: Any) -> DraftRequest:
    params = replace(GREEDY, **wishes)
    return DraftRequest(name, list(tokens), len(tokens), 0, 0, list(range(24)), params, budget=4)


def kept(vocabulary: DraftVocabulary) -> set[int]:
    """Ids that are there beside the first."""
    ids = vocabulary.ids.to_target.tolist()
    assert len(ids) == len(set(ids))
    assert ids[:SIZE] == list(range(SIZE))
    return set(ids[SIZE:])


def panel(token: int) -> set[int]:
    begin = token // PANEL * PANEL
    return set(range(begin, min(begin + PANEL, VOCAB_SIZE)))


@pytest.mark.parametrize("kind", KINDS)
def test_rows_are_those_of_the_whole_layer(kind: str) -> None:
    if "dtype" in KINDS[kind]:
        need_operators()
    model = load_tiny(**KINDS[kind])
    vocabulary, runner = vocabulary_of(model), runner_of(model)
    tokens = [3, 200, 77, 258, 5, 255, 9]
    asked = request("a", tokens)
    vocabulary.follow([asked])
    batch = runner.build([SequenceSlice(tokens, 0, asked.block_table, rows=3)])
    whole = runner.forward(batch)
    ours = vocabulary.forward(batch, ["a"] * 3)
    expected = whole[:, vocabulary.ids.to_target]
    assert ours.shape == (3, SIZE + len(panel(200) | panel(77) | panel(258) | panel(255)))
    if "dtype" in KINDS[kind]:
        assert torch.equal(ours, expected)
    else:
        torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-5)


def test_texts_and_parameters_bring_their_tokens_for_as_long_as_they_last() -> None:
    vocabulary = vocabulary_of(load_tiny())
    assert kept(vocabulary) == panel(EOS)
    first = request("a", [1, 100, 47])
    other = request(
        "b", [101], stop_token_ids=(130,), logit_bias=((150, 1.0), (170, -1.0)), allowed_token_ids=(2, 190)
    )
    vocabulary.follow([first, other])
    own = panel(EOS) | panel(100)
    named = panel(130) | panel(150) | panel(190)
    assert kept(vocabulary) == own | named
    vocabulary.follow([replace(first, token_ids=[1, 100, 47, 230]), other])
    assert kept(vocabulary) == own | named | panel(230)
    vocabulary.release("b")
    vocabulary.release("unknown")
    vocabulary.follow([replace(first, token_ids=[1, 100, 47, 230, 64])])
    assert kept(vocabulary) == own | panel(230) | panel(64)
    vocabulary.release("a")
    vocabulary.follow([])
    assert kept(vocabulary) == panel(EOS)
    vocabulary.follow([first])
    assert kept(vocabulary) == own
    assert list(vocabulary._texts) == ["a"]


def test_a_large_id_that_the_target_has_not_is_never_read() -> None:
    vocabulary = vocabulary_of(load_tiny(vocab_size=320), always=(EOS, 300))
    vocabulary.follow([request("a", [1, 2], stop_token_ids=(5000,))])
    assert kept(vocabulary) == panel(EOS)


def drafter(model: LoadedModel) -> DraftModelSpeculator:
    runner = runner_of(model)
    vocabulary = DraftVocabulary(runner, TargetEnds(model.module, VOCAB_SIZE), SIZE, (EOS,))
    grower = TreeGrower(ChainGardener(), DrawingStyle(), frozenset(), model.operators)
    return DraftModelSpeculator(runner, DraftLimits(512, 256), grower, vocabulary)


TEXTS = ([7, 100, 41], [5, 200, 201, 202], [9, 9, 9], [11, 64, 12, 13])


@pytest.mark.parametrize("params", [GREEDY, SamplingParams(temperature=1.5, seed=5, ignore_eos=True)])
def test_a_draft_depends_on_its_own_text_alone(params: SamplingParams) -> None:
    model = load_tiny()
    alone = []
    for index, tokens in enumerate(TEXTS):
        [tree] = propose(drafter(model), Text(str(index), list(tokens), Blocks(), params).ask(6))
        alone.append(tree.tokens)
        allowed = set(range(SIZE)) | panel(EOS) | {id for token in tokens for id in panel(token)}
        assert len(tree) == 6
        assert set(tree.tokens) <= allowed
    blocks = Blocks()
    together = propose(
        drafter(model), *(Text(str(i), list(tokens), blocks, params).ask(6) for i, tokens in enumerate(TEXTS))
    )
    assert [tree.tokens for tree in together] == alone
    # Nor on who shares the engine and sits this step out.
    busy = drafter(model)
    blocks = Blocks()
    first, *others = [Text(str(i), list(tokens), blocks, params).ask(6) for i, tokens in enumerate(TEXTS)]
    propose(busy, *others)
    assert propose(busy, first)[0].tokens == alone[0]
    # Which could not be told if no draft had ever wanted another text's tokens.
    free = [
        propose(drafter_of_all(model), Text(str(i), list(t), Blocks(), params).ask(6))[0]
        for i, t in enumerate(TEXTS)
    ]
    assert sum(tree.tokens != own for tree, own in zip(free, alone, strict=True)) >= 2


def drafter_of_all(model: LoadedModel) -> DraftModelSpeculator:
    grower = TreeGrower(ChainGardener(), DrawingStyle(), frozenset(), model.operators)
    return DraftModelSpeculator(runner_of(model), DraftLimits(512, 256), grower)


@pytest.mark.parametrize(
    ("wanted", "size"),
    [("auto", None), ("all", None), (48, 48), (33, 48), (257, None), (259, None), (999, None)],
)
def test_what_is_chosen(wanted: Any, size: int | None) -> None:
    model = load_tiny()
    chosen = choose_vocabulary(wanted, runner_of(model), TargetEnds(model.module, VOCAB_SIZE), ())
    assert (None if chosen is None else len(chosen.ids.to_target)) == size


def test_of_a_large_vocabulary_the_first_are_kept_by_default() -> None:
    model = load_tiny(vocab_size=65552, hidden_size=8, num_attention_heads=1, num_key_value_heads=1)
    for vocab_size, size in ((65552, 32768), (65536, None)):
        ends = TargetEnds(model.module, vocab_size)
        chosen = choose_vocabulary("auto", runner_of(model, vocab_size), ends, ())
        assert (None if chosen is None else len(chosen.ids.to_target)) == size


def test_a_model_that_does_more_to_its_logits_is_refused() -> None:
    model = load_tiny("gemma2", final_logit_softcapping=3.0)
    ends = TargetEnds(model.module, VOCAB_SIZE)
    ends._softcap = None
    with pytest.raises(
        StartupError, match="draft_vocab_size is 48, but the draft model makes more of its states"
    ):
        choose_vocabulary(48, runner_of(model), ends, ())


def test_weights_that_cannot_be_taken_apart_are_refused() -> None:
    model = load_tiny(dtype="float16")
    ends = TargetEnds(model.module, VOCAB_SIZE)
    with pytest.raises(StartupError, match="output layer is neither packed integers nor a plain layer"):
        choose_vocabulary(48, runner_of(model), ends, ())
