"""The one pipeline from raw logits to the distribution that tokens are chosen from.

It serves plain decoding, every row of a draft under verification, and the draft models themselves. The order
is fixed:

1. repetition_penalty, over prompt and output: a seen token's logit is divided if positive, else multiplied
   (Keskar et al. 2019, Hugging Face's form)
2. frequency_penalty and presence_penalty, over the output (OpenAI's)
3. logit_bias
4. the grammar's mask; allowed_token_ids, bad_words; min_tokens: no EOS or stop id before that many tokens
   -- temperature 0 stops here: the highest logit is taken, the lowest id among equals --
5. temperature
6. top_k: the k highest logits; all that equal the k-th stay
7. top_p: the smallest set of most likely tokens whose mass reaches p; the lowest ids among equals
8. min_p: tokens with at least min_p times the highest probability

Everything is float32, and a row's result depends on nothing but the row, bit for bit. Options that no row
uses cost nothing. Nothing on the way looks at a number on the host, grammars apart and, on a CPU, where a
top_p needs the order of more tokens than most do: on a GPU that would be a wait for the forward pass.
"""

import math
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import torch

from engine.sampling.masking import mask_rows
from engine.sampling.row_group import RowGroup
from engine.sampling.uploading import upload
from engine.sampling_params import SamplingParams

# Elements of [rows, vocab_size] worked on at once where temporaries are needed: 16 MiB as float64.
CHUNK_ELEMENTS = 2**21

# top_p needs the order of the most likely tokens only; rows that these do not satisfy are sorted whole.
_TOP_P_CANDIDATES = 1024

_SMALLEST_TEMPERATURE = torch.finfo(torch.float32).tiny
"""Below the smallest normal float32 a temperature would be 0, and its effect is that of the smallest."""

_PENALTIES = (1e-30, 1e30)
"""Repetition penalties beyond have the effect of these: what float32 makes of them is 0 or infinite."""


class RowOperators(Protocol):
    """Operators that do in a pass or two what plain torch takes dozens for; the C++ ones of a CPU.

    Attributes:
        truncate_rows: Steps 5 to 8. Takes logits, and per row four floats, all in one list: temperature (0
            leaves a row as it is), top_k, top_p, min_p; returns rows of their own.
        choose_rows: Steps 5 to 8 and the choice, with no row written. Takes logits, numbers of rows, and for
            each of these four floats and where its noise begins; returns a list of tokens, the likeliest
            where the temperature is 0.
        top_rows: The highest entries of each row plus its Gumbel noise, highest first and the lowest id among
            equals. Takes logits, int64 [num_rows], where the noise of each begins, and how many; returns
            tokens, int64, and scores, float64, both [num_rows, count]: -inf where no more can be chosen.
    """

    @property
    def truncate_rows(self) -> Any:
        """See above."""

    @property
    def choose_rows(self) -> Any:
        """See above."""

    @property
    def top_rows(self) -> Any:
        """See above."""


def process_logits(
    logits: torch.Tensor, groups: Sequence[RowGroup], operators: RowOperators | None = None
) -> torch.Tensor:
    """Applies the sampling options of each row.

    Args:
        logits: float32 [num_rows, vocab_size]; left as it is.
        groups: Whose rows these are, in order.
        operators: What to do it with; None takes plain torch.

    Returns:
        float32 [num_rows, vocab_size]: greedy rows as logits whose argmax is the token, the others as log
        probabilities up to a constant, -inf where a token cannot be chosen. `logits` itself when there is
        nothing to do.

    Raises:
        ValueError: The number of rows is not that of the groups.
    """
    adjusted = adjust_logits(logits, groups)
    if all(group.params.is_greedy for group in groups):
        return adjusted
    if operators is not None:
        return _truncate_with(operators, adjusted, groups)
    if adjusted is logits:
        adjusted = logits.clone(memory_format=torch.contiguous_format)
    _apply_temperature(adjusted, groups)
    _apply_top_k(adjusted, groups)
    _apply_top_p(adjusted, groups)
    _apply_min_p(adjusted, groups)
    return adjusted


def adjust_logits(logits: torch.Tensor, groups: Sequence[RowGroup]) -> torch.Tensor:
    """Applies what depends on which token an entry stands for, steps 1 to 4.

    Arguments and errors are those of `process_logits`.

    Returns:
        float32 [num_rows, vocab_size]; `logits` itself when there is nothing to do.
    """
    num_rows = sum(len(group) for group in groups)
    if logits.shape[0] != num_rows:
        raise ValueError(f"logits have {logits.shape[0]} rows, but the requests have {num_rows}")
    if not any(depends_on_ids(group) for group in groups):
        return logits
    logits = logits.clone(memory_format=torch.contiguous_format)
    begin = 0
    for group in groups:
        rows = logits[begin : begin + len(group)]
        _penalise(rows, group)
        _bias(rows, group)
        mask_rows(rows, group)
        begin += len(group)
    return logits


def _truncate_with(operators: RowOperators, logits: torch.Tensor, groups: Sequence[RowGroup]) -> torch.Tensor:
    options = [option for group in _per_row(groups) for option in truncation(group.params)]
    truncated: torch.Tensor = operators.truncate_rows(logits, options)
    return truncated


def truncation(params: SamplingParams) -> tuple[float, float, float, float]:
    """Temperature, 0 for greedy requests, top_k, top_p and min_p, as `RowOperators` take them."""
    temperature = 0.0 if params.is_greedy else max(params.temperature, _SMALLEST_TEMPERATURE)
    return temperature, params.top_k, params.top_p, params.min_p


def chunks(rows: Sequence[int], vocab_size: int) -> Iterator[Sequence[int]]:
    """Splits rows so that a chunk of [rows, vocab_size] holds about CHUNK_ELEMENTS."""
    size = max(1, CHUNK_ELEMENTS // vocab_size)
    for begin in range(0, len(rows), size):
        yield rows[begin : begin + size]


def depends_on_ids(group: RowGroup) -> bool:
    """Whether what becomes of an entry of a row depends on which token it stands for."""
    params = group.params
    return (
        params.repetition_penalty != 1.0
        or params.frequency_penalty != 0.0
        or params.presence_penalty != 0.0
        or bool(params.logit_bias)
        or group.matcher is not None
        or bool(params.bad_words)
        or bool(params.allowed_token_ids)
        or bool(group.rows_below_min_tokens())
    )


def _penalise(rows: torch.Tensor, group: RowGroup) -> None:
    params = group.params
    if params.repetition_penalty != 1.0:
        low, high = _PENALTIES
        penalty = min(max(params.repetition_penalty, low), high)
        seen = _counts(group.token_ids, group.paths, rows) > 0
        rows.copy_(torch.where(seen, torch.where(rows < 0, rows * penalty, rows / penalty), rows))
    if params.frequency_penalty != 0.0 or params.presence_penalty != 0.0:
        counts = _counts(group.token_ids[group.num_prompt_tokens :], group.paths, rows)
        rows -= params.frequency_penalty * counts
        rows -= params.presence_penalty * (counts > 0)


def _counts(token_ids: Sequence[int], paths: Sequence[tuple[int, ...]], rows: torch.Tensor) -> torch.Tensor:
    """How often each token occurs in `token_ids` and the row's path, float32 like `rows`."""
    counts = torch.zeros_like(rows)
    history = upload(token_ids, torch.int64, rows.device)
    # Whole numbers add up exactly in float32, in any order.
    counts[0].index_add_(0, history, torch.ones_like(history, dtype=rows.dtype))
    counts[1:] = counts[0]
    row_of = [row for row, path in enumerate(paths) for _ in path]
    if row_of:
        tokens = [token for path in paths for token in path]
        index = upload([row_of, tokens], torch.int64, rows.device)
        one = torch.ones(len(tokens), dtype=rows.dtype, device=rows.device)
        counts.index_put_((index[0], index[1]), one, accumulate=True)
    return counts


def _bias(rows: torch.Tensor, group: RowGroup) -> None:
    if not group.params.logit_bias:
        return
    ids, biases = zip(*group.params.logit_bias, strict=True)
    columns = upload(ids, torch.int64, rows.device)
    values = upload(biases, rows.dtype, rows.device)
    rows.index_add_(1, columns, values.expand(len(group), -1))


def _column(values: Sequence[float], logits: torch.Tensor) -> torch.Tensor:
    return upload(values, logits.dtype, logits.device)[:, None]


def _index(rows: Sequence[int], logits: torch.Tensor) -> torch.Tensor:
    return upload(rows, torch.int64, logits.device)


def _apply_temperature(logits: torch.Tensor, groups: Sequence[RowGroup]) -> None:
    # The highest logit becomes 0 first, so that no temperature, however small, can overflow.
    values = [max(group.params.temperature, _SMALLEST_TEMPERATURE) for group in groups for _ in group.paths]
    rows = [row for row, group in enumerate(_per_row(groups)) if not group.params.is_greedy]
    for chunk in chunks(rows, logits.shape[1]):
        index = _index(chunk, logits)
        picked = logits[index]
        picked -= picked.amax(dim=-1, keepdim=True)
        picked /= _column([values[row] for row in chunk], logits)
        logits[index] = picked


def _apply_top_k(logits: torch.Tensor, groups: Sequence[RowGroup]) -> None:
    vocab_size = logits.shape[1]
    limits = [group.params.top_k for group in _per_row(groups)]
    rows = [
        row
        for row, group in enumerate(_per_row(groups))
        if not group.params.is_greedy and 0 < group.params.top_k < vocab_size
    ]
    for chunk in chunks(rows, vocab_size):
        index = _index(chunk, logits)
        picked = logits[index]
        highest = picked.topk(max(limits[row] for row in chunk), dim=-1).values
        last = _index([limits[row] - 1 for row in chunk], logits)[:, None]
        picked.masked_fill_(picked < highest.gather(1, last), -torch.inf)
        logits[index] = picked


def _apply_top_p(logits: torch.Tensor, groups: Sequence[RowGroup]) -> None:
    masses = [group.params.top_p for group in _per_row(groups)]
    rows = [
        row
        for row, group in enumerate(_per_row(groups))
        if not group.params.is_greedy and group.params.top_p < 1.0
    ]
    # Whether the likeliest tokens were enough is a question that only a CPU answers without a wait.
    candidates = _TOP_P_CANDIDATES if logits.device.type == "cpu" else logits.shape[1]
    for chunk in chunks(rows, logits.shape[1]):
        _keep_mass(logits, chunk, [masses[row] for row in chunk], candidates)


def _keep_mass(logits: torch.Tensor, rows: Sequence[int], masses: Sequence[float], candidates: int) -> None:
    """Keeps the most likely tokens of each row up to its mass, looking at `candidates` tokens at first."""
    vocab_size = logits.shape[1]
    index = _index(rows, logits)
    picked = logits[index]
    probs = picked.softmax(dim=-1)
    candidates = min(candidates, vocab_size)
    ranked = probs.topk(candidates, dim=-1).values  # [rows, candidates], highest first
    before = ranked.cumsum(dim=-1, dtype=torch.float64) - ranked
    wanted = upload(masses, torch.float64, logits.device)[:, None]
    kept = (before < wanted).sum(dim=-1, keepdim=True)
    # Of a row that is no numbers nothing is kept, which must not end the step of the others.
    border = ranked.gather(1, (kept - 1).clamp_(min=0))
    above = probs > border
    equal = probs == border
    room = kept - above.sum(dim=-1, keepdim=True)
    # Which of the tokens that equal the last kept one stay is settled by their ids: the first so many.
    equal &= equal.cumsum(dim=-1) <= room
    picked.masked_fill_(~(above | equal), -torch.inf)
    short = [] if candidates == vocab_size else (kept[:, 0] == candidates).nonzero()[:, 0].tolist()
    for place in short:
        picked[place] = logits[rows[place]]
    logits[index] = picked
    if short:
        _keep_mass(logits, [rows[place] for place in short], [masses[place] for place in short], vocab_size)


def _apply_min_p(logits: torch.Tensor, groups: Sequence[RowGroup]) -> None:
    # The temperature has left the highest logit at 0, and no truncation removes it: a ratio of
    # probabilities is a difference from it.
    limits = [group.params.min_p for group in _per_row(groups)]
    rows = [
        row
        for row, group in enumerate(_per_row(groups))
        if not group.params.is_greedy and group.params.min_p > 0.0
    ]
    for chunk in chunks(rows, logits.shape[1]):
        index = _index(chunk, logits)
        picked = logits[index]
        picked.masked_fill_(picked < _column([math.log(limits[row]) for row in chunk], logits), -torch.inf)
        logits[index] = picked


def _per_row(groups: Sequence[RowGroup]) -> Iterator[RowGroup]:
    for group in groups:
        for _ in group.paths:
            yield group
