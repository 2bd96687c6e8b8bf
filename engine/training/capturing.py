"""Fills a feature store with the target's states of rows, within a disk budget."""

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from engine.training.features import GIB, FeatureStore
from engine.training.rows import Row, is_held_out, roots
from engine.training.target import PASS_TOKENS, TargetReader

logger = logging.getLogger(__name__)

OnTokens = Callable[[int, int], None]
"""Told of tokens done and tokens in all."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What goes where, and how much.

    Attributes:
        held_out: Share of the prompts kept for the evaluation. All turns of a conversation, and all answers
            to a prompt, are on the same side.
        disk_gb: What a store may take, in GiB.
    """

    held_out: float
    disk_gb: float


def capture_rows(
    reader: TargetReader,
    rows: Sequence[Row],
    store: FeatureStore,
    limits: Limits,
    on_tokens: OnTokens,
    stop: Callable[[], bool],
) -> None:
    """Adds the rows that a store lacks, as many as the budget allows, in their order.

    Args:
        reader: Of the target.
        rows: All rows; those in the store are skipped, and so are those too long for the target.
        store: Where they go.
        limits: See there.
        on_tokens: Progress.
        stop: Asked between passes whether to leave off.
    """
    wanted = _fitting(_new(reader.model.max_model_len, rows, store), store, limits.disk_gb)
    first = roots([row.prompt for row in rows])
    total = sum(len(row.token_ids) for row in wanted)
    done = 0
    for batch in batches(wanted):
        for row, captured in zip(batch, reader.read(batch), strict=True):
            store.add(row, captured, held_out=is_held_out(first[row.prompt], limits.held_out))
            done += len(row.token_ids)
        on_tokens(done, total)
        if stop():
            return


def batches(rows: Sequence[Row]) -> Iterator[list[Row]]:
    """Rows in their order, as many at once as share a pass."""
    batch: list[Row] = []
    room = PASS_TOKENS
    for row in rows:
        if batch and len(row.token_ids) > room:
            yield batch
            batch, room = [], PASS_TOKENS
        batch.append(row)
        room -= len(row.token_ids)
    if batch:
        yield batch


def _new(max_model_len: int, rows: Sequence[Row], store: FeatureStore) -> list[Row]:
    seen = {row.key for row in store.rows}
    new: dict[str, Row] = {row.key: row for row in rows if row.key not in seen}
    fits = [row for row in new.values() if len(row.token_ids) <= max_model_len]
    if len(fits) < len(new):
        logger.warning(
            "%d rows are left out: they have more than %d tokens (--max-model-len)",
            len(new) - len(fits),
            max_model_len,
        )
    return fits


def _fitting(rows: Sequence[Row], store: FeatureStore, disk_gb: float) -> list[Row]:
    room = disk_gb * GIB - store.num_bytes
    taken: list[Row] = []
    for row in rows:
        room -= store.format.num_bytes(row)
        if room < 0:
            logger.warning(
                "%d of %d new rows are left out: features may take %g GiB; raise --disk-gb for more",
                len(rows) - len(taken),
                len(rows),
                disk_gb,
            )
            break
        taken.append(row)
    return taken
