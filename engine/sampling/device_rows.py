"""DeviceRows: rows of logits processed by a few launches that are the same from step to step.

What `logits.py` and `choosing.py` do with the rows that want it, this does with all rows alike: an option
that a row does not use has a value that changes nothing. So what is launched depends on the number of rows
and on which options are in use, and can be recorded and launched as one; seeds, places and options are
numbers that it reads. The results are the same to the bit.
"""

import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch

from engine.sampling.logits import CHUNK_ELEMENTS, adjust_logits, chunks, truncation
from engine.sampling.noise import NoiseKey, gumbel_rows, noise_starts
from engine.sampling.ranking import Ranking, Ranks, RowIds, rank
from engine.sampling.row_group import RowGroup
from engine.sampling.uploading import upload
from engine.sampling_params import SamplingParams

_SMALLEST_TOP = 64
"""Entries that top_k looks at; more of them by powers of two, since each number is launched otherwise."""
_LIVE_TENSORS = 8
"""Of eight bytes for each entry of a chunk, that are alive at the same time."""


class RowLauncher(Protocol):
    """Launches calls on rows: anew each time, or as they were recorded."""

    def run(
        self, kind: Hashable, call: Callable[..., tuple[torch.Tensor, ...]], inputs: Sequence[torch.Tensor]
    ) -> tuple[torch.Tensor, ...]:
        """What `call` makes of `inputs`, good until the next run of its kind; the kind tells calls apart."""


class DeviceRows:
    """The steps of sampling, for a device that it takes long to hear from.

    Args:
        launcher: What launches them; None launches them one by one.
    """

    def __init__(self, launcher: RowLauncher | None = None) -> None:
        self._launcher = launcher
        # Recordings know one object that says what entries stand for, which has to live as long as they do.
        self._ids: RowIds | None = None

    def process(self, logits: torch.Tensor, groups: Sequence[RowGroup]) -> torch.Tensor:
        """What `process_logits` gives, good until the next call."""
        adjusted = adjust_logits(logits, groups)
        if all(group.params.is_greedy for group in groups):
            return adjusted
        table = [row for group in groups for row in [_effective(group.params, logits.shape[1])] * len(group)]
        options = upload(table, torch.float64, logits.device)
        used = _Options.of(table, logits.shape[1])
        [truncated] = self._run(used, partial(_truncate, used), (adjusted, options))
        return truncated

    def choose(self, processed: torch.Tensor, keys: Sequence[NoiseKey | None]) -> torch.Tensor:
        """What `choose_tokens` gives, good until the next call."""
        drawn = [key for key in keys if key is not None]
        if not drawn:
            return processed.argmax(dim=-1)
        starts = noise_starts([key or drawn[0] for key in keys], processed.device)
        [tokens] = self._run("choose", _choose, (processed, starts))
        if len(drawn) == len(keys):
            return tokens
        is_drawn = upload([key is not None for key in keys], torch.bool, processed.device)
        return torch.where(is_drawn, tokens, processed.argmax(dim=-1))

    def rank(
        self,
        processed: torch.Tensor,
        keys: Sequence[NoiseKey | None],
        count: int,
        ids: RowIds | None = None,
    ) -> Ranking:
        """The highest entries of each row plus its noise.

        Args:
            processed: Rows from `process`.
            keys: Per row the key of its noise; None has none.
            count: How many entries, 1 at least.
            ids: What the entries of a row stand for; None are tokens by their places. Where it is not the
                same at every call, most are launched one by one.
        """
        drawn = [key for key in keys if key is not None]
        wanted = Ranks(min(count, processed.shape[1]), bool(drawn), ids)
        inputs = [processed]
        if drawn:
            inputs.append(noise_starts([key or drawn[0] for key in keys], processed.device))
            inputs.append(upload([key is not None for key in keys], torch.bool, processed.device))
        self._ids = self._ids or ids
        call = partial(_rank, wanted)
        if ids is not None and ids is not self._ids:
            return Ranking.fetch(*call(*inputs))
        kind = (wanted.count, wanted.has_noise, ids is None)
        return Ranking.fetch(*self._run(kind, call, tuple(inputs)))

    def _run(
        self,
        kind: Hashable,
        call: Callable[..., tuple[torch.Tensor, ...]],
        inputs: tuple[torch.Tensor, ...],
    ) -> tuple[torch.Tensor, ...]:
        return call(*inputs) if self._launcher is None else self._launcher.run(kind, call, inputs)


def live_bytes(num_rows: int, vocab_size: int) -> int:
    """What a call on so many rows takes while it runs, its inputs and results left out."""
    return _LIVE_TENSORS * 8 * min(num_rows * vocab_size, max(CHUNK_ELEMENTS, vocab_size))


@dataclass(frozen=True, slots=True)
class _Options:
    """Which options the rows of a step use.

    Attributes:
        num_top: Entries that top_k looks at; 0 if no row uses it.
        has_top_p, has_min_p: Whether any does.
    """

    num_top: int
    has_top_p: bool
    has_min_p: bool

    @classmethod
    def of(cls, table: Sequence[Sequence[float]], vocab_size: int) -> "_Options":
        _, top_k, top_p, floors = map(max, zip(*([t, k, -p, f] for t, k, p, f in table), strict=True))
        num_top = 0 if not top_k else max(_SMALLEST_TOP, 1 << (int(top_k) - 1).bit_length())
        return cls(min(num_top, vocab_size), -top_p < math.inf, floors > -math.inf)


def _effective(params: SamplingParams, vocab_size: int) -> tuple[float, float, float, float]:
    """Temperature, top_k, top_p and the logarithm of min_p, neutral where they change nothing."""
    temperature, top_k, top_p, min_p = truncation(params)
    if not temperature:
        return 0.0, 0, math.inf, -math.inf
    return (
        temperature,
        top_k if 0 < top_k < vocab_size else 0,
        top_p if top_p < 1.0 else math.inf,
        math.log(min_p) if min_p > 0.0 else -math.inf,
    )


def _truncate(used: _Options, rows: torch.Tensor, options: torch.Tensor) -> tuple[torch.Tensor]:
    """What `process_logits` does from the temperature on.

    Args:
        used: What of it is done.
        rows: float32 [num_rows, vocab_size].
        options: float64 [num_rows, 4], see `_effective`.
    """
    return (torch.cat([_truncate_chunk(used, rows[part], options[part]) for part in _parts(rows)]),)


def _truncate_chunk(used: _Options, rows: torch.Tensor, options: torch.Tensor) -> torch.Tensor:
    # Padding rows may hold anything, and an index out of bounds would be the end of the whole process on a
    # GPU: what is gathered is clamped.
    temperature, top_k, top_p, floor = torch.split(options, 1, dim=1)
    is_sampled = temperature > 0.0
    divisor = torch.where(is_sampled, temperature, 1.0).float()
    scaled = torch.where(is_sampled, (rows - rows.amax(dim=-1, keepdim=True)) / divisor, rows)
    if used.num_top:
        highest = scaled.topk(used.num_top, dim=-1).values
        last = highest.gather(1, (top_k.long() - 1).clamp_(0, used.num_top - 1))
        scaled.masked_fill_(scaled < torch.where(top_k > 0, last, -torch.inf), -torch.inf)
    if used.has_top_p:
        probs = scaled.softmax(dim=-1)
        ranked = probs.sort(dim=-1, descending=True).values
        before = ranked.cumsum(dim=-1, dtype=torch.float64) - ranked
        kept = (before < top_p).sum(dim=-1, keepdim=True)
        border = ranked.gather(1, (kept - 1).clamp_(min=0))
        above = probs > border
        equal = probs == border
        # The first so many of the tokens that equal the last kept one.
        equal &= equal.cumsum(dim=-1) <= kept - above.sum(dim=-1, keepdim=True)
        scaled.masked_fill_(~(above | equal), -torch.inf)
    if used.has_min_p:
        scaled.masked_fill_(scaled < floor.float(), -torch.inf)
    return scaled


def _choose(rows: torch.Tensor, starts: torch.Tensor) -> tuple[torch.Tensor]:
    """The token of each row under the noise that begins at its start."""
    parts = _parts(rows)
    return (
        torch.cat(
            [gumbel_rows(starts[part], rows.shape[1]).add_(rows[part]).argmax(dim=-1) for part in parts]
        ),
    )


def _rank(wanted: Ranks, rows: torch.Tensor, *noise: torch.Tensor) -> tuple[torch.Tensor, ...]:
    parts = [rank(wanted, rows[part], [each[part] for each in noise]) for part in _parts(rows)]
    return tuple(map(torch.cat, zip(*parts, strict=True)))


def _parts(rows: torch.Tensor) -> list[slice]:
    """The rows, a few at a time where they are long."""
    return [slice(part[0], part[-1] + 1) for part in chunks(range(len(rows)), rows.shape[1])]
