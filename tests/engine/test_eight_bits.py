"""Engines over keys and values in eight bits, which stand on a CPU here as they would on a GPU.

What they say is what the target says that is served with such a cache: with speculation and without, whatever
shares the step, however often a request has lost its blocks and wherever its prompt's beginning came from.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch

from engine import factory
from engine.config import KVCacheDType
from engine.llm import LLM, Completion
from engine.model import cache_type
from engine.model.attention.tiles import SplitRules
from engine.model.loaded_model import LoadedModel
from engine.model.loader import wrap_model
from engine.speculation import factory as speculation_factory
from tests.engine.answers import assert_clean, essence
from tests.engine.test_lossless import GREEDY, OPTIONS, PROMPTS
from tests.engines import add_noise, build_llm, drafter_of
from tests.tiny import byte_tokenizer, tiny_model

MIXED = [OPTIONS[name] for _ in range(3) for name in ("greedy", "seeded, everything", "greedy, logprobs")][
    : len(PROMPTS)
]


@pytest.fixture(autouse=True)
def anywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Such caches are allowed here, with plain torch to attend over them."""
    monkeypatch.setattr(cache_type, "check_cache_type", lambda wanted, device: None)


@cache
def model(noise: float = 0.0, **config: Any) -> LoadedModel:
    """Without the C++ operators, which no GPU has."""
    module = tiny_model(**config)
    if noise:
        add_noise(module, noise)
    return wrap_model(module, byte_tokenizer(), name="tiny", max_model_len=128)


def build(method: str, wanted: KVCacheDType = "fp8", **room: Any) -> LLM:
    return build_llm(method, target=model(), draft=model(noise=0.1), kv_cache_dtype=wanted, **room)


@cache
def plain_answers(wanted: KVCacheDType = "fp8") -> list[Completion]:
    """Each prompt alone."""
    llm = build_llm("none", target=model(), kv_cache_dtype=wanted, prefix_caching=False)
    pairs = zip(PROMPTS, MIXED, strict=True)
    return [llm.generate([prompt], params)[0] for prompt, params in pairs]


def essences(answers: Sequence[Completion]) -> list[tuple[object, ...]]:
    return [essence(answer) for answer in answers]


def test_it_is_another_model_than_with_wider_ones() -> None:
    """The runs below would also agree if nothing were rounded."""
    logprobs = [[answer.logprobs for answer in plain_answers(wanted)] for wanted in ("fp8", "float32")]
    assert logprobs[0] != logprobs[1]


@pytest.mark.parametrize(
    "method",
    [
        *("none", "ngram", "suffix", "draft_model", "draft_model 3,2,1,1"),
        *("eagle", "eagle3 3,2,1,1", "medusa sequoia"),
    ],
)
def test_the_tokens_are_the_same(method: str) -> None:
    """In chunks and preempted, batched, then alone behind cached prefixes."""
    expected = essences(plain_answers())
    tight = build(method, num_kv_blocks=33, max_num_batched_tokens=17)
    core = tight.core
    taken = []
    core.take_stats, take = lambda: taken.append(take()) or taken[-1], core.take_stats  # type: ignore
    assert essences(tight.generate(PROMPTS, MIXED)) == expected
    assert sum(stats.num_preemptions for stats in taken) > 0
    roomy = build(method)
    batched = roomy.generate(PROMPTS, MIXED)
    assert essences(batched) == expected
    # The first three have an option each; one at a time, what else is asked makes no difference.
    alone = [roomy.generate([PROMPTS[place]], MIXED[place])[0] for place in range(3)]
    assert essences(alone) == expected[:3]
    assert sum(answer.num_cached_tokens for answer in alone) > 0
    if method != "none":
        assert sum(answer.speculation.num_accepted_tokens for answer in batched) > 10
    for llm in (tight, roomy):
        assert_clean(llm)


@pytest.mark.parametrize("method", ["draft_model", "eagle3"])
def test_drafts_have_such_a_cache_too(method: str) -> None:
    llm = build(method)
    runner = drafter_of(llm).speculator._runner  # type: ignore[attr-defined]
    assert runner.cache.dtype == torch.float8_e4m3fn
    assert llm.core._runner.cache.dtype == torch.float8_e4m3fn


@pytest.mark.parametrize(
    ("method", "num_layers", "least_accepted"), [("draft_model 2,1", 1, 1), ("eagle3 2,1", 2, 0)]
)
def test_the_kernels_say_the_same_with_speculation_and_without(
    method: str, num_layers: int, least_accepted: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In Triton's interpreter; and what plain torch says. The head guesses at random over this target."""
    pytest.importorskip("triton", reason="triton is not installed; it comes for Linux on x86-64 alone")
    from engine.model.attention.triton import TritonAttention

    sizes = {"num_hidden_layers": num_layers, "num_attention_heads": 2, "num_key_value_heads": 1}
    target, draft = model(**sizes), model(noise=0.05, **sizes)

    def generate(method: str) -> list[Completion]:
        llm = build_llm(method, target=target, draft=draft, kv_cache_dtype="fp8")
        assert llm.core._runner.cache.dtype == torch.float8_e4m3fn
        return llm.generate(["abcab"], replace(GREEDY, max_tokens=7))

    expected = essences(generate("none"))
    backend = TritonAttention(SplitRules(wanted_programs=1, min_slots=16))
    for module in (factory, speculation_factory):
        monkeypatch.setattr(module, "choose_backend", lambda *_, records: backend)
    assert essences(generate("none")) == expected
    drafted = generate(method)
    assert essences(drafted) == expected
    assert drafted[0].speculation.num_draft_tokens > 10
    assert drafted[0].speculation.num_accepted_tokens >= least_accepted
