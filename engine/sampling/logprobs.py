"""Log probabilities as they are reported: the model's own, before any sampling option acts."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from engine.sampling.logits import chunks
from engine.sampling.uploading import upload


@dataclass(frozen=True, slots=True)
class RowLogprobs:
    """What one row says of the token that followed.

    Attributes:
        token_id: The token.
        logprob: Natural logarithm of its probability.
        top: (token id, logprob) of the most likely tokens, most likely first, the lowest id among equals.
        rank: The token's place in that order, from 1, if it was asked for.
    """

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...]
    rank: int | None = None


def row_logprobs(logits: torch.Tensor, token_ids: Sequence[int], num_top: int) -> list[RowLogprobs]:
    """Log probabilities of given tokens, and the best alternatives.

    Args:
        logits: float32 [num_rows, vocab_size], raw.
        token_ids: The token that followed each row.
        num_top: Alternatives per row; 0 for none.

    Raises:
        ValueError: Rows and tokens differ in number.
    """
    if logits.shape[0] != len(token_ids):
        raise ValueError(f"logits have {logits.shape[0]} rows for {len(token_ids)} tokens")
    results: list[RowLogprobs] = []
    for chunk in chunks(range(len(token_ids)), logits.shape[1]):
        logprobs = logits[chunk[0] : chunk[-1] + 1].log_softmax(dim=-1)
        tokens = [token_ids[row] for row in chunk]
        columns = upload(tokens, torch.int64, logits.device)[:, None]
        chosen = logprobs.gather(1, columns)[:, 0].tolist()
        tops = _top(logprobs, min(num_top, logits.shape[1]))
        results.extend(map(RowLogprobs, tokens, chosen, tops))
    return results


def ranked(rows: Sequence[RowLogprobs], logits: torch.Tensor) -> list[RowLogprobs]:
    """The same with the rank of each token.

    Args:
        rows: What `row_logprobs` says of the logits.
        logits: float32 [num_rows, vocab_size], raw.
    """
    ranks: list[int] = []
    for chunk in chunks(range(len(rows)), logits.shape[1]):
        scores = logits[chunk[0] : chunk[-1] + 1]
        tokens = upload([rows[row].token_id for row in chunk], torch.int64, logits.device)[:, None]
        own = scores.gather(1, tokens)
        ids = torch.arange(logits.shape[1], device=logits.device)
        before = (scores > own) | ((scores == own) & (ids < tokens))
        ranks += (1 + before.sum(dim=-1)).tolist()
    return [replace(row, rank=rank) for row, rank in zip(rows, ranks, strict=True)]


def _top(logprobs: torch.Tensor, num_top: int) -> list[tuple[tuple[int, float], ...]]:
    if num_top == 0:
        return [()] * len(logprobs)
    # topk leaves open which of several equal values it takes, so all that reach the last one are looked at.
    border = logprobs.topk(num_top, dim=-1).values[:, -1:]
    index = (logprobs >= border).nonzero()
    found: list[list[tuple[int, float]]] = [[] for _ in range(len(logprobs))]
    values = logprobs[index[:, 0], index[:, 1]].tolist()
    for (row, token), value in zip(index.tolist(), values, strict=True):
        found[row].append((token, value))
    # Ids come in ascending order, and sorting keeps it among equals.
    return [tuple(sorted(row, key=lambda entry: -entry[1])[:num_top]) for row in found]
