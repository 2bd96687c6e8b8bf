"""What heads draft in training: for each root of a batch the states of its first, second, third draft.

EAGLE's come from passes of the head over its own output (EAGLE-3, Li et al. 2025: "training-time test"):

    pass 0 at place i:  the target's features of i,      embedding of token i + 1, sees places 0 ... i
    pass s at place i:  what pass s - 1 put out at i,    embedding of token i + 1 + s, sees as well what the
                        passes 1 ... s made at place i; its position is s further on

Medusa's heads all read the target's last state at place i.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import nn

from engine.speculation.heads.eagle import EagleHead
from engine.speculation.heads.layers import Attend
from engine.speculation.heads.medusa import MedusaHeads
from engine.training.packing import Batch
from engine.training.unrolled_attention import Block, Chain, make_blocks, unrolled_attention


@dataclass(frozen=True, slots=True)
class Drafted:
    """One pass.

    Attributes:
        roots: int64 [M], which of the batch's roots it drafts for.
        states: [M, hidden_size], what the output layer reads.
        features: [M, hidden_size], what the pass has put out, where that imitates the target's last state.
        weight: [rows, hidden_size], the output layer.
    """

    roots: torch.Tensor
    states: torch.Tensor
    features: torch.Tensor | None
    weight: torch.Tensor


class Drafter(Protocol):
    """A head in training."""

    @property
    def head(self) -> nn.Module:
        """Its parameters."""

    def passes(self, batch: Batch, count: int, sampling: "Sampling") -> Iterator[Drafted]:
        """The first `count` passes, each over the roots that reach so far."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """Chance in training.

    Attributes:
        share: Of its roots, how many a pass hands on to the next; 1 in evaluation.
        noise: Width of the noise on EAGLE-1's features, for a sequence of 512 tokens; 0 in evaluation.
        generator: Where chance comes from.
    """

    share: float
    noise: float
    generator: torch.Generator


PLAIN = Sampling(1.0, 0.0, torch.Generator())
"""Without chance."""


class EagleDrafter:
    """EAGLE of any version.

    Args:
        head: The module.
        embeddings: [vocab_size, hidden_size], the target's.
        output: [rows, hidden_size], the target's output layer for heads without one of their own.
    """

    head: EagleHead

    def __init__(self, head: EagleHead, embeddings: torch.Tensor, output: torch.Tensor) -> None:
        self.head = head
        self._embeddings = embeddings
        self._output = output

    def passes(self, batch: Batch, count: int, sampling: Sampling) -> Iterator[Drafted]:
        """See Drafter."""
        head = self.head
        weight = self._output if head.lm_head is None else head.lm_head.weight
        text = _Text(head, batch)
        out = self._first(batch, text, sampling)[batch.roots]
        kept = torch.arange(len(batch.roots), device=batch.roots.device)
        chains = _Chains(text)
        for depth in range(count):
            if depth:
                lasting = _lasting(batch.reach[kept], depth, sampling)
                kept, out = kept[lasting], out[lasting]
                chains.keep(lasting)
                if not len(kept):
                    return
                places = batch.roots[kept]
                # The embedding is the token's that the pass before should have drafted.
                embedded = self._embeddings[batch.token_ids[places + 1 + depth]]
                attend = chains.attend(make_blocks(places, batch.bounds))
                positions = batch.positions[places] + depth
                out = head(embedded[None], head.carried(out)[None], positions[None], attend)[0]
            features = out if head.config.family == "eagle" else None
            yield Drafted(kept, head.normed(out), features, weight)

    def _first(self, batch: Batch, text: "_Text", sampling: Sampling) -> torch.Tensor:
        """Pass 0 over all places, [N, hidden_size]; of a sequence's last place nothing is used."""
        config = self.head.config
        last = config.target_hidden_size
        hidden = batch.hidden[:, -last:] if config.features == "last" else batch.hidden[:, :-last]
        if sampling.noise:
            hidden = hidden + _noise(batch, hidden, sampling)
        # The token after the end of a sequence is another's; no root is there.
        following = torch.cat((batch.token_ids[1:], batch.token_ids[:1]))
        embedded = self._embeddings[following]
        fused = self.head.fuse(hidden)
        out: torch.Tensor = self.head(embedded[None], fused[None], batch.positions[None], text.attend)[0]
        return out


class MedusaDrafter:
    """Medusa heads; pass s is head s.

    Args:
        head: The module.
        output: [rows, hidden_size], the target's output layer for heads without one of their own.
    """

    head: MedusaHeads

    def __init__(self, head: MedusaHeads, output: torch.Tensor) -> None:
        self.head = head
        self._output = output

    def passes(self, batch: Batch, count: int, sampling: Sampling) -> Iterator[Drafted]:
        """See Drafter."""
        width = self.head.config.hidden_size
        for depth, blocks in enumerate(list(self.head.blocks)[:count]):
            kept = _lasting(batch.reach, depth, sampling).nonzero()[:, 0]
            states = blocks(batch.hidden[batch.roots[kept], -width:])
            own = list(self.head.lm_heads)
            weight = own[min(depth, len(own) - 1)].get_parameter("weight") if own else self._output
            yield Drafted(kept, states, None, weight)


class _Text:
    """Pass 0: every place attends to itself and those before it; its keys are kept for the later passes."""

    def __init__(self, head: EagleHead, batch: Batch) -> None:
        self.scale = head.config.scale
        self.num_layers = head.config.num_layers
        self.keys: list[torch.Tensor] = []
        self.values: list[torch.Tensor] = []
        places = torch.arange(batch.bounds[-1], device=batch.roots.device)
        self._blocks = make_blocks(places, batch.bounds)

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, /
    ) -> torch.Tensor:
        """See Attend."""
        self.keys.append(key[0].contiguous())
        self.values.append(value[0].contiguous())
        query = (query[0] * self.scale).contiguous()
        seen = unrolled_attention(query, self.keys[layer], self.values[layer], (), self._blocks)
        return seen.transpose(0, 1)[None]


class _Chains:
    """The keys and values that each root's own drafts have added, per layer."""

    def __init__(self, text: _Text) -> None:
        self._text = text
        self._links: list[list[Chain]] = [[] for _ in range(text.num_layers)]

    def keep(self, lasting: torch.Tensor) -> None:
        """Drops the roots that do not last; bool [M]."""
        self._links = [
            [Chain(link.key[:, lasting], link.value[:, lasting]) for link in links] for links in self._links
        ]

    def attend(self, blocks: tuple[Block, ...]) -> Attend:
        """Attention of the next pass."""

        def attend(
            layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, /
        ) -> torch.Tensor:
            text, links = self._text, self._links[layer]
            links.append(Chain(key[0].contiguous(), value[0].contiguous()))
            query = (query[0] * text.scale).contiguous()
            seen = unrolled_attention(query, text.keys[layer], text.values[layer], links, blocks)
            return seen.transpose(0, 1)[None]

        return attend


def _lasting(reach: torch.Tensor, depth: int, sampling: Sampling) -> torch.Tensor:
    """bool, which roots have a pass at this depth."""
    lasting = reach > depth
    if depth and sampling.share < 1:
        chance = torch.rand(reach.shape, generator=sampling.generator).to(reach.device)
        lasting &= chance < sampling.share
    return lasting


def _noise(batch: Batch, like: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    """Uniform noise, less of it the longer the text (EAGLE, Li et al. 2024, and the authors' code)."""
    lengths = torch.tensor(batch.bounds).diff()
    width = (sampling.noise * 512 / lengths).repeat_interleave(lengths)[:, None]
    chance = torch.rand(like.shape, generator=sampling.generator) - 0.5
    return (chance * width).to(like.device)
