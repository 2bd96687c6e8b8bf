"""Soft cross-entropy of an output layer against sparse targets, without ever holding all its logits.

A batch has more logits than anything else: thousands of rows of a vocabulary. They are made, used and dropped
a few rows at a time, gradient included: with p the target and q the softmax of z = W h,

    loss = sum_v p_v (log sum_u exp z_u - z_v),    d loss / d z_v = q_v sum_u p_u - p_v
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from engine.training.vocabulary import DraftVocabulary

_CHUNK_BYTES = 2**24


@dataclass(frozen=True, slots=True)
class SparseTargets:
    """Distributions over few tokens each.

    Attributes:
        rows: int64 [M, K], rows of the output layer.
        shares: float32 [M, K], their shares; 0 for what does not count.
    """

    rows: torch.Tensor
    shares: torch.Tensor


def sparse_targets(
    top_ids: torch.Tensor, top_logprobs: torch.Tensor, vocabulary: DraftVocabulary | None
) -> SparseTargets:
    """The target's distribution over a draft vocabulary.

    As in EAGLE-3 (Li et al. 2025, and the authors' code) it is the target's own, renormalised over the draft
    vocabulary, and a place whose likeliest token is not in that vocabulary does not count. Of the target's
    distribution the K likeliest tokens are known; the others are left out.

    Args:
        top_ids: int64 [M, K], best first.
        top_logprobs: float32 [M, K].
        vocabulary: None for the target's own.
    """
    rows = top_ids if vocabulary is None else vocabulary.from_target[top_ids]
    shares = top_logprobs.exp() * (rows >= 0)
    shares = shares / shares.sum(dim=-1, keepdim=True).clamp(min=1e-20)
    return SparseTargets(rows.clamp(min=0), shares * (rows[:, :1] >= 0))


def soft_cross_entropy(
    states: torch.Tensor, weight: torch.Tensor, targets: SparseTargets
) -> tuple[torch.Tensor, torch.Tensor]:
    """The sum of the cross-entropies of all rows, and the likeliest row of the output layer for each.

    Args:
        states: [M, H].
        weight: [V, H], the output layer.
        targets: What it is to say.

    Returns:
        The sum (a scalar), and int64 [M] without a gradient.
    """
    if not torch.is_grad_enabled():
        states, weight = states.detach(), weight.detach()
    found = _SoftCrossEntropy.apply(states, weight, targets.rows, targets.shares)  # type: ignore[no-untyped-call]
    loss, best = found
    return loss, best


class _SoftCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, states: torch.Tensor, weight: torch.Tensor, rows: torch.Tensor, shares: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        wants_states, wants_weight = ctx.needs_input_grad[:2]
        to_states = torch.empty_like(states) if wants_states else None
        to_weight = torch.zeros_like(weight) if wants_weight else None
        loss = states.new_zeros(())
        best = torch.empty(len(states), dtype=torch.long, device=states.device)
        step = max(1, _CHUNK_BYTES // (4 * len(weight)))
        for begin in range(0, len(states), step):
            part = slice(begin, begin + step)
            logits = states[part] @ weight.T
            peak, best[part] = logits.max(dim=-1)
            logits -= peak[:, None]
            named = logits.gather(1, rows[part])
            total = logits.exp_().sum(dim=-1, keepdim=True)
            share = shares[part]
            mass = share.sum(dim=-1, keepdim=True)
            loss += (mass * total.log()).sum() - (share * named).sum()
            if to_states is None and to_weight is None:
                continue
            logits *= mass / total
            logits.scatter_add_(1, rows[part], -share)
            if to_states is not None:
                torch.mm(logits, weight, out=to_states[part])
            if to_weight is not None:
                to_weight.addmm_(logits.T, states[part])
        ctx.save_for_backward(to_states, to_weight)
        ctx.mark_non_differentiable(best)
        return loss, best

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor, _: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        to_states, to_weight = ctx.saved_tensors
        scaled = [None if part is None else part.mul_(grad) for part in (to_states, to_weight)]
        return scaled[0], scaled[1], None, None
