"""The ratio rule through the whole engine: the law of an answer's first tokens is the target's own.

Five tokens, so that the law of the first three has 125 outcomes, computed exactly from transformers' own
forward passes. The noise is a pure function of the seed, so the statistic over a fixed range of seeds is one
fixed number: the test always passes or always fails. A sound engine would exceed the threshold in one of
ten thousand choices of the range.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from itertools import product
from typing import Any

import pytest
import torch

from engine.engine_core import EngineCore
from engine.model.loaded_model import LoadedModel
from engine.model.loader import wrap_model
from engine.sampling_params import Acceptance, SamplingParams, SpeculationParams
from engine.speculation.base import ProposalContext, Requirements, Speculator
from engine.token_tree import EMPTY_TREE, TokenTree
from tests.engines import add_noise, build_llm
from tests.tiny import tiny_model

VOCAB = 5
CONFIG: dict[str, Any] = {
    "vocab_size": VOCAB,
    "bos_token_id": None,
    "eos_token_id": None,
    "initializer_range": 0.25,
}
PROMPT = (1, 3, 0, 2)
DEPTH = 3
NUM_SEEDS = 3000
WISHES = SamplingParams(
    temperature=0.8,
    # Room for one more token, so that tokens 2 and 3 are both drafted in the step after the prompt's.
    max_tokens=DEPTH + 1,
    speculation=SpeculationParams(acceptance=Acceptance.REJECTION),
)
Wrap = Callable[[Speculator], Speculator]


@cache
def models() -> tuple[LoadedModel, LoadedModel]:
    """The target, and a draft that is often but not always of its opinion."""
    module = tiny_model(**CONFIG)
    draft = tiny_model(**CONFIG)
    add_noise(draft, 0.12)
    return (
        wrap_model(module, None, name="target", max_model_len=32),
        wrap_model(draft, None, name="draft", max_model_len=32),
    )


@cache
def exact_law() -> torch.Tensor:
    """The law of the first DEPTH tokens, [VOCAB ** DEPTH], from full forward passes without our attention."""
    module = tiny_model(attention="sdpa", **CONFIG)
    law = torch.zeros([VOCAB] * DEPTH, dtype=torch.float64)
    for tokens in product(range(VOCAB), repeat=DEPTH):
        with torch.inference_mode():
            logits = module(torch.tensor([[*PROMPT, *tokens]]), use_cache=False).logits[0].double()
        rows = (logits[len(PROMPT) - 1 : -1] / WISHES.temperature).softmax(dim=-1)
        law[tokens] = rows.gather(1, torch.tensor(tokens)[:, None]).prod()
    return law.flatten()


def sampled(
    params: SamplingParams,
    wrap: Wrap | None = None,
    *,
    method: str = "draft_model",
    num_seeds: int = NUM_SEEDS,
) -> tuple[torch.Tensor, float]:
    """How often each outcome came over all seeds, and the share of draft tokens accepted."""
    target, draft = models()
    llm = build_llm(
        method,
        target=target,
        draft=draft,
        num_draft_tokens=3,
        max_num_seqs=100,
        max_num_batched_tokens=500,
        num_kv_blocks=1000,
    )
    if wrap is not None:
        _wrap(llm._core, wrap)
    counts = torch.zeros([VOCAB] * DEPTH, dtype=torch.float64)
    drafted = accepted = 0
    for begin in range(0, num_seeds, 100):
        wishes = [replace(params, seed=seed) for seed in range(begin, begin + 100)]
        for answer in llm.generate([PROMPT] * 100, wishes):
            counts[tuple(answer.token_ids[:DEPTH])] += 1
            drafted += answer.speculation.num_draft_tokens
            accepted += answer.speculation.num_accepted_tokens
    return counts.flatten(), accepted / max(drafted, 1)


def _wrap(core: EngineCore, wrap: Wrap) -> None:
    assert core._drafting is not None
    core._drafting._speculator = wrap(core._drafting._speculator)


def excess(counts: torch.Tensor) -> float:
    """The chi-square statistic over its threshold; rare outcomes are counted together."""
    expected = exact_law() * counts.sum()
    rare = expected < 5
    cells = [*zip(counts[~rare].tolist(), expected[~rare].tolist(), strict=True)]
    if bool(rare.any()):
        cells.append((float(counts[rare].sum()), float(expected[rare].sum())))
    statistic: float = sum((seen - wanted) ** 2 / wanted for seen, wanted in cells)
    return statistic / threshold(len(cells) - 1)


def threshold(degrees: int) -> float:
    """Exceeded with a probability of 1e-4 (Wilson and Hilferty 1931; 3.719 is the normal quantile)."""
    share = 2 / (9 * degrees)
    return float(degrees * (1 - share + 3.719 * share**0.5) ** 3)


class Tampering:
    """A drafter that says something else than it did."""

    def __init__(self, inner: Speculator, tamper: Callable[[TokenTree], TokenTree]) -> None:
        self._inner = inner
        self._tamper = tamper

    @property
    def requirements(self) -> Requirements:
        return self._inner.requirements

    def propose(self, context: ProposalContext) -> list[TokenTree]:
        return [tree if tree == EMPTY_TREE else self._tamper(tree) for tree in self._inner.propose(context)]

    def num_computed_tokens(self, request_id: str) -> int:
        return self._inner.num_computed_tokens(request_id)

    def release(self, request_id: str) -> None:
        self._inner.release(request_id)


def test_the_threshold_is_that_of_the_tables() -> None:
    assert threshold(10) == pytest.approx(35.56, rel=0.02)
    assert threshold(100) == pytest.approx(161.3, rel=0.02)
    assert float(exact_law().sum()) == pytest.approx(1.0, abs=1e-9)


@pytest.mark.parametrize("rule", Acceptance)
def test_the_law_is_the_targets(rule: Acceptance) -> None:
    counts, rate = sampled(replace(WISHES, speculation=SpeculationParams(acceptance=rule)))
    assert excess(counts) < 1
    # Both verdicts are frequent, so that neither is untested.
    assert 0.3 < rate < 0.95


def test_the_plain_law_is_the_targets() -> None:
    counts, rate = sampled(WISHES, method="none")
    assert excess(counts) < 1
    assert rate == 0


def claiming(change: Callable[[torch.Tensor], torch.Tensor]) -> Wrap:
    def tamper(tree: TokenTree) -> TokenTree:
        claimed = [change(q) for q in tree.distributions if isinstance(q, torch.Tensor)]
        return TokenTree.chain(tree.tokens, tree.proposal, claimed)

    return lambda inner: Tampering(inner, tamper)


def likeliest(tree: TokenTree) -> TokenTree:
    """The draft's most likely tokens, with the claim that they were drawn."""
    tokens = [int(q.argmax()) for q in tree.distributions if isinstance(q, torch.Tensor)]
    return TokenTree.chain(tokens, tree.proposal, tree.distributions)


ERRORS: dict[str, Wrap] = {
    "drawn from the draft, said to be uniform": claiming(lambda q: torch.full_like(q, 1 / VOCAB)),
    "drawn from the draft, said to be colder": claiming(lambda q: (q * q) / (q * q).sum()),
    "the most likely token, said to be drawn": lambda inner: Tampering(inner, likeliest),
}


@pytest.mark.parametrize("wrap", ERRORS.values(), ids=ERRORS.keys())
def test_a_false_claim_of_how_a_token_was_drawn_shows(wrap: Wrap) -> None:
    counts, _ = sampled(WISHES, wrap, num_seeds=1500)
    assert excess(counts) > 2
