"""HeadRunner: a draft head and its cache, on the target's device and over the engine's block tables."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import cast

import torch

from engine.model.attention.cpu import CpuPlan
from engine.model.attention.interface import AttentionBackend, LayerOptions
from engine.model.input_batch import InputBatch, SequenceSlice
from engine.model.kv_cache import PagedKVCache
from engine.speculation.chain import ChainWish, DraftedChain
from engine.speculation.draft_ids import DraftIds
from engine.speculation.head_stack import HeadStack
from engine.speculation.heads.eagle import EagleHead
from engine.speculation.target_ends import TargetEnds


@dataclass(frozen=True, slots=True)
class HeadOutput:
    """The wanted rows of a pass.

    Attributes:
        carried: [num_rows, hidden_size], what the children of each row get in a feature's place.
        logits: float32 [num_rows, vocab_size], or over the entries that `ids` says.
        ids: What the entries of a row stand for; None where they are the target's ids.
    """

    carried: torch.Tensor
    logits: torch.Tensor
    ids: DraftIds | None


class HeadRunner:
    """Runs an EAGLE head.

    Args:
        head: In evaluation mode, on the target's device.
        cache: Its keys and values.
        backend: How attention is computed.
        ends: The target's embedding and output layer.
        stack: The head as one operator; None calls its layers one by one.
    """

    def __init__(
        self,
        head: EagleHead,
        cache: PagedKVCache,
        backend: AttentionBackend,
        ends: TargetEnds,
        stack: HeadStack | None = None,
    ) -> None:
        config = head.config
        self.cache = cache
        self._head = head
        self._backend = backend
        self._ends = ends
        self._stack = stack
        self._ids = ends.ids(head.draft_to_target)
        self._options = [
            LayerOptions(config.scale, config.window(layer), None, None) for layer in range(config.num_layers)
        ]

    @property
    def drafts_chains(self) -> bool:
        """Whether whole chains can be drafted in one go."""
        return self._stack is not None

    def draft(
        self, slices: Sequence[SequenceSlice], features: torch.Tensor, wishes: Sequence[ChainWish | None]
    ) -> list[DraftedChain]:
        """A pass over committed tokens, and the chains of drafts behind them; where `drafts_chains`.

        Args:
            slices: See `absorb`.
            features: See `absorb`.
            wishes: Per slice what chain is wanted; None for none. At least one is.

        Returns:
            The chains.
        """
        assert self._stack is not None, "asked before"
        drafted = self._stack.draft(slices, self._head.fuse(features), wishes)
        return [
            DraftedChain(tokens, confidences, self._distributions(tokens, rows))
            for tokens, confidences, rows in drafted
        ]

    def _distributions(
        self, tokens: Sequence[int], rows: torch.Tensor | None
    ) -> Sequence[torch.Tensor | None]:
        if rows is None:
            return [None] * len(tokens)
        shares = rows.softmax(dim=-1)
        return (shares if self._ids is None else self._ids.spread(shares, 0.0)).unbind()

    def absorb(self, slices: Sequence[SequenceSlice], features: torch.Tensor) -> HeadOutput:
        """A pass over committed tokens.

        Args:
            slices: As the target has them: `start` counts the text's tokens from 0.
            features: [T, width], for each token the target's feature of the position before.
        """
        return self._run(slices, self._head.fuse(features))

    def extend(self, slices: Sequence[SequenceSlice], carried: torch.Tensor) -> HeadOutput:
        """A pass over draft nodes.

        Args:
            slices: Likewise.
            carried: [T, hidden_size], for each node what its parent's row carries.
        """
        return self._run(slices, carried)

    def _run(self, slices: Sequence[SequenceSlice], hidden: torch.Tensor) -> HeadOutput:
        # The head's text begins with the second token: the first has no feature before it.
        shifted = [replace(piece, start=piece.start - 1, first_slot=1) for piece in slices]
        batch = InputBatch.build(shifted, self.cache.block_size, hidden.device)
        plan = self._backend.plan(batch, self.cache)
        if self._stack is not None:
            # A stack is built for the C++ operators, which no other backend goes with.
            return self._output(batch, self._stack.run(batch, cast("CpuPlan", plan), hidden))

        def attend(layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
            return plan.attend(layer, query, key, value, self._options[layer])

        embed = self._head.embed_tokens or self._ends.embed
        embedded = embed(batch.input_ids[None]).to(hidden.dtype)
        return self._output(batch, self._head(embedded, hidden[None], batch.positions[None], attend)[0])

    def _output(self, batch: InputBatch, out: torch.Tensor) -> HeadOutput:
        rows = out.index_select(0, batch.logits_rows)
        if not len(rows):
            return HeadOutput(rows, rows.new_empty(0, self._ends.vocab_size, dtype=torch.float32), None)
        logits = self._ends.cut(self._head.logits(rows, self._ends.score), self._ids)
        return HeadOutput(self._head.carried(rows), logits, self._ids)
