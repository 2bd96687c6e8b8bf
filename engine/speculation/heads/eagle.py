"""EAGLE heads: small decoders that read the target's hidden states (Li et al. 2024, 2025).

Slot p of a head holds the embedding of token p and the target's feature of position p - 1, and predicts token
p + 1. So what it holds of a text depends on that text alone, and a block of it can be shared like a target's:

    slot            1         2         3         4
    embedding of    t1        t2        t3        t4
    feature of      t0        t1        t2        t3      ◀─ fuse(the target's hidden states)
    predicts        t2        t3        t4        t5

Drafting goes on from there: token t5 with what `carried` makes of slot 4's output in the feature's place.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable

import torch
from torch import nn

from engine.speculation.heads.config import EagleConfig
from engine.speculation.heads.layers import Attend, DecoderLayer, JoiningLayer, Rotary, norm

LmHead = Callable[[torch.Tensor], torch.Tensor]


class EagleHead(nn.Module, ABC):
    """What the versions of EAGLE have in common. Parameters bear the names of the published checkpoints.

    Args:
        config: What it is made of.

    Attributes:
        draft_to_target: int64 [draft_vocab_size], the target's id of each row of the logits; None where the
            rows are the target's ids. A new head with a smaller vocabulary starts with the first ids.
        embed_tokens: The head's own embeddings; None where the target's are meant.
        lm_head: The head's own output layer; None where the target's is meant, or embed_tokens is it.
    """

    draft_to_target: torch.Tensor | None

    def __init__(self, config: EagleConfig) -> None:
        super().__init__()
        self.config = config
        rows = config.draft_vocab_size
        ids = None if rows is None or rows == config.vocab_size else torch.arange(rows)
        self.register_buffer("draft_to_target", ids, persistent=False)
        self.embed_tokens = (
            nn.Embedding(config.vocab_size, config.hidden_size) if config.own_embeddings else None
        )
        self.lm_head = None if rows is None else nn.Linear(config.hidden_size, rows, bias=False)
        self.rotary = Rotary(config)

    @abstractmethod
    def fuse(self, features: torch.Tensor) -> torch.Tensor:
        """What takes the place of `hidden` in a pass that starts from the target.

        Args:
            features: [..., num_features * target_hidden_size], in the order of the config's features.

        Returns:
            [..., hidden_size].
        """

    @abstractmethod
    def forward(
        self, embeddings: torch.Tensor, hidden: torch.Tensor, positions: torch.Tensor, attend: Attend
    ) -> torch.Tensor:
        """One pass.

        Args:
            embeddings: [B, T, hidden_size], of the tokens.
            hidden: [B, T, hidden_size], what `fuse` or `carried` returned for the token before each.
            positions: int64 [B, T].
            attend: See Attend; called once for each layer, in order.

        Returns:
            [B, T, hidden_size], for `logits` and `carried`.
        """

    @abstractmethod
    def normed(self, out: torch.Tensor) -> torch.Tensor:
        """What an lm_head reads of a pass's output, [..., hidden_size] both ways."""

    @abstractmethod
    def carried(self, out: torch.Tensor) -> torch.Tensor:
        """What the next pass gets as `hidden` of a pass's output, [..., hidden_size] both ways."""

    def logits(self, out: torch.Tensor, target_lm_head: LmHead) -> torch.Tensor:
        """Scores of the next token.

        Args:
            out: [..., hidden_size], what `forward` returned.
            target_lm_head: The target's output layer, with all that the target does to its logits; used
                where the head has none of its own.

        Returns:
            [..., draft_vocab_size], or the target's [..., vocab_size]. Row r stands for the target's id
            `draft_to_target[r]`.
        """
        state = self.normed(out)
        if self.lm_head is not None:
            scores: torch.Tensor = self.lm_head(state)
            return scores
        if self.config.tied_lm_head and self.embed_tokens is not None:
            return nn.functional.linear(state, self.embed_tokens.weight)
        return target_lm_head(state)


class Eagle1Head(EagleHead):
    """EAGLE-1 and 2, which share their weights: fc joins embedding and feature, the target's lm_head reads.

    Args:
        config: What it is made of; its family is "eagle".
    """

    def __init__(self, config: EagleConfig) -> None:
        super().__init__(config)
        size = config.hidden_size
        self.embedding_layernorm = norm(size, config) if config.embedding_norm else None
        self.hidden_states_layernorm = norm(size, config) if config.hidden_norm else None
        self.fc = nn.Linear(2 * size, size, bias=config.fc_bias)
        self.layers = nn.ModuleList(
            DecoderLayer(config, index, norms_input=index > 0 or config.input_norm)
            for index in range(config.num_layers)
        )
        self.pre_lm_head_layernorm = norm(size, config) if config.output_norm else None

    def fuse(self, features: torch.Tensor) -> torch.Tensor:
        """See EagleHead: the target's last state as it is."""
        return features

    def forward(
        self, embeddings: torch.Tensor, hidden: torch.Tensor, positions: torch.Tensor, attend: Attend
    ) -> torch.Tensor:
        """See EagleHead."""
        if self.embedding_layernorm is not None:
            embeddings = self.embedding_layernorm(embeddings)
        if self.hidden_states_layernorm is not None:
            hidden = self.hidden_states_layernorm(hidden)
        x: torch.Tensor = self.fc(torch.cat((embeddings, hidden), dim=-1))
        rotation = self.rotary(x, positions)
        for layer in self.layers:
            x = layer(x, rotation, attend)
        return x

    def normed(self, out: torch.Tensor) -> torch.Tensor:
        """See EagleHead: the output imitates the target's state after its final norm."""
        if self.pre_lm_head_layernorm is None:
            return out
        state: torch.Tensor = self.pre_lm_head_layernorm(out)
        return state

    def carried(self, out: torch.Tensor) -> torch.Tensor:
        """See EagleHead."""
        return out


class Eagle3Head(EagleHead):
    """EAGLE-3: fc fuses states of several layers, the first layer joins them with the embedding.

    Args:
        config: What it is made of; its family is "eagle3".
    """

    def __init__(self, config: EagleConfig) -> None:
        super().__init__(config)
        size, target = config.hidden_size, config.target_hidden_size
        width = config.num_features * target
        self.input_norm = norm(width, config) if config.norm_before_fc else None
        self.fc_norm = (
            nn.ModuleList(norm(target, config) for _ in range(config.num_features))
            if config.fc_norm
            else None
        )
        self.fc = nn.Linear(width, size, bias=config.fc_bias) if config.has_fc else None
        self.layers = nn.ModuleList(
            [JoiningLayer(config), *(DecoderLayer(config, index) for index in range(1, config.num_layers))]
        )
        self.norm = norm(size, config)

    def fuse(self, features: torch.Tensor) -> torch.Tensor:
        """See EagleHead."""
        if self.input_norm is not None:
            features = self.input_norm(features)
        if self.fc_norm is not None:
            parts = features.chunk(self.config.num_features, dim=-1)
            features = torch.cat([each(part) for each, part in zip(self.fc_norm, parts, strict=True)], dim=-1)
        if self.fc is not None:
            features = self.fc(features)
        return features

    def forward(
        self, embeddings: torch.Tensor, hidden: torch.Tensor, positions: torch.Tensor, attend: Attend
    ) -> torch.Tensor:
        """See EagleHead."""
        rotation = self.rotary(hidden, positions)
        first, *others = self.layers
        x: torch.Tensor = first(embeddings, hidden, rotation, attend)
        for layer in others:
            x = layer(x, rotation, attend)
        return x

    def normed(self, out: torch.Tensor) -> torch.Tensor:
        """See EagleHead."""
        state: torch.Tensor = self.norm(out)
        return state

    def carried(self, out: torch.Tensor) -> torch.Tensor:
        """See EagleHead: the state before the final norm, unless the config says otherwise."""
        return self.normed(out) if self.config.norm_output else out


def build_eagle_head(config: EagleConfig) -> EagleHead:
    """A head with random weights.

    Args:
        config: What it is made of.
    """
    return Eagle3Head(config) if config.family == "eagle3" else Eagle1Head(config)
