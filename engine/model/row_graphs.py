"""RowGraphs: calls on rows of numbers, recorded once per number of rows and launched as one from then on.

For what sees neither positions nor a cache, such as Medusa heads and the sampling of tokens. Rows are padded
to a power of two, and what padding rows hold is left of earlier calls: no row may depend on another.
"""

from collections.abc import Callable, Hashable, Sequence

import torch

from engine.model.recording import Recorder, Results
from engine.model.recordings import Recordings
from engine.model.static_batch import padded

RowCall = Callable[..., Results]
"""Tensors with the same number of rows each, to tensors with as many. Leaves its inputs as they are."""


class RowGraphs:
    """Recorded calls. Those whose inputs look alike share the memory of inputs and of results.

    Args:
        recorder: What records them.
        num_rows: The most rows of a recording; larger calls are launched as they are.
        num_recordings: The most recordings, of all kinds and sizes; further ones are launched likewise.
    """

    def __init__(self, recorder: Recorder, num_rows: int, num_recordings: int) -> None:
        self._recordings = Recordings(recorder, num_rows)
        self._num_rows = num_rows
        self._num_recordings = num_recordings

    @torch.inference_mode()
    def run(self, kind: Hashable, call: RowCall, inputs: Sequence[torch.Tensor]) -> Results:
        """What a call gives.

        Args:
            kind: What tells calls apart that launch different things for inputs that look alike.
            call: The call.
            inputs: What it is called with, on the device: one row each, or more.

        Returns:
            Its results, which the next run overwrites if its results look alike.
        """
        count = len(inputs[0])
        size = padded(count)
        if size is None or size > self._num_rows:
            return call(*inputs)
        kind = (kind, *((rows.shape[1:], rows.dtype) for rows in inputs))
        recordings = self._recordings
        if recordings.has(size, kind):
            self._fill(inputs)
            return _cut(recordings.replay(size, kind), count)
        results = call(*inputs)
        if not recordings.were_tried(size, kind) and len(recordings) < self._num_recordings:
            static = [rows[:size] for rows in self._fill(inputs)]
            recordings.record(size, kind, lambda: call(*static), results, lambda got: _cut(got, count))
        return results

    def _fill(self, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Takes the inputs to where recordings read them; all of that memory."""
        places = [self._recordings.shared(place, rows) for place, rows in enumerate(inputs)]
        for place, rows in zip(places, inputs, strict=True):
            place[: len(rows)].copy_(rows)
        return places


def _cut(results: Results, count: int) -> Results:
    return tuple(result[:count] for result in results)
