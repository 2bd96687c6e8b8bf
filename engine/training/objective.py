"""What is made small in training, and what is counted in evaluation."""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch.nn import functional

from engine.training.packing import Batch
from engine.training.passes import PLAIN, Drafted, Drafter, Sampling
from engine.training.soft_loss import SparseTargets, soft_cross_entropy, sparse_targets
from engine.training.vocabulary import DraftVocabulary

DECAY = 0.8
"""Weight of each pass, or Medusa head, in those of the one before."""


@dataclass(frozen=True, slots=True)
class Weights:
    """Of the parts of the loss.

    Attributes:
        tokens: Of the cross-entropy against the target's distribution.
        features: Of the smooth L1 distance to the target's last state.
    """

    tokens: float = 1.0
    features: float = 0.0


@dataclass(frozen=True, slots=True)
class Loss:
    """Of one batch.

    Attributes:
        total: A scalar with a gradient.
        per_pass: Mean cross-entropy of each pass.
        accuracy: Of each pass, how often its likeliest token is the target's.
    """

    total: torch.Tensor
    per_pass: tuple[float, ...]
    accuracy: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Acceptance:
    """Greedy acceptance of chains, counted.

    Attributes:
        right: Drafts at each place of the chain that are the target's choice.
        tried: Drafts at each place whose predecessors were all right, and where the text went on with them.
        loss: Sum of the cross-entropies of first drafts.
        counted: How many those are.
    """

    right: tuple[int, ...]
    tried: tuple[int, ...]
    loss: float
    counted: int

    @property
    def rates(self) -> tuple[float, ...]:
        """Acceptance at each place of the chain, given that all before it were right."""
        return tuple(right / max(1, tried) for right, tried in zip(self.right, self.tried, strict=True))

    @property
    def tokens_per_forward(self) -> float:
        """Tokens that a pass of the target yields with such a chain, its own included."""
        total, share = 1.0, 1.0
        for rate in self.rates:
            share *= rate
            total += share
        return total

    @property
    def mean_loss(self) -> float:
        """Of first drafts."""
        return self.loss / max(1, self.counted)


def total(parts: Iterable[Acceptance]) -> Acceptance:
    """Counts of several batches together."""
    counts = list(parts)
    return Acceptance(
        right=tuple(map(sum, zip(*(part.right for part in counts), strict=True))),
        tried=tuple(map(sum, zip(*(part.tried for part in counts), strict=True))),
        loss=sum(part.loss for part in counts),
        counted=sum(part.counted for part in counts),
    )


class Objective:
    """Loss and acceptance of a head.

    Args:
        drafter: The head.
        vocabulary: What its output layer has rows for; None for the target's whole vocabulary.
        weights: Of the parts of the loss.
    """

    def __init__(self, drafter: Drafter, vocabulary: DraftVocabulary | None, weights: Weights) -> None:
        self.drafter = drafter
        self._vocabulary = vocabulary
        self._weights = weights

    def loss(self, batch: Batch, num_passes: int, sampling: Sampling) -> Loss:
        """The loss of a batch: the passes' means, each weighted 0.8 times the one before."""
        whole = torch.zeros((), device=batch.hidden.device)
        per_pass, accuracy = [], []
        for depth, drafted in enumerate(self.drafter.passes(batch, num_passes, sampling)):
            targets = self._targets(batch, drafted, depth)
            counts = targets.shares.sum(dim=-1) > 0.5
            number = int(counts.sum())
            summed, best = soft_cross_entropy(drafted.states, drafted.weight, targets)
            mean = summed / max(1, number)
            whole = whole + DECAY**depth * self._weights.tokens * mean
            if drafted.features is not None and self._weights.features:
                aim = batch.hidden[batch.roots[drafted.roots] + 1 + depth, -drafted.features.shape[-1] :]
                distance = functional.smooth_l1_loss(drafted.features, aim)
                whole = whole + DECAY**depth * self._weights.features * distance
            per_pass.append(float(mean.detach()))
            right = (best == targets.rows[:, 0]) & counts
            accuracy.append(int(right.sum()) / max(1, len(right)))
        return Loss(whole, tuple(per_pass), tuple(accuracy))

    @torch.no_grad()
    def acceptance(self, batch: Batch, length: int) -> Acceptance:
        """Greedy acceptance of a chain of drafts from every root of a batch."""
        alive = torch.ones(len(batch.roots), dtype=torch.bool, device=batch.roots.device)
        right, tried = [0] * length, [0] * length
        loss, counted = 0.0, 0
        for depth, drafted in enumerate(self.drafter.passes(batch, length, PLAIN)):
            targets = self._targets(batch, drafted, depth)
            summed, best = soft_cross_entropy(drafted.states, drafted.weight, targets)
            if depth == 0:
                loss, counted = float(summed), int((targets.shares.sum(dim=-1) > 0.5).sum())
            chosen = best if self._vocabulary is None else self._vocabulary.to_target[best]
            wanted = batch.top_ids[batch.targets[drafted.roots] + depth, 0]
            tries = alive[drafted.roots]
            hits = tries & (chosen == wanted)
            right[depth], tried[depth] = int(hits.sum()), int(tries.sum())
            said = batch.token_ids[batch.roots[drafted.roots] + 2 + depth]
            alive = torch.zeros_like(alive)
            # Where the text, being drawn, parts from the likeliest token, nobody knows what would come next.
            alive[drafted.roots] = hits & (said == wanted)
        return Acceptance(tuple(right), tuple(tried), loss, counted)

    def _targets(self, batch: Batch, drafted: Drafted, depth: int) -> SparseTargets:
        places = batch.targets[drafted.roots] + depth
        return sparse_targets(batch.top_ids[places], batch.top_logprobs[places], self._vocabulary)
