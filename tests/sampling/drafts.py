"""A draft model's draws, one token per row."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from engine.sampling.choosing import choose_tokens
from engine.sampling.noise import NoiseKey, Stream


@dataclass(frozen=True, slots=True)
class DraftToken:
    """A token that a draft model drew.

    Attributes:
        token_id: The token.
        distribution: What it was drawn from, float32 [vocab_size], if it was drawn with the DRAFT stream.
    """

    token_id: int
    distribution: torch.Tensor | None


def draw_tokens(processed: torch.Tensor, keys: Sequence[NoiseKey | None]) -> list[DraftToken]:
    """Draws a draft model's next tokens.

    Keys of the TARGET stream couple the draft to the target's own noise (Daliri et al. 2024), which makes the
    two agree most often under the match rule. Keys of the DRAFT stream are independent of it, as the
    rejection rule demands.

    Args:
        processed: The draft's logits after `process_logits`, [num_rows, vocab_size].
        keys: Per row the key of its noise, from `RowGroup.noise_keys`; None takes the most likely token.
    """
    token_ids = choose_tokens(processed, keys).tolist()
    return [
        DraftToken(token, row.softmax(dim=-1) if key is not None and key.stream is Stream.DRAFT else None)
        for token, row, key in zip(token_ids, processed, keys, strict=True)
    ]
