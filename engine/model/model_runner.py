"""ModelRunner: one model and its cache. Target and draft are two instances of it."""

import inspect
from dataclasses import dataclass
from functools import partial

import torch
from transformers import PreTrainedModel

from engine.model.attention.interface import (
    AttentionBackend,
    AttentionMetadata,
    AttentionPlan,
    ResidualSink,
)
from engine.model.cpu_ops.build import CpuOperators
from engine.model.hidden_states import HiddenSelection, HiddenStateTap
from engine.model.input_batch import InputBatch, SequenceSlice
from engine.model.kv_cache import PagedKVCache
from engine.model.recording import Results
from engine.model.row_graphs import RowGraphs
from engine.model.static_batch import LARGEST, StaticBatch
from engine.model.step_graphs import StepGraphs
from engine.model.threads import OperatorThreads

_HOST = torch.device("cpu")

ROW_LIMITS = LARGEST.num_tokens, 24
"""Rows of logits that recorded calls take, and recordings of such calls: three kinds of all sizes."""


@dataclass(frozen=True, slots=True)
class TappedPass:
    """What a forward pass gives that is asked for hidden states.

    Attributes:
        logits: float32 [num_rows, vocab_size], of batch.logits_rows.
        features: [T, width], the wanted hidden states of every token of the batch, in the model's type.
    """

    logits: torch.Tensor
    features: torch.Tensor


class ModelRunner:
    """Runs forward passes; everything that touches the device happens here.

    Args:
        module: A causal language model loaded with ATTENTION_NAME.
        cache: Its keys and values.
        backend: How attention is computed; where it can, passes of usual sizes are recorded and replayed.
        vocab_size: Ids that may be sampled; logits behind them are padding of the embedding and are cut.
        operators: What its rows of logits may be processed with; None is plain torch.
        weights: Type of its linear layers' weights (LoadedModel.weights).

    Attributes:
        row_graphs: What records calls on rows of its logits; None where nothing is recorded.
        threads: To be entered for a step, or for a pass outside of one.
    """

    def __init__(
        self,
        module: PreTrainedModel,
        cache: PagedKVCache,
        backend: AttentionBackend,
        vocab_size: int,
        operators: CpuOperators | None = None,
        weights: str = "",
    ) -> None:
        self.threads = OperatorThreads.for_weights(weights, operators)
        self.cache = cache
        self.vocab_size = vocab_size
        self.operators = operators
        self._module = module
        self._backend = backend
        recorded = backend.recorded
        self._graphs = None if recorded is None else StepGraphs(recorded, cache)
        self.row_graphs = None if recorded is None else RowGraphs(recorded.recorder, *ROW_LIMITS)
        self._num_layers = len(cache.keys)
        # Models whose forward cannot pick rows compute all of them, and the rows are picked here.
        self._picks_rows = "logits_to_keep" in inspect.signature(module.forward).parameters

    @property
    def picks_rows(self) -> bool:
        """Whether logits are computed of the wanted rows alone."""
        return self._picks_rows

    @property
    def device(self) -> torch.device:
        """Where the model computes; its weights may come from elsewhere while it is being prepared."""
        return self.cache.keys[0].device

    def build(self, slices: list[SequenceSlice]) -> InputBatch:
        """Lays slices out for `forward`, on the host."""
        return InputBatch.build(slices, self.cache.block_size, _HOST)

    @torch.inference_mode()
    def forward(self, batch: InputBatch) -> torch.Tensor:
        """One pass over the batch; keys and values land in the cache.

        Returns:
            float32 [num_rows, vocab_size], the logits of batch.logits_rows.

        Raises:
            RuntimeError: A layer did not attend, so the cache would have a hole.
        """
        return self._run(batch, None)[0]

    @torch.inference_mode()
    def forward_tapped(self, batch: InputBatch, tap: HiddenStateTap) -> TappedPass:
        """The same pass, and what a tap of this model catches in it.

        Raises:
            RuntimeError: See `forward`; or a hidden state did not come by.
        """
        logits, features = self._run(batch, tap)
        return TappedPass(logits, features)

    def tap(self, selection: HiddenSelection) -> HiddenStateTap:
        """A tap for `forward_tapped`.

        Raises:
            StartupError: The model has no such hidden state.
            ModelNotSupported: Its hidden states cannot be found.
        """
        return HiddenStateTap(self._module, selection)

    def _run(self, batch: InputBatch, tap: HiddenStateTap | None) -> Results:
        """Logits, and what a tap catches."""
        graphs = self._graphs
        bucket = None if graphs is None else graphs.bucket_of(batch)
        if graphs is None or bucket is None:
            return self._run_planned(batch, tap)
        results = graphs.replay(bucket, tap, batch)
        if results is None:
            results = self._run_planned(batch, tap)
            graphs.record(bucket, tap, batch, partial(self._pass, tap), results)
        return results

    def _run_planned(self, batch: InputBatch, tap: HiddenStateTap | None) -> Results:
        there = batch.to(self.device)
        return self._pass(tap, there, self._backend.plan(there, self.cache))

    def _pass(
        self, tap: HiddenStateTap | None, batch: InputBatch | StaticBatch, plan: AttentionPlan
    ) -> Results:
        if tap is None:
            return (self._logits(batch, plan, ResidualSink()),)
        with tap.listen() as caught:
            logits = self._logits(batch, plan, caught.sink)
        return logits, tap.rows(caught)

    def _logits(
        self, batch: InputBatch | StaticBatch, plan: AttentionPlan, residuals: ResidualSink
    ) -> torch.Tensor:
        metadata = AttentionMetadata(plan, residuals)
        keep = {"logits_to_keep": batch.logits_rows} if self._picks_rows else {}
        logits: torch.Tensor = self._module(
            input_ids=batch.input_ids[None],
            position_ids=batch.positions[None],
            use_cache=False,
            outrider=metadata,
            **keep,
        ).logits[0]
        if len(metadata.layers_seen) != self._num_layers:
            raise RuntimeError(
                f"{len(metadata.layers_seen)} of {self._num_layers} layers attended in a forward pass"
            )
        rows = logits if self._picks_rows else logits.index_select(0, batch.logits_rows)
        return rows[:, : self.vocab_size].float()
