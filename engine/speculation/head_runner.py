"""HeadRunner: a draft head and its cache, on the target's device and over the engine's block tables."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from engine.model.attention.interface import AttentionBackend, LayerOptions
from engine.model.input_batch import InputBatch, SequenceSlice
from engine.model.kv_cache import PagedKVCache
from engine.speculation.heads.eagle import EagleHead
from engine.speculation.target_ends import TargetEnds


@dataclass(frozen=True, slots=True)
class HeadOutput:
    """The wanted rows of a pass.

    Attributes:
        carried: [num_rows, hidden_size], what the children of each row get in a feature's place.
        logits: float32 [num_rows, vocab_size], over the target's ids.
    """

    carried: torch.Tensor
    logits: torch.Tensor


class HeadRunner:
    """Runs an EAGLE head.

    Args:
        head: In evaluation mode, on the target's device.
        cache: Its keys and values.
        backend: How attention is computed.
        ends: The target's embedding and output layer.
    """

    def __init__(
        self, head: EagleHead, cache: PagedKVCache, backend: AttentionBackend, ends: TargetEnds
    ) -> None:
        config = head.config
        self.cache = cache
        self._head = head
        self._backend = backend
        self._ends = ends
        self._options = [
            LayerOptions(config.scale, config.window(layer), None, None) for layer in range(config.num_layers)
        ]

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

        def attend(layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
            return plan.attend(layer, query, key, value, self._options[layer])

        embed = self._head.embed_tokens or self._ends.embed
        embedded = embed(batch.input_ids[None]).to(hidden.dtype)
        rows = self._head(embedded, hidden[None], batch.positions[None], attend)[0]
        rows = rows.index_select(0, batch.logits_rows)
        if not len(rows):
            return HeadOutput(rows, rows.new_empty(0, self._ends.vocab_size, dtype=torch.float32))
        logits = self._head.logits(rows, self._ends.score)
        return HeadOutput(self._head.carried(rows), self._ends.spread(logits, self._head.draft_to_target))
