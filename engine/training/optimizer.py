"""AdamW for heads: what decays, and what learns how fast."""

from typing import Any

import torch
from torch import nn

from engine.training.schedule import Schedule

_BETAS = (0.9, 0.95)
_OUTPUT = "lm_head.weight"


def make_optimizer(head: nn.Module, schedule: Schedule) -> torch.optim.AdamW:
    """AdamW over a head's weights; norms and biases do not decay, and an output layer may learn slower.

    Args:
        head: Its parameters; an output layer that is not to learn is frozen here.
        schedule: How it is trained.
    """
    weights = dict(head.named_parameters())
    slow: list[nn.Parameter] = []
    if schedule.output_rate != 1.0 and _OUTPUT in weights:
        slow = [weights.pop(_OUTPUT)]
    groups: list[dict[str, Any]] = [
        {"params": [weight for weight in weights.values() if weight.dim() > 1], "share": 1.0},
        {"params": [weight for weight in weights.values() if weight.dim() <= 1], "share": 1.0},
    ]
    groups[1]["weight_decay"] = 0.0
    if slow and schedule.output_rate:
        groups.append({"params": slow, "share": schedule.output_rate})
    for weight in slow:
        weight.requires_grad_(schedule.output_rate > 0)
    return torch.optim.AdamW(
        groups, lr=schedule.learning_rate, betas=_BETAS, weight_decay=schedule.weight_decay, fused=True
    )


def set_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Sets the learning rate, of each group its share."""
    for group in optimizer.param_groups:
        group["lr"] = rate * group.get("share", 1.0)
