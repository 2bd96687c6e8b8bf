"""Measures at start what a forward pass of the target takes, by rows and by context."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

from engine.model.input_batch import SequenceSlice
from engine.model.kv_cache import PagedKVCache
from engine.model.model_runner import ModelRunner
from engine.speculation.step_cost import CostModel

# Rows that are timed, as far as the time and the step's limit reach.
_ROWS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32, 40, 48, 64, 96, 128)
_ROUNDS = 3
# Of more rows than that a pass takes long, and says little that a straight line would not.
_ONCE = 48
_MAX_SECONDS = 1.5
# Passes with more context: the cost of a row that looks at it, and of looking at all.
_CONTEXT = 1024
_CONTEXT_ROWS = (1, 8)


@dataclass(frozen=True, slots=True)
class CalibrationLimits:
    """What the passes may take.

    Attributes:
        num_tokens: Slots of the cache, and of one sequence, whichever are fewer.
        max_rows: Tokens of one pass.
        max_seconds: Time for passes without context; what was begun is finished, and a dozen for the cost of
            context come on top.
    """

    num_tokens: int
    max_rows: int
    max_seconds: float = _MAX_SECONDS


def calibrate(
    runner: ModelRunner,
    cost: CostModel,
    limits: CalibrationLimits,
    clock: Callable[[], float] = time.perf_counter,
) -> None:
    """Fills a cost model with the times of a few passes.

    Each is held against a pass of one row right before it: a machine that is fast for a moment would else
    make the sizes that it met then look cheap beside all others. The median of a size's ratios counts.

    The passes write into the cache's first slots, so nobody may hold blocks. Where time is short, the larger
    passes are left out; the cost model goes on with a straight line and learns from steps.

    Args:
        runner: The target.
        cost: What to fill.
        limits: Bounds.
        clock: Seconds, monotonic.
    """
    rows = [count for count in _ROWS if count <= min(limits.max_rows, limits.num_tokens)]
    if len(rows) < 2:
        return
    began = clock()
    deadline = began + limits.max_seconds
    table = _table(limits.num_tokens, runner.cache.block_size)

    def seconds(count: int, context: int = 0) -> float:
        start = clock()
        tokens = [place % runner.vocab_size for place in range(count)]
        piece = SequenceSlice(tokens, context, table, rows=count)
        with runner.threads:
            # Reading the result back waits for a device that computes on its own.
            runner.forward(runner.build([piece])).argmax(dim=-1).tolist()
        return clock() - start

    seconds(rows[0])
    seconds(rows[1])  # Not counted: first passes set things up.
    single: list[float] = []
    ratios: dict[int, list[float]] = {}
    for place in range(_ROUNDS):
        for count in rows[1:]:
            if (ratios and clock() > deadline) or (place and count > _ONCE):
                break
            single.append(seconds(rows[0]))
            ratios.setdefault(count, []).append(seconds(count) / single[-1])
    unit = median(single)
    by_rows = {count: unit * median(found) for count, found in ratios.items()}
    cost.calibrate({rows[0]: unit, **by_rows}, *_context_costs(seconds, limits, runner.cache))


def _context_costs(
    seconds: Callable[[int, int], float], limits: CalibrationLimits, cache: PagedKVCache
) -> tuple[float, float]:
    """Seconds that a token of context adds to a pass, once, and for each row; 0 where it cannot be told."""
    few, many = _CONTEXT_ROWS
    context = min(_CONTEXT, limits.num_tokens - many)
    if context < _CONTEXT // 4 or many > limits.max_rows:
        return 0.0, 0.0
    # Slots that were never written are one and the same page to the system, which is nothing to read.
    cache.clear(context)
    added = {
        count: median(seconds(count, context) - seconds(count, 0) for _ in range(_ROUNDS))
        for count in (few, many)
    }
    per_row = max(0.0, (added[many] - added[few]) / ((many - few) * context))
    once = max(0.0, added[few] / context - per_row * few)
    return once, per_row


def _table(num_tokens: int, block_size: int) -> Sequence[int]:
    return range(-(-num_tokens // block_size))
