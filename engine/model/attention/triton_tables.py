"""The tables of the Triton kernels on the device: of one batch, or of a bucket, filled anew for each."""

from dataclasses import dataclass

import torch

from engine.model.attention.tiles import SplitRules, TileLimits, TileShape, TileTable, cut
from engine.model.input_batch import InputBatch
from engine.model.static_batch import Bucket, send

MIN_ROWS = 16
"""Rows, and slots, of the smallest matrix product that Triton knows."""
MAX_ROW_BYTES = 128
"""A column of a block: 64 rows or slots of 16 bits, 32 in float32, which has no matrix unit to lean on."""
_TILE_FIELDS, _MERGE_FIELDS = 7, 4


@dataclass(frozen=True, slots=True)
class Kind:
    """Layers with the same of these share their tables.

    Attributes:
        num_heads, num_kv_heads: Heads.
        window: Sliding window in positions.
        number_bytes: Width of the queries' or the cache's numbers, whichever are wider.
    """

    num_heads: int
    num_kv_heads: int
    window: int | None
    number_bytes: int

    @property
    def group(self) -> int:
        """Query heads of one key/value head."""
        return self.num_heads // self.num_kv_heads

    def num_rows(self, num_tokens: int) -> int:
        """Rows of a tile for stretches of so many tokens: a power of two."""
        smallest = max(MIN_ROWS, power_of_two(self.group))
        return max(smallest, min(MAX_ROW_BYTES // self.number_bytes, power_of_two(self.group * num_tokens)))

    def tiles_of(self, num_rows: int) -> TileShape:
        """What it makes of a batch."""
        return TileShape(self.num_kv_heads, num_rows // self.group, self.window)


@dataclass(frozen=True, slots=True)
class Tables:
    """Batches cut for one kind of layer.

    Attributes:
        flat: int32; the other two in one, which take one copy.
        tiles: int32 [num_tiles, 7].
        merges: int32 [num_merges, 4].
        num_partials: Partial results in all, at most.
        num_rows: Rows of a tile, a power of two.
        num_splits: Most partial results of one merge, up to a power of two.
    """

    flat: torch.Tensor
    tiles: torch.Tensor
    merges: torch.Tensor
    num_partials: int
    num_rows: int
    num_splits: int

    @classmethod
    def over(
        cls, flat: torch.Tensor, num_tiles: int, num_partials: int, num_rows: int, most: int
    ) -> "Tables":
        """Tables of numbers that lie in a row; `most` is what one merge joins at most."""
        tiles, merges = flat[: _TILE_FIELDS * num_tiles], flat[_TILE_FIELDS * num_tiles :]
        return cls(
            flat,
            tiles.view(-1, _TILE_FIELDS),
            merges.view(-1, _MERGE_FIELDS),
            num_partials,
            num_rows,
            power_of_two(most),
        )


class BatchTables:
    """The tables of one batch, by kind.

    Args:
        rules: When contexts are split.
        batch: The batch.
    """

    def __init__(self, rules: SplitRules, batch: InputBatch) -> None:
        self._rules = rules
        self._batch = batch
        self._known: dict[Kind, Tables] = {}

    def of(self, kind: Kind) -> Tables:
        """Those of a kind, cut when it is first asked for."""
        if kind not in self._known:
            self._known[kind] = self._build(kind)
        return self._known[kind]

    def _build(self, kind: Kind) -> Tables:
        spans = self._batch.spans
        num_rows = kind.num_rows(max(span.end - span.begin for span in spans))
        table = cut(spans, kind.tiles_of(num_rows), self._rules)
        flat = torch.tensor(_numbers(table), dtype=torch.int32, device=self._batch.input_ids.device)
        most = max((count for *_, count in table.merges), default=1)
        return Tables.over(flat, len(table.tiles), table.num_partials, num_rows, most)


class BucketTables:
    """The tables of a bucket, by kind: as long as any of its batches may need them.

    Args:
        rules: When contexts are split.
        bucket: The bucket.
        device: Where they are.
    """

    def __init__(self, rules: SplitRules, bucket: Bucket, device: torch.device) -> None:
        self._rules = rules
        self._bucket = bucket
        self._device = device
        self._known: dict[Kind, Tables] = {}
        self._batch: InputBatch | None = None

    def of(self, kind: Kind) -> Tables:
        """Those of a kind, for the batch that was filled in last."""
        if kind not in self._known:
            limits, num_rows = self._limits(kind)
            numbers = _TILE_FIELDS * limits.num_tiles + _MERGE_FIELDS * limits.num_merges
            flat = torch.zeros(numbers, dtype=torch.int32, device=self._device)
            self._known[kind] = Tables.over(
                flat, limits.num_tiles, limits.num_tiles, num_rows, limits.num_splits
            )
            self._fill(kind)
        return self._known[kind]

    def fill(self, batch: InputBatch) -> None:
        """Cuts the next batch for every kind."""
        self._batch = batch
        for kind in self._known:
            self._fill(kind)

    def _fill(self, kind: Kind) -> None:
        batch = self._batch
        assert batch is not None, "filled before it runs"
        limits, num_rows = self._limits(kind)
        shape = kind.tiles_of(num_rows)
        table = cut(batch.spans, shape, self._rules)
        table.pad(len(batch.input_ids), self._bucket.num_tokens, shape.tokens_per_tile, limits)
        send(torch.tensor(_numbers(table), dtype=torch.int32), self._known[kind].flat)

    def _limits(self, kind: Kind) -> tuple[TileLimits, int]:
        bucket = self._bucket
        # Longer stretches than the usual one take more tiles, for which there is room.
        num_rows = kind.num_rows(-(-bucket.num_tokens // bucket.num_sequences))
        shape = kind.tiles_of(num_rows)
        return TileLimits.of(bucket.num_tokens, bucket.num_sequences, shape, self._rules), num_rows


def power_of_two(number: int) -> int:
    """The next one, or the number itself."""
    return 1 << (number - 1).bit_length()


def _numbers(table: TileTable) -> list[int]:
    return [number for row in (*table.tiles, *table.merges) for number in row]
