"""Drafts of another vocabulary are refused; a padded embedding is accepted, and its padding never spoken."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from engine.config import CacheConfig, DraftModelSpeculation, EngineConfig, ModelConfig
from engine.errors import StartupError
from engine.factory import build_engine
from engine.llm import LLM
from engine.model.loaded_model import LoadedModel
from engine.model.loader import wrap_model
from engine.sampling_params import Acceptance, SamplingParams, SpeculationParams
from engine.speculation.base import ProposalContext, Requirements, Speculator
from engine.token_tree import TokenTree
from tests.engine.answers import PROMPT, essence, target
from tests.engines import add_noise, build_llm
from tests.tiny import VOCAB_SIZE, byte_tokenizer, save_tiny, tiny_model

PADDED_SIZE = 320


def engine_of(folder: Path, draft: Path) -> LLM:
    config = EngineConfig(
        model=ModelConfig(model=str(folder), max_model_len=64, dtype="float32"),
        cache=CacheConfig(block_size=4, num_kv_blocks=64),
        speculation=DraftModelSpeculation(draft_model=str(draft), planner="fixed"),
    )
    return LLM(build_engine(config))


def test_a_draft_of_another_size_is_refused(tmp_path: Path) -> None:
    model = save_tiny(tmp_path / "target")
    draft = save_tiny(tmp_path / "draft", vocab_size=VOCAB_SIZE + 1)
    tokenizer = byte_tokenizer()
    tokenizer.add_tokens(["<more>"])
    tokenizer.save_pretrained(draft)
    with pytest.raises(StartupError, match=rf"{VOCAB_SIZE + 1} tokens.*{VOCAB_SIZE}"):
        engine_of(model, draft)


def test_a_draft_with_two_ids_swapped_is_refused(tmp_path: Path) -> None:
    model, draft = save_tiny(tmp_path / "target"), save_tiny(tmp_path / "draft")
    path = draft / "tokenizer.json"
    content = json.loads(path.read_text())
    vocab = content["model"]["vocab"]
    vocab["q"], vocab["k"] = vocab["k"], vocab["q"]
    path.write_text(json.dumps(content))
    with pytest.raises(
        StartupError, match=f"token id {ord('k')} is 'k' to the target .* but 'q' to the draft"
    ):
        engine_of(model, draft)


def test_a_padded_draft_starts_and_drafts(tmp_path: Path) -> None:
    model = save_tiny(tmp_path / "target")
    draft = save_tiny(tmp_path / "draft", vocab_size=PADDED_SIZE)
    [answer] = engine_of(model, draft).generate([PROMPT], SamplingParams(temperature=0.0, max_tokens=8))
    assert answer.speculation.num_draft_tokens > 0
    assert max(answer.token_ids) < VOCAB_SIZE


def padded(noise: float = 0.0) -> LoadedModel:
    """The tiny model behind an embedding of 320 rows, of which every padded one but a few is overwhelming.

    A head has no bias, so no row is largest for every hidden state: of a row and its negative, one is.
    """
    module = tiny_model(vocab_size=PADDED_SIZE)
    weights = tiny_model().state_dict()
    for name, tensor in module.state_dict().items():
        tensor[: len(weights[name])] = weights[name]
    if noise:
        add_noise(module, noise)
    head = module.get_output_embeddings().weight
    head[VOCAB_SIZE:] = 0.0
    for place in range(32):
        head[VOCAB_SIZE + place, place] = 1000.0
        head[PADDED_SIZE - 1 - place % 29, place] = -1000.0
    return wrap_model(module, byte_tokenizer(), name="padded", max_model_len=128)


class Watched:
    """A speculator whose proposals are kept."""

    def __init__(self, inner: Speculator) -> None:
        self.trees: list[TokenTree] = []
        self._inner = inner

    @property
    def requirements(self) -> Requirements:
        return self._inner.requirements

    def propose(self, context: ProposalContext) -> list[TokenTree]:
        trees = self._inner.propose(context)
        self.trees += trees
        return trees

    def num_computed_tokens(self, request_id: str) -> int:
        return self._inner.num_computed_tokens(request_id)

    def release(self, request_id: str) -> None:
        self._inner.release(request_id)


def test_the_planted_rows_would_win() -> None:
    model = padded()
    hidden = torch.randn(50, 32, generator=torch.Generator().manual_seed(0))
    rows = hidden @ model.module.get_output_embeddings().weight.T
    assert bool((rows.argmax(dim=-1) >= VOCAB_SIZE).all())
    assert model.vocab_size == VOCAB_SIZE


@pytest.mark.parametrize(
    ("method", "rule"),
    [
        ("none", Acceptance.MATCH),
        ("ngram", Acceptance.MATCH),
        ("ngram", Acceptance.TYPICAL),
        *[("draft_model", rule) for rule in Acceptance],
    ],
)
def test_padding_is_never_sampled_or_drafted(method: str, rule: Acceptance) -> None:
    hot = SamplingParams(
        temperature=2.0,
        max_tokens=24,
        ignore_eos=True,
        logprobs=5,
        prompt_logprobs=1,
        speculation=SpeculationParams(acceptance=rule),
    )
    wishes = [replace(hot, seed=seed) for seed in range(12)] + [replace(hot, temperature=0.0)]
    llm = build_llm(method, target=padded(), draft=padded(noise=0.05), allow_lossy=True)
    drafting = llm.core._drafting
    watched = None
    if drafting is not None and method != "none":
        watched = drafting._drafters[-1].speculator = Watched(drafting._drafters[-1].speculator)
    answers = llm.generate([PROMPT] * len(wishes), wishes)
    for answer in answers:
        assert max(answer.token_ids) < VOCAB_SIZE
        assert max(top.token_id for entry in answer.logprobs for top in entry.top) < VOCAB_SIZE
    if watched is not None:
        drafted = [token for tree in watched.trees for token in tree.tokens]
        assert len(drafted) > (100 if method == "draft_model" else 0)
        assert max(drafted, default=0) < VOCAB_SIZE
    if rule is Acceptance.MATCH:
        # The same model without the padding says the same.
        expected = build_llm("none", target=target()).generate([PROMPT] * len(wishes), wishes)
        assert [essence(answer) for answer in answers] == [essence(answer) for answer in expected]
