"""Writes a finished head: its checkpoint in the published layout, and a model card."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from engine.speculation.heads.eagle import EagleHead
from engine.speculation.heads.medusa import MedusaHeads
from engine.speculation.heads.writing import save_eagle_head, save_medusa_heads
from engine.training.features import Features
from engine.training.settings import TrainSettings
from engine.training.trainer import Evaluation

_NAMES = {"eagle3": "EAGLE-3", "eagle": "EAGLE", "medusa": "Medusa"}
_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


@dataclass(frozen=True, slots=True)
class Provenance:
    """What a head was made from, for its card.

    Attributes:
        answer_tokens: Tokens of answers that were trained on.
        sequences: They are in.
        held_out_sequences: Kept for the evaluation.
        vocabulary: Rows of the draft vocabulary.
        coverage: Share of the answers' tokens that the draft vocabulary has.
    """

    answer_tokens: int
    sequences: int
    held_out_sequences: int
    vocabulary: int
    coverage: float

    @classmethod
    def of(cls, features: Features, vocabulary: int, coverage: float) -> "Provenance":
        """Counts."""
        tokens = sum(row.num_answer_tokens for row in features.train)
        return cls(tokens, len(features.train), len(features.held_out), vocabulary, coverage)


def save_head(
    settings: TrainSettings,
    head: EagleHead | MedusaHeads,
    provenance: Provenance,
    evaluation: Evaluation,
) -> None:
    """Writes config.json, the weights and README.md into the out folder.

    Raises:
        OSError: They cannot be written.
    """
    dtype = _DTYPES[settings.dtype]
    if isinstance(head, EagleHead):
        save_eagle_head(settings.out, head, target=settings.model.model, dtype=dtype)
    else:
        save_medusa_heads(settings.out, head, target=settings.model.model, dtype=dtype)
    card = _card(settings, sum(weight.numel() for weight in head.parameters()), provenance, evaluation)
    (settings.out / "README.md").write_text(card, encoding="utf-8")


def _card(settings: TrainSettings, size: int, provenance: Provenance, evaluation: Evaluation) -> str:
    name, target = _NAMES[settings.method], settings.model.model
    places = " | ".join(str(place) for place in range(1, len(evaluation.rates) + 1))
    rates = " | ".join(f"{rate:.3f}" for rate in evaluation.rates)
    files = [
        path.name
        for path in (*settings.sources.prompts, *settings.sources.generations, *settings.sources.texts)
    ]
    return f"""---
license: apache-2.0
tags: [speculative-decoding, {settings.method}]
---

# {name} head for {target}

Drafts tokens for {target}, which checks them: the text is the target's own.

    outrider serve --model {target} --speculation {settings.method.rstrip("3")} --head .

## Training

    {settings.command or "outrider train-head"}

- Data: {_listed(files)}; {provenance.answer_tokens:,} tokens of answers in
  {provenance.sequences:,} sequences. Of prompts and generations the answers are the target's own.
  {provenance.held_out_sequences:,} more sequences were held out, by prompt.
- {size:,} weights, {settings.dtype}. Draft vocabulary: {provenance.vocabulary:,} tokens, which are
  {provenance.coverage:.2%} of what the answers say.
- {evaluation.step:,} steps, {evaluation.epoch:.2f} epochs, {evaluation.minutes:.0f} minutes.

## Acceptance

Of greedy drafts on held-out prompts, at each place of a chain, given that all before it were right:

| {places} | tokens per forward |
|{"---|" * (len(evaluation.rates) + 1)}
| {rates} | {evaluation.tokens_per_forward:.3f} |

## Licence

Apache-2.0, for the weights of this head. It starts from weights of the target, whose licence applies to them.
"""


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names) or "none"
