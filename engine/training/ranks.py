"""How often each of a head's likeliest tokens is right: what a tree of drafts is built from."""

from collections.abc import Iterable

import torch

from engine.training.packing import Batch
from engine.training.passes import PLAIN, Drafter
from engine.training.vocabulary import DraftVocabulary

_ROWS = 512


@torch.no_grad()
def rank_rates(
    drafter: Drafter, vocabulary: DraftVocabulary, batches: Iterable[Batch], num_heads: int, num_ranks: int
) -> tuple[tuple[float, ...], ...]:
    """Per head how often its best, second best, ... token is the target's choice.

    Args:
        drafter: The heads.
        vocabulary: What their output layer has rows for.
        batches: Of held-out texts.
        num_heads: How many heads.
        num_ranks: How many of each one's tokens are looked at.
    """
    hits = torch.zeros(num_heads, num_ranks)
    counts = torch.zeros(num_heads, 1)
    for batch in batches:
        for head, drafted in enumerate(drafter.passes(batch, num_heads, PLAIN)):
            wanted = batch.top_ids[batch.targets[drafted.roots] + head, 0]
            pairs = zip(torch.split(drafted.states, _ROWS), torch.split(wanted, _ROWS), strict=True)
            for states, ids in pairs:
                best = (states @ drafted.weight.T).topk(num_ranks, dim=-1).indices
                hits[head] += (vocabulary.to_target[best] == ids[:, None]).sum(dim=0).cpu()
                counts[head] += len(ids)
    return tuple(tuple(row) for row in (hits / counts.clamp(min=1)).tolist())
