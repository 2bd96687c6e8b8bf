"""Recordings: what was recorded of one model, each tried out against what it was recorded from."""

import logging
import math
from collections.abc import Callable, Hashable

import torch

from engine.model.recording import Recorder, Recording, Results

logger = logging.getLogger(__name__)

_TOLERANCE = 0.1
"""Largest difference of a recorded pass relative to the largest result. Rounding in 16 bits, where a padded
matrix product sums in another order, makes a hundredth; a stale table makes 1."""


class Recordings:
    """By size and kind.

    Args:
        recorder: What records.
        num_rows: Rows of the largest size. Results of all sizes share memory, which has so many.
    """

    def __init__(self, recorder: Recorder, num_rows: int) -> None:
        self._recorder = recorder
        self._num_rows = num_rows
        self._recordings: dict[tuple[Hashable, Hashable], Recording | None] = {}
        self._shared: dict[tuple[Hashable, ...], torch.Tensor] = {}

    def __len__(self) -> int:
        """How many were tried."""
        return len(self._recordings)

    def were_tried(self, size: Hashable, kind: Hashable) -> bool:
        """Whether a recording of that size and kind was made, or given up."""
        return (size, kind) in self._recordings

    def has(self, size: Hashable, kind: Hashable) -> bool:
        """Whether there is one."""
        return self._recordings.get((size, kind)) is not None

    def replay(self, size: Hashable, kind: Hashable) -> Results:
        """Replays one that there is. Results are overwritten by the next replay of any."""
        recording = self._recordings[size, kind]
        assert recording is not None, "asked before"
        return recording.replay()

    def record(
        self,
        size: Hashable,
        kind: Hashable,
        call: Callable[[], Results],
        expected: Results,
        own: Callable[[Results], Results],
    ) -> None:
        """Records a call and replays it once, which has to give what it gave when it was launched.

        If it does not, or cannot be recorded, there is none of that size and kind, and the log says so.

        Args:
            size: Stands in the log.
            kind: Tells apart calls of one size.
            call: Reads what stays where it is, and changes nothing of it. It is called twice.
            expected: What came of the launches.
            own: Cuts the padding off a call's results.
        """
        self._recordings[size, kind] = None

        def gathered() -> Results:
            return self._gathered(call())

        # Kernels are compiled, and kinds of layers found, before anything is recorded.
        gathered()
        try:
            recording = self._recorder.record(gathered)
        except RuntimeError as error:
            logger.warning(
                "passes of %s are not recorded as a graph and launch by launch take longer: %s", size, error
            )
            return
        differences = list(map(_difference, own(recording.replay()), expected))
        # What is not a number is not below the limit either.
        if not all(difference <= _TOLERANCE for difference in differences):
            logger.warning(
                "passes of %s are not replayed from a graph: results differed by %s of the largest number, "
                "where up to %.3g is rounding",
                size,
                differences,
                _TOLERANCE,
            )
            return
        self._recordings[size, kind] = recording

    def shared(self, place: Hashable, like: torch.Tensor) -> torch.Tensor:
        """Memory that all sizes and kinds share, [num_rows, ...] and the rest like `like`, zero at first.

        Args:
            place: What it is for. Rows of one place that look alike are the same.
            like: [..., as many numbers as a row has].
        """
        key = (place, like.shape[1:], like.dtype)
        if key not in self._shared:
            self._shared[key] = like.new_zeros(self._num_rows, *like.shape[1:])
        return self._shared[key]

    def _gathered(self, results: Results) -> Results:
        """Copies in shared memory: each recording would keep its own results for good."""
        copies = tuple(
            self.shared(("result", place), result)[: len(result)] for place, result in enumerate(results)
        )
        for target, result in zip(copies, results, strict=True):
            target.copy_(result)
        return copies


def _difference(got: torch.Tensor, expected: torch.Tensor) -> float:
    """Relative to the largest number; what is not a number makes the same, unless both are infinite.

    Whole numbers, such as tokens, are the same or they are not.
    """
    if not expected.numel():
        return 0.0
    if not expected.is_floating_point():
        return 0.0 if torch.equal(got, expected) else math.inf
    got, expected = got.double(), expected.double()
    largest = torch.where(expected.isinf(), 0.0, expected).abs().max()
    apart = torch.where(got == expected, 0.0, (got - expected).abs()).max()
    # Where all numbers are 0 there is nothing to be relative to.
    return float(apart / largest) if largest else float(apart)
