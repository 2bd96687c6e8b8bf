"""Draft models that choose among a part of the tokens: the same answers, by every rule and in every shape."""

from dataclasses import replace
from functools import cache
from itertools import product
from typing import Any

import pytest
import torch
from torch import nn
from transformers import PreTrainedModel

from engine.config import DType
from engine.llm import LLM, Completion
from engine.model.loaded_model import LoadedModel
from engine.model.loader import wrap_model
from engine.sampling_params import Acceptance, Constraint, ConstraintKind, SamplingParams, SpeculationParams
from engine.speculation.draft_model import DraftModelSpeculator
from tests.engine.answers import assert_clean, essence
from tests.engine.small_law import threshold
from tests.engines import add_noise, build_llm, drafter_of, load_tiny
from tests.operators import need_operators
from tests.tiny import EOS, tiny_model

SIZE = 112
"""Of 259 tokens: most prompts' letters, and a half of what tiny models say."""

PROMPTS = ["one two one two one two", "abcabcabcabc", "a", "x = 1\ny = 2\nx = 1\ny = 2\n", "\xff\xfe zz"]
GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
SEEDED = SamplingParams(temperature=0.8, seed=7, max_tokens=24, ignore_eos=True)
JSON = Constraint(ConstraintKind.JSON, '{"enum": ["zebra", "\xfc\xfc", 17]}', "response_format")
OPTIONS = {
    "greedy": GREEDY,
    "greedy, penalties": replace(GREEDY, frequency_penalty=2.0, repetition_penalty=1.3),
    "greedy, logit bias": replace(GREEDY, logit_bias=((65, 100.0), (200, 99.0), (67, 3.5))),
    "greedy, tokens outside alone": replace(GREEDY, allowed_token_ids=(200, 201, 202)),
    "greedy, an end": replace(GREEDY, ignore_eos=False, min_tokens=8, logit_bias=((EOS, 30.0),)),
    "seeded": SEEDED,
    "seeded, hot": replace(SEEDED, temperature=2.0, seed=-7),
    "seeded, truncated": replace(SEEDED, top_p=0.9, top_k=40, min_p=0.01),
    "seeded, a format": replace(SEEDED, ignore_eos=False, constraint=JSON),
}
SHAPES = ("draft_model", "draft_model 3,2,1,1", "draft_model dynamic", "draft_models 2,1,1")


@cache
def plain_answers(option: str, dtype: DType | None = None) -> tuple[Completion, ...]:
    llm = build_llm("none", target=load_tiny(dtype=dtype), prefix_caching=False)
    return tuple(llm.generate(PROMPTS, OPTIONS[option]))


def accepted(answers: list[Completion]) -> int:
    return sum(answer.speculation.num_accepted_tokens for answer in answers)


def assert_forgotten(llm: LLM) -> None:
    assert_clean(llm)
    speculator = drafter_of(llm).speculator
    if isinstance(speculator, DraftModelSpeculator):
        assert speculator._vocabulary is not None
        assert not speculator._vocabulary._texts


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("method", SHAPES)
def test_answers_are_the_targets(method: str, option: str) -> None:
    llm = build_llm(method, draft_vocab_size=SIZE)
    answers = llm.generate(PROMPTS, OPTIONS[option])
    assert [essence(answer) for answer in answers] == [essence(answer) for answer in plain_answers(option)]
    assert accepted(answers) > 10
    assert_forgotten(llm)


@pytest.mark.parametrize("dtype", ["int8", "int4"])
@pytest.mark.parametrize("option", ["greedy", "seeded", "seeded, a format"])
def test_answers_are_the_targets_on_packed_weights(option: str, dtype: DType) -> None:
    need_operators()
    draft = load_tiny(noise=0.1, dtype=dtype)
    llm = build_llm("draft_model", target=load_tiny(dtype=dtype), draft=draft, draft_vocab_size=SIZE)
    answers = llm.generate(PROMPTS, OPTIONS[option])
    expected = plain_answers(option, dtype)
    assert [essence(answer) for answer in answers] == [essence(answer) for answer in expected]
    assert accepted(answers) > 10


def test_few_blocks_and_short_steps_change_nothing() -> None:
    """Requests are preempted, and come back with texts that have to be read again."""
    wishes = replace(GREEDY, max_tokens=40)
    expected = build_llm("none", prefix_caching=False).generate(PROMPTS, wishes)
    room: dict[str, Any] = {"num_kv_blocks": 44, "max_num_batched_tokens": 16}
    llm = build_llm("draft_model", draft_vocab_size=SIZE, **room)
    answers = llm.generate(PROMPTS, wishes)
    assert [essence(answer) for answer in answers] == [essence(answer) for answer in expected]
    assert llm.stats.num_preemptions
    assert_forgotten(llm)


def test_a_text_brings_its_own_tokens() -> None:
    """Answers of tokens that were not among the first are drafted once they have been said."""
    outside = tuple((token, 100.0) for token in range(180, 184))
    wishes = replace(GREEDY, max_tokens=40)
    module = tiny_model()
    bias = torch.full((module.config.vocab_size,), -50.0)
    bias[180:184] = 0.0
    likes = wrap_model(with_bias(module, bias), None, name="outside", max_model_len=64)
    llm = build_llm("draft_model", target=likes, draft=likes, draft_vocab_size=SIZE)
    [answer] = llm.generate([(1, 2, 3)], wishes)
    assert set(answer.token_ids) <= {token for token, _ in outside}
    # The first step has nothing to draft right; the others draft four tokens each.
    assert answer.speculation.num_accepted_tokens >= 28


# Of forty tokens five are ever said: of the first sixteen, one that the prompt brings, one that nobody does.
LIVE = (0, 3, 7, 20, 36)
LAW_PROMPT = (3, 20, 0, 7)
TEMPERATURE = 0.8
DEPTH = 3


def with_bias(module: PreTrainedModel, bias: torch.Tensor) -> PreTrainedModel:
    """An output layer that never says some tokens."""
    module.get_output_embeddings().bias = nn.Parameter(bias, requires_grad=False)
    return module


def law_model(noise: float = 0.0, **wishes: Any) -> PreTrainedModel:
    config: dict[str, Any] = {"vocab_size": 40, "num_hidden_layers": 1, "initializer_range": 0.25}
    module = tiny_model(**config, bos_token_id=None, eos_token_id=None, **wishes)
    if noise:
        add_noise(module, noise)
    bias = torch.full((40,), -50.0)
    bias[list(LIVE)] = 0.0
    return with_bias(module, bias)


@cache
def law_models() -> tuple[LoadedModel, LoadedModel]:
    return (
        wrap_model(law_model(), None, name="target", max_model_len=32),
        wrap_model(law_model(0.12), None, name="draft", max_model_len=32),
    )


@cache
def exact_law() -> torch.Tensor:
    """Of the first tokens, each a place in LIVE, from transformers' own passes."""
    module = law_model(attention="sdpa")
    law = torch.zeros([len(LIVE)] * DEPTH, dtype=torch.float64)
    for places in product(range(len(LIVE)), repeat=DEPTH):
        tokens = [LIVE[place] for place in places]
        with torch.inference_mode():
            logits = module(torch.tensor([[*LAW_PROMPT, *tokens]]), use_cache=False).logits[0].double()
        rows = (logits[len(LAW_PROMPT) - 1 : -1] / TEMPERATURE).softmax(dim=-1)
        law[places] = rows.gather(1, torch.tensor(tokens)[:, None]).prod()
    return law.flatten()


@pytest.mark.parametrize(
    ("method", "acceptance"),
    [
        ("draft_model", Acceptance.MATCH),
        ("draft_model", Acceptance.REJECTION),
        ("draft_model", Acceptance.BLOCK),
        ("draft_model 2,1,1", Acceptance.REJECTION),
    ],
)
def test_the_law_is_the_targets(method: str, acceptance: Acceptance) -> None:
    target, draft = law_models()
    room: dict[str, Any] = {"max_num_seqs": 100, "max_num_batched_tokens": 600, "num_kv_blocks": 1000}
    llm = build_llm(method, target=target, draft=draft, draft_vocab_size=16, num_draft_tokens=3, **room)
    params = SamplingParams(
        temperature=TEMPERATURE,
        max_tokens=DEPTH + 1,
        speculation=SpeculationParams(acceptance=acceptance),
    )
    counts = torch.zeros([len(LIVE)] * DEPTH, dtype=torch.float64)
    taken = drafted = 0
    for begin in range(0, 1500, 100):
        wishes = [replace(params, seed=seed) for seed in range(begin, begin + 100)]
        for answer in llm.generate([LAW_PROMPT] * 100, wishes):
            counts[tuple(LIVE.index(token) for token in answer.token_ids[:DEPTH])] += 1
            taken += answer.speculation.num_accepted_tokens
            drafted += answer.speculation.num_draft_tokens
    expected = exact_law() * counts.sum()
    assert float(expected.sum()) == pytest.approx(1500, rel=1e-6)
    often = expected >= 5
    cells = [*zip(counts.flatten()[often].tolist(), expected[often].tolist(), strict=True)]
    cells.append((float(counts.flatten()[~often].sum()), float(expected[~often].sum())))
    statistic = sum((seen - wanted) ** 2 / wanted for seen, wanted in cells)
    assert statistic < threshold(len(cells) - 1)
    # Both verdicts are frequent, so that neither is untested.
    assert 0.2 < taken / drafted < 0.95
