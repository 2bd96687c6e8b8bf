"""HeadRunner: a draft head and its cache, on the target's device and over the engine's block tables."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import cast

import torch

from engine.model.attention.cpu import CpuPlan
from engine.model.attention.interface import AttentionBackend, AttentionPlan, LayerOptions
from engine.model.input_batch import InputBatch, SequenceSlice
from engine.model.kv_cache import PagedKVCache
from engine.model.recording import Results
from engine.model.static_batch import LARGEST, StaticBatch
from engine.model.step_graphs import StepGraphs
from engine.speculation.chain import ChainWish, DraftedChain
from engine.speculation.draft_ids import DraftIds
from engine.speculation.head_stack import HeadStack
from engine.speculation.heads.eagle import EagleHead
from engine.speculation.target_ends import TargetEnds

_HOST = torch.device("cpu")


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
        backend: How attention is computed; where it can, passes of usual sizes are recorded and replayed.
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
        recorded = backend.recorded
        self._graphs = None if recorded is None else StepGraphs(recorded, cache, num_row_results=2)
        # Where recorded passes read what stands for features, of all buckets.
        self._hidden = next(head.parameters()).new_zeros(LARGEST.num_tokens, config.hidden_size)
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
        batch = InputBatch.build(shifted, self.cache.block_size, _HOST)
        if self._stack is not None:
            # A stack is built for the C++ operators, which no other backend goes with.
            plan = cast("CpuPlan", self._backend.plan(batch, self.cache))
            return self._output(batch, self._stack.run(batch, plan, hidden))
        if self._graphs is None:
            return self._run_planned(batch, hidden)
        return self._run_recorded(self._graphs, batch, hidden)

    def _run_planned(self, batch: InputBatch, hidden: torch.Tensor) -> HeadOutput:
        there = batch.to(hidden.device)
        return self._output(there, self._forward(there, self._backend.plan(there, self.cache), hidden))

    def _run_recorded(self, graphs: StepGraphs, batch: InputBatch, hidden: torch.Tensor) -> HeadOutput:
        """By the recording of the batch's bucket, which is made where there is none."""
        bucket = graphs.bucket_of(batch)
        if bucket is None:
            return self._run_planned(batch, hidden)
        self._hidden[: len(hidden)].copy_(hidden)
        results = graphs.replay(bucket, None, batch)
        if results is None:
            output = self._run_planned(batch, hidden)
            graphs.record(bucket, None, batch, self._forward_kept, (output.logits, output.carried))
            return output
        logits, carried = results
        return HeadOutput(carried, logits, self._ids)

    def _forward_kept(self, batch: InputBatch | StaticBatch, plan: AttentionPlan) -> Results:
        """A pass that reads `hidden` where it is kept, for recordings."""
        output = self._output(batch, self._forward(batch, plan, self._hidden[: len(batch.input_ids)]))
        return output.logits, output.carried

    def _forward(
        self, batch: InputBatch | StaticBatch, plan: AttentionPlan, hidden: torch.Tensor
    ) -> torch.Tensor:
        """The head's output for every token, [T, hidden_size]."""

        def attend(layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
            return plan.attend(layer, query, key, value, self._options[layer])

        embed = self._head.embed_tokens or self._ends.embed
        embedded = embed(batch.input_ids[None]).to(hidden.dtype)
        out: torch.Tensor = self._head(embedded, hidden[None], batch.positions[None], attend)[0]
        return out

    def _output(self, batch: InputBatch | StaticBatch, out: torch.Tensor) -> HeadOutput:
        rows = out.index_select(0, batch.logits_rows)
        if not len(rows):
            return HeadOutput(rows, rows.new_empty(0, self._ends.vocab_size, dtype=torch.float32), None)
        logits = self._ends.cut(self._head.logits(rows, self._ends.score), self._ids)
        return HeadOutput(self._head.carried(rows), logits, self._ids)
