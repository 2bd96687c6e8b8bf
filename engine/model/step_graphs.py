"""StepGraphs: forward passes recorded once per bucket and launched as one from then on.

A step of a small batch is hundreds of launches, and on a GPU the host may take longer to ask for them than
the device to do them. Recorded passes read their inputs where a StaticBatch keeps them; what the host decides
from pass to pass is in tensors there, or in the tables of a StaticPlan.
"""

from collections.abc import Callable, Hashable
from dataclasses import dataclass

from engine.model.attention.interface import AttentionPlan, RecordedAttention, StaticPlan
from engine.model.input_batch import InputBatch
from engine.model.kv_cache import PagedKVCache
from engine.model.recording import Results
from engine.model.recordings import Recordings
from engine.model.static_batch import Bucket, StaticBatch

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
        self._recordings = Recordings(attention.recorder, self._largest.bucket.num_tokens)

    def bucket_of(self, batch: InputBatch) -> Bucket | None:
        """Where a batch belongs; None if it is too large for any."""
        return Bucket.of(batch) if self._largest.holds(batch) else None

    def replay(self, bucket: Bucket, kind: Hashable, batch: InputBatch) -> Results | None:
        """Runs a batch by the recording of its bucket.

        Args:
            bucket: The batch's.
            kind: What tells passes apart that have different results.
            batch: On the host.

        Returns:
            What Forward gives, in tensors of its own; None if there is no recording.
        """
        if not self._recordings.has(bucket, kind):
            return None
        self._places[bucket].fill(batch)
        return self._own(self._recordings.replay(bucket, kind), batch)

    def record(
        self, bucket: Bucket, kind: Hashable, batch: InputBatch, forward: Forward, expected: Results
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
        if self._recordings.were_tried(bucket, kind) or not len(batch.logits_rows):
            return
        place = self._place(bucket)
        place.fill(batch)
        self._recordings.record(
            bucket,
            kind,
            lambda: forward(place.batch, place.plan),
            expected,
            lambda results: self._own(results, batch),
        )

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
