"""A model of five tokens: the law of an answer's first three has 125 outcomes, which can be computed exactly.

The law comes from transformers' own forward passes. The noise is a pure function of the seed, so a statistic
over a fixed range of seeds is one fixed number: a test always passes or always fails. A sound engine would
exceed the threshold in one of ten thousand choices of the range.
"""

from functools import cache
from itertools import product
from typing import Any

import torch

from engine.model.loaded_model import LoadedModel
from engine.model.loader import wrap_model
from tests.engines import add_noise
from tests.tiny import tiny_model

VOCAB = 5
CONFIG: dict[str, Any] = {
    "vocab_size": VOCAB,
    "num_hidden_layers": 1,
    "bos_token_id": None,
    "eos_token_id": None,
    "initializer_range": 0.25,
}
PROMPT = (1, 3, 0, 2)
DEPTH = 3
TEMPERATURE = 0.8


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
        rows = (logits[len(PROMPT) - 1 : -1] / TEMPERATURE).softmax(dim=-1)
        law[tokens] = rows.gather(1, torch.tensor(tokens)[:, None]).prod()
    return law.flatten()


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
