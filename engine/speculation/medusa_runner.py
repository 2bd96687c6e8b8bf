"""MedusaRunner: Medusa heads on the target's device."""

import torch

from engine.model.graph_memory import WORKSPACE_BYTES, row_graphs_bytes
from engine.model.recording import Recorder, Results
from engine.model.row_graphs import RowGraphs
from engine.model.static_batch import LARGEST, num_row_sizes
from engine.speculation.heads.medusa import MedusaHeads
from engine.speculation.target_ends import TargetEnds

MOST_ROWS = LARGEST.num_sequences
"""Of a recorded pass: each request has one."""


class MedusaRunner:
    """Runs Medusa heads.

    Args:
        heads: In evaluation mode, on the target's device.
        ends: The target's output layer and ids.
        recorder: What records passes of up to MOST_ROWS rows, to replay them; None launches all anew.
    """

    def __init__(self, heads: MedusaHeads, ends: TargetEnds, recorder: Recorder | None = None) -> None:
        self.ids = ends.ids(heads.draft_to_target)
        self._heads = heads
        self._ends = ends
        self._graphs = None if recorder is None else RowGraphs(recorder, MOST_ROWS, num_row_sizes(MOST_ROWS))

    @property
    def num_heads(self) -> int:
        """Levels that can be drafted."""
        return self._heads.config.num_heads

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        """One pass of all heads.

        Args:
            states: [num_rows, hidden_size], the target's after its final norm.

        Returns:
            float32 [num_heads, num_rows, vocab_size], or over the entries that `ids` says; good until the
            next pass.
        """
        if self._graphs is None:
            [logits] = self._pass(states)
        else:
            [logits] = self._graphs.run("heads", self._pass, [states])
        return logits.transpose(0, 1)

    def _pass(self, states: torch.Tensor) -> Results:
        """With a row for each of the states', [num_rows, num_heads, vocab_size]."""
        logits = self._ends.cut(self._heads(states, self._ends.score), self.ids)
        return (logits.transpose(0, 1),)


def recorded_heads_bytes(heads: MedusaHeads, num_logits: int, dtype: torch.dtype) -> int:
    """What the recordings of heads take of a GPU's memory, on the safe side.

    Args:
        heads: The heads.
        num_logits: Numbers in a head's row of logits.
        dtype: Type of their activations.
    """
    # Of each head its state and its logits, by itself and beside the others', and the logits in float32 and
    # in what all recordings share.
    numbers = heads.config.num_heads * (heads.config.hidden_size + num_logits)
    per_row = 2 * numbers * dtype.itemsize + heads.config.num_heads * num_logits * (4 + 4)
    return row_graphs_bytes(MOST_ROWS, per_row, num_row_sizes(MOST_ROWS)) + WORKSPACE_BYTES
