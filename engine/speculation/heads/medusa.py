"""Medusa heads (Cai et al. 2024): each guesses a later token from the target's last state alone."""

import torch
from torch import nn

from engine.speculation.heads.config import MedusaConfig
from engine.speculation.heads.eagle import LmHead


class ResidualBlock(nn.Module):
    """x + SiLU(W x + b).

    Args:
        size: Width.
        bias: Whether there is a b.
    """

    def __init__(self, size: int, *, bias: bool = True) -> None:
        super().__init__()
        self.linear = nn.Linear(size, size, bias=bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., size], both ways."""
        return x + nn.functional.silu(self.linear(x))


class MedusaHeads(nn.Module):
    """All heads of a target.

    Args:
        config: What they are made of.

    Attributes:
        draft_to_target: int64 [draft_vocab_size], the target's id of each row of the logits; None where the
            rows are the target's ids.
        blocks: Residual blocks, [num_heads][num_layers].
        lm_heads: Output layers: one per head, one for all, or none where the target's is meant.
    """

    draft_to_target: torch.Tensor | None

    def __init__(self, config: MedusaConfig) -> None:
        super().__init__()
        self.config = config
        rows = config.draft_vocab_size
        ids = None if rows is None or rows == config.vocab_size else torch.arange(rows)
        self.register_buffer("draft_to_target", ids, persistent=False)
        self.blocks = nn.ModuleList(
            nn.Sequential(
                *(ResidualBlock(config.hidden_size, bias=config.block_bias) for _ in range(config.num_layers))
            )
            for _ in range(config.num_heads)
        )
        count = 1 if config.shared_lm_head else config.num_heads
        self.lm_heads = nn.ModuleList(
            [] if rows is None else [nn.Linear(config.hidden_size, rows, bias=False) for _ in range(count)]
        )

    def states(self, hidden: torch.Tensor) -> list[torch.Tensor]:
        """What each head's output layer reads.

        Args:
            hidden: [..., hidden_size], the target's state after its final norm.

        Returns:
            Per head [..., hidden_size].
        """
        return [blocks(hidden) for blocks in self.blocks]

    def forward(self, hidden: torch.Tensor, target_lm_head: LmHead) -> torch.Tensor:
        """Scores of the tokens after the next.

        Args:
            hidden: [..., hidden_size], the target's state after its final norm.
            target_lm_head: The target's output layer, used where the heads have none of their own.

        Returns:
            [num_heads, ..., draft_vocab_size], or the target's vocab_size. Where lm_head scores the token of
            position p, row i of this scores that of position p + 1 + i.
        """
        states = self.states(hidden)
        own = list(self.lm_heads)
        if len(own) == len(states):
            return torch.stack([lm_head(state) for lm_head, state in zip(own, states, strict=True)])
        lm_head = own[0] if own else target_lm_head
        scores: torch.Tensor = lm_head(torch.stack(states))
        return scores
