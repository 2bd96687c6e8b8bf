"""A target whose answer is written down beforehand: engines run all their own parts around it."""

from collections.abc import Sequence

import torch

from engine.llm import LLM
from engine.model.input_batch import InputBatch

CERTAIN = 50.0


def force(llm: LLM, prompt: Sequence[int], answer: Sequence[int], end: int) -> list[int]:
    """Makes the model say `answer` behind `prompt`, then `end`, whatever it is drafted or asked.

    Returns:
        The tokens of each pass from here on, as they come.
    """
    runner = llm.core._runner
    said = [*answer, end]
    sizes: list[int] = []

    def forward(batch: InputBatch) -> torch.Tensor:
        sizes.append(len(batch.input_ids))
        places = batch.positions[batch.logits_rows] - (len(prompt) - 1)
        tokens = torch.tensor(said)[places.clamp(0, len(said) - 1)]
        rows = torch.zeros(len(tokens), runner.vocab_size)
        return rows.scatter_(1, tokens[:, None], CERTAIN)

    runner.forward = forward  # type: ignore[method-assign]
    return sizes
