"""Which token each row of logits comes to: the likeliest, or the likeliest under its noise."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from engine.sampling.logits import RowOperators, chunks, truncation
from engine.sampling.noise import NoiseKey, gumbel_noise, noise_start, noise_starts
from engine.sampling.uploading import upload
from engine.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True)
class Choice:
    """A token that is to be chosen.

    Attributes:
        row: From which row of the logits.
        params: The sampling parameters of its request.
        key: The key of its noise; None takes the most likely token.
    """

    row: int
    params: SamplingParams
    key: NoiseKey | None


def choose_at_once(adjusted: torch.Tensor, choices: Sequence[Choice], operators: RowOperators) -> list[int]:
    """The tokens that `choose_tokens` finds in processed rows, without these ever being written.

    Args:
        adjusted: Logits from `adjust_logits`, [num_rows, vocab_size].
        choices: What is wanted.
        operators: What to do it with.
    """
    options = [option for choice in choices for option in truncation(choice.params)]
    starts = [0 if choice.key is None else noise_start(choice.key) for choice in choices]
    tokens: list[int] = operators.choose_rows(adjusted, [choice.row for choice in choices], options, starts)
    return tokens


def choose_tokens(
    processed: torch.Tensor, keys: Sequence[NoiseKey | None], operators: RowOperators | None = None
) -> torch.Tensor:
    """The token of each row: argmax(log p + Gumbel noise), or the most likely one.

    Args:
        processed: Logits from `process_logits`, [num_rows, vocab_size].
        keys: Per row the key of its noise; None takes the most likely token, the lowest id among equals.
        operators: What to do it with; None takes plain torch.

    Returns:
        int64 [num_rows].
    """
    if all(key is None for key in keys):
        return processed.argmax(dim=-1) if operators is None else _likeliest(processed)
    if operators is not None:
        return _choose_with(operators, processed, keys)
    vocab_size = processed.shape[1]
    tokens: list[torch.Tensor] = []
    for chunk in chunks(range(len(keys)), vocab_size):
        scores = processed[chunk[0] : chunk[-1] + 1].to(torch.float64)
        noisy = [(place, key) for place, row in enumerate(chunk) if (key := keys[row]) is not None]
        noise = gumbel_noise([key for _, key in noisy], vocab_size, processed.device)
        if len(noisy) == len(chunk):
            scores += noise
        else:
            index = upload([place for place, _ in noisy], torch.int64, processed.device)
            scores.index_add_(0, index, noise)
        tokens.append(scores.argmax(dim=-1))
    return torch.cat(tokens)


def _choose_with(
    operators: RowOperators, processed: torch.Tensor, keys: Sequence[NoiseKey | None]
) -> torch.Tensor:
    tokens = processed.new_empty(len(keys), dtype=torch.int64)
    noisy = [row for row, key in enumerate(keys) if key is not None]
    starts = noise_starts([key for key in keys if key is not None], processed.device)
    if len(noisy) == len(keys):
        chosen: torch.Tensor = operators.top_rows(processed, starts, 1)[0][:, 0]
        return chosen
    plain = [row for row, key in enumerate(keys) if key is None]
    tokens[noisy] = operators.top_rows(processed[noisy], starts, 1)[0][:, 0]
    tokens[plain] = _likeliest(processed[plain])
    return tokens


def _likeliest(processed: torch.Tensor) -> torch.Tensor:
    """What argmax says, of rows on a CPU.

    NumPy looks at several entries at a time and torch at one: eight rows of 49,152 take 32 µs and 382.
    """
    return torch.from_numpy(processed.numpy().argmax(axis=-1))
