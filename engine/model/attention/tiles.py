"""How a batch is cut into tiles, the pieces of work of the Triton kernels: plain integers, made on the host.

A tile is a few neighbouring tokens of one sequence and a range of its slots:

    tokens first, end | offset of the context | slots begin, end | committed slots | partial result or -1

Long contexts of few tokens are split into several tiles, so that a single request keeps the whole device
busy; a merge says, for one token of them, which of the partial results belong together:

    token | its place in the tile | first partial result, how many
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from engine.model.input_batch import SequenceSpan

MAX_SPLITS = 32
EMPTY_TILE = (0, 0, 0, 0, 0, 0, -1)
EMPTY_MERGE = (0, 0, 0, 0)
_SPLIT_UNIT = 16


@dataclass(frozen=True, slots=True)
class SplitRules:
    """When contexts are split.

    Attributes:
        wanted_programs: Programs that fill the device; with fewer, contexts are split.
        min_slots: No split is shorter than this; a short one costs more than it brings.
    """

    wanted_programs: int
    min_slots: int


@dataclass(frozen=True, slots=True)
class TileShape:
    """What one kind of layer makes of a batch.

    Attributes:
        num_kv_heads: Key/value heads; each is a program per tile.
        tokens_per_tile: How many tokens share a tile.
        window: Sliding window in positions; slots that no token of a tile sees are left out.
    """

    num_kv_heads: int
    tokens_per_tile: int
    window: int | None


@dataclass(slots=True)
class TileTable:
    """The rows of the two tables.

    Attributes:
        tiles: (first, end, offset, slots begin, slots end, committed, partial) per tile.
        merges: (token, place in its tile, first partial, number of partials) per token of a split tile.
        num_partials: Partial results in all.
    """

    tiles: list[tuple[int, ...]] = field(default_factory=list)
    merges: list[tuple[int, ...]] = field(default_factory=list)
    num_partials: int = 0

    def pad(self, first: int, end: int, tokens_per_tile: int, limits: "TileLimits") -> None:
        """Fills up to the limits with what does nothing, tokens `first` to `end` seeing no slot.

        They get results, of nothing, since every number of a padded batch has to be a number.
        """
        self.tiles.extend(
            (begin, min(begin + tokens_per_tile, end), 0, 0, 0, 0, -1)
            for begin in range(first, end, tokens_per_tile)
        )
        self.tiles.extend([EMPTY_TILE] * (limits.num_tiles - len(self.tiles)))
        self.merges.extend([EMPTY_MERGE] * (limits.num_merges - len(self.merges)))


@dataclass(frozen=True, slots=True)
class TileLimits:
    """What no batch of a size exceeds.

    Attributes:
        num_tiles: Tiles, and partial results too.
        num_merges: Merges.
        num_splits: Partial results of one merge.
    """

    num_tiles: int
    num_merges: int
    num_splits: int

    @classmethod
    def of(cls, num_tokens: int, num_sequences: int, shape: TileShape, rules: SplitRules) -> "TileLimits":
        """For so many tokens, padding included, and so many sequences."""
        # Each sequence, and the padding behind them, may leave a tile almost empty.
        spare = (num_sequences + 1) * (shape.tokens_per_tile - 1)
        num_stretches = (num_tokens + spare) // shape.tokens_per_tile
        # s stretches become s * ceil(w / s) tiles at most, which is less than s + w.
        wanted = math.ceil(rules.wanted_programs / shape.num_kv_heads)
        return cls(num_stretches + wanted, num_tokens, min(max(wanted, 1), MAX_SPLITS))


@dataclass(frozen=True, slots=True)
class _Stretch:
    """Neighbouring tokens of a sequence, and the slots that any of them sees."""

    first: int
    end: int
    offset: int
    slot_begin: int
    slot_end: int
    num_committed: int


def cut(spans: Sequence[SequenceSpan], shape: TileShape, rules: SplitRules) -> TileTable:
    """Cuts a batch into tiles."""
    stretches = list(_stretches(spans, shape))
    wanted = math.ceil(rules.wanted_programs / (len(stretches) * shape.num_kv_heads))
    table = TileTable()
    for stretch in stretches:
        _append(table, stretch, min(wanted, MAX_SPLITS), rules.min_slots)
    return table


def _stretches(spans: Sequence[SequenceSpan], shape: TileShape) -> Iterator[_Stretch]:
    offset = 0
    for span in spans:
        num_nodes = span.num_slots - span.num_committed
        # Committed tokens come first; a draft model's later passes compute newer nodes only.
        num_tokens = max(0, span.end - span.begin - num_nodes)
        start = span.num_committed - num_tokens
        for first in range(span.begin, span.end, shape.tokens_per_tile):
            end = min(first + shape.tokens_per_tile, span.end)
            # Nodes lie at or behind the position after the last committed token.
            position = start + min(first - span.begin, num_tokens)
            begin = 0 if shape.window is None else max(0, position - shape.window + 1)
            has_nodes = end - span.begin > num_tokens
            slot_end = span.num_slots if has_nodes else start + end - span.begin
            yield _Stretch(first, end, offset, begin, slot_end, span.num_committed)
        offset += span.num_slots


def _append(table: TileTable, stretch: _Stretch, max_splits: int, min_slots: int) -> None:
    num_slots = stretch.slot_end - stretch.slot_begin
    splits = max(1, min(max_splits, num_slots // min_slots))
    length = math.ceil(num_slots / splits / _SPLIT_UNIT) * _SPLIT_UNIT
    begins = range(stretch.slot_begin, stretch.slot_end, length)
    whole = len(begins) == 1
    for index, begin in enumerate(begins):
        end = min(begin + length, stretch.slot_end)
        partial = -1 if whole else table.num_partials + index
        table.tiles.append(
            (stretch.first, stretch.end, stretch.offset, begin, end, stretch.num_committed, partial)
        )
    if not whole:
        table.merges.extend(
            (token, token - stretch.first, table.num_partials, len(begins))
            for token in range(stretch.first, stretch.end)
        )
        table.num_partials += len(begins)
