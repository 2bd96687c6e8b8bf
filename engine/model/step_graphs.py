"""StepGraphs: forward passes recorded once per bucket and launched as one from then on.

A step of a small batch is hundreds of launches, and on a GPU the host may take longer to ask for them than
the device to do them. Recorded passes read their inputs where a StaticBatch keeps them; what the host decides
from pass to pass is in tensors there, or in the tables of a StaticPlan.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass

import torch

from engine.model.attention.interface import AttentionPlan, RecordedAttention, StaticPlan
from engine.model.input_batch import InputBatch
from engine.model.kv_cache import PagedKVCache
from engine.model.recording import Recording, Results
from engine.model.static_batch import Bucket, StaticBatch

logger = logging.getLogger(__name__)

_TOLERANCE = 0.1
"""Largest difference of a recorded pass relative to the largest result. Rounding in 16 bits, where a padded
matrix product sums in another order, makes a hundredth; a stale table makes 1."""

Forward = Callable[[InputBatch | StaticBatch, AttentionPlan], Results]
"""A pass: the rows of logits wanted, and further results with a row for each of them, or per token."""


@dataclass(frozen=True, slots=True)
class _Place:
    """What all recordings of a bucket read."""

    batch: StaticBatch
    plan: StaticPlan

    def fill(self, batch: InputBatch) -> None:
        self.batch.fill(batch)
        self.plan.fill(batch)


class StepGraphs:
    """The recorded passes of one model.

    Args:
        attention: How they attend, and what records them.
        cache: The model's keys and values.
        num_row_results: Results of a pass with a row per wanted row of logits, which come first; the others
            have one per token.
    """

    def __init__(
        self, attention: RecordedAttention, cache: PagedKVCache, *, num_row_results: int = 1
    ) -> None:
        self._attention = attention
        self._cache = cache
        self._num_row_results = num_row_results
        # More than the cache has are wanted only by many requests that share a long prefix.
        num_slots, device = len(cache.keys[0]), cache.keys[0].device
        self._largest = StaticBatch.allocate(num_slots, device)
        self._places: dict[Bucket, _Place] = {}
        self._recordings: dict[tuple[Bucket, object], Recording | None] = {}
        self._results: dict[object, Results] = {}

    def bucket_of(self, batch: InputBatch) -> Bucket | None:
        """Where a batch belongs; None if it is too large for any."""
        return Bucket.of(batch) if self._largest.holds(batch) else None

    def replay(self, bucket: Bucket, kind: object, batch: InputBatch) -> Results | None:
        """Runs a batch by the recording of its bucket.

        Args:
            bucket: The batch's.
            kind: What tells passes apart that have different results.
            batch: On the host.

        Returns:
            What Forward gives, in tensors of its own; None if there is no recording.
        """
        recording = self._recordings.get((bucket, kind))
        if recording is None:
            return None
        self._places[bucket].fill(batch)
        return self._own(recording.replay(), batch)

    def record(
        self, bucket: Bucket, kind: object, batch: InputBatch, forward: Forward, expected: Results
    ) -> None:
        """Records the passes of a bucket and kind, unless that was tried before or nothing is to be compared.

        The batch runs again, recorded, and has to give what it gave. If it does not, or cannot be recorded,
        passes of the bucket stay as they are, and the log says so.

        Args:
            bucket: The batch's.
            kind: See `replay`.
            batch: On the host; it has run already, so that its keys and values are in the cache.
            forward: The pass.
            expected: What came of it.
        """
        if (bucket, kind) in self._recordings or not len(batch.logits_rows):
            return
        self._recordings[bucket, kind] = None
        place = self._place(bucket)
        place.fill(batch)

        def call() -> Results:
            return self._gathered(kind, forward(place.batch, place.plan))

        # Kernels are compiled, and kinds of layers found, before anything is recorded.
        call()
        try:
            recording = self._attention.recorder.record(call)
        except RuntimeError as error:
            logger.warning(
                "passes of %s are not recorded as a graph and launch by launch take longer: %s", bucket, error
            )
            return
        differences = list(map(_difference, self._own(recording.replay(), batch), expected))
        # What is not a number is not below the limit either.
        if not all(difference <= _TOLERANCE for difference in differences):
            logger.warning(
                "passes of %s are not replayed from a graph: results differed by %s of the largest number, "
                "where up to %.3g is rounding",
                bucket,
                differences,
                _TOLERANCE,
            )
            return
        self._recordings[bucket, kind] = recording

    def _gathered(self, kind: object, results: Results) -> Results:
        """Copies in memory that all buckets share: each recording would keep its own results for good."""
        if kind not in self._results:
            rows = self._largest.bucket.num_tokens
            self._results[kind] = tuple(result.new_empty(rows, result.shape[1]) for result in results)
        shared = tuple(
            all_rows[: len(rows)] for all_rows, rows in zip(self._results[kind], results, strict=True)
        )
        for target, result in zip(shared, results, strict=True):
            target.copy_(result)
        return shared

    def _own(self, results: Results, batch: InputBatch) -> Results:
        """Copies without padding, which the next replay leaves alone."""
        of_rows, of_tokens = results[: self._num_row_results], results[self._num_row_results :]
        return (
            *(result[: len(batch.logits_rows)].clone() for result in of_rows),
            *(result[: len(batch.input_ids)].clone() for result in of_tokens),
        )

    def _place(self, bucket: Bucket) -> _Place:
        if bucket not in self._places:
            batch = self._largest.cut(bucket)
            self._places[bucket] = _Place(batch, self._attention.plan(batch, self._cache))
        return self._places[bucket]


def _difference(got: torch.Tensor, expected: torch.Tensor) -> float:
    """Relative to the largest number; what is not a number makes the same."""
    if not expected.numel():
        return 0.0
    return float((got.double() - expected.double()).abs().max() / expected.double().abs().max())
