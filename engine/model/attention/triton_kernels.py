"""The Triton kernels of paged attention; `triton.py` launches them.

One kernel serves prompts, single tokens and draft trees. A program takes one tile: a few neighbouring
tokens of one sequence with all query heads of one key/value head, folded into rows, and a range of that
sequence's slots. Where several tiles share the same tokens, each leaves a partial result and `combine`
joins them (flash-decoding: Dao et al. 2023, "Flash-Decoding for long-context inference"). The softmax runs
over blocks of slots with a running maximum (Milakov and Gimelshein 2018; Dao et al. 2022, algorithm 1), in
float32 and to base two.

A row of a tile is a (token, head) pair: row r is token first + r // GROUP and head r % GROUP of the group.
Pointers are not checked: the tables must hold what `tiles.py` says.
"""

import triton
import triton.language as tl

from engine.model.attention.triton_rounding import narrowed_numbers

TILE_FIELDS = tl.constexpr(7)
MERGE_FIELDS = tl.constexpr(4)
LOG2_E = tl.constexpr(1.4426950408889634)
# Pieces of one copy, which begin anywhere: each alignment would be compiled anew, in the middle of a step.
TABLES = ["slots", "tiles", "merges", "context", "context_positions", "positions", "visible", "ancestors"]


@triton.jit(do_not_specialize_on_alignment=TABLES)
def store(  # noqa: PLR0913, a kernel has no objects to bundle its arguments in
    key: tl.tensor,
    value: tl.tensor,
    keys: tl.tensor,
    values: tl.tensor,
    slots: tl.tensor,
    key_head_stride: int,
    key_token_stride: int,
    value_head_stride: int,
    value_token_stride: int,
    NUM_HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    LIMIT: tl.constexpr,
) -> None:
    """Writes a token's keys and values to its slot, or nowhere where that is negative; a program is a token.

    Shapes:
        key, value: the new [NUM_HEADS, T, dim], strided.
        keys, values: the cache, [num_slots, NUM_HEADS, dim], of any floating type; that of float8_e4m3fn as
            bytes.
        slots: int64 [T].

    LIMIT is the largest number of a cache of another type than the new numbers', 0 where it is the same.
    """
    token = tl.program_id(0)
    slot = tl.load(slots + token)
    head = tl.arange(0, BLOCK_H)[:, None]
    dim = tl.arange(0, BLOCK_K)[None, :]
    mask = (head < NUM_HEADS) & (dim < KEY_DIM) & (slot >= 0)
    new = tl.load(key + head * key_head_stride + token * key_token_stride + dim, mask=mask)
    new = narrowed_numbers(new, keys.dtype.element_ty, LIMIT)
    tl.store(keys + (slot * NUM_HEADS + head) * KEY_DIM + dim, new, mask=mask)
    dim = tl.arange(0, BLOCK_V)[None, :]
    mask = (head < NUM_HEADS) & (dim < VALUE_DIM) & (slot >= 0)
    new = tl.load(value + head * value_head_stride + token * value_token_stride + dim, mask=mask)
    new = narrowed_numbers(new, values.dtype.element_ty, LIMIT)
    tl.store(values + (slot * NUM_HEADS + head) * VALUE_DIM + dim, new, mask=mask)


@triton.jit(do_not_specialize_on_alignment=TABLES)
def attend(  # noqa: PLR0913, PLR0915, a kernel has no objects to bundle its arguments in
    query: tl.tensor,
    keys: tl.tensor,
    values: tl.tensor,
    out: tl.tensor,
    partial_out: tl.tensor,
    partial_weight: tl.tensor,
    tiles: tl.tensor,
    context: tl.tensor,
    context_positions: tl.tensor,
    positions: tl.tensor,
    visible: tl.tensor,
    ancestors: tl.tensor,
    sinks: tl.tensor,
    scale: float,
    softcap: float,
    window: int,
    query_head_stride: int,
    query_token_stride: int,
    GROUP: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    HAS_TREES: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    WIDE_DOTS: tl.constexpr,
) -> None:
    """Attends the rows of a tile to its range of slots; a program is (tile, key/value head).

    Shapes:
        query: [num_heads, T, KEY_DIM], strided.
        keys, values: the cache, [num_slots, num_kv_heads, dim], of any floating type; what is read of it is
            converted to the query's, in which is multiplied.
        out: [T, num_heads, VALUE_DIM], for tiles that have their tokens to themselves.
        partial_out: float32 [num_partials, num_kv_heads, BLOCK_M, VALUE_DIM], for the others.
        partial_weight: float32 [num_partials, num_kv_heads, BLOCK_M]: log2 of the softmax's denominator.
        tiles: int32 [num_tiles, TILE_FIELDS].
        context, context_positions: int64, all sequences' slots and their positions, one after the other.
        positions, visible, ancestors: int64 [T], as in InputBatch.
        sinks: [num_heads].

    With WIDE_DOTS 16-bit operands are widened before they are multiplied.
    """
    tile = tiles + tl.program_id(0) * TILE_FIELDS
    first, end, offset = tl.load(tile), tl.load(tile + 1), tl.load(tile + 2)
    slot_begin, slot_end, num_committed = tl.load(tile + 3), tl.load(tile + 4), tl.load(tile + 5)
    partial = tl.load(tile + 6)
    kv_head, num_kv_heads = tl.program_id(1), tl.num_programs(1)
    row = tl.arange(0, BLOCK_M)
    token, head = first + row // GROUP, kv_head * GROUP + row % GROUP
    is_row = token < end
    seen = tl.load(visible + token, mask=is_row, other=0)
    begins = head * query_head_stride + token * query_token_stride
    key_dim, value_dim = tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_V)
    q = _widened(_load_rows(query, begins, is_row, key_dim, KEY_DIM), WIDE_DOTS)
    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    result = tl.zeros([BLOCK_M, BLOCK_V], tl.float32)
    for start in range(slot_begin, slot_end, BLOCK_N):
        index = start + tl.arange(0, BLOCK_N)
        is_slot = index < slot_end
        place = tl.load(context + offset + index, mask=is_slot, other=0) * num_kv_heads + kv_head
        k = _load_rows(keys, place * KEY_DIM, is_slot, key_dim, KEY_DIM).to(query.dtype.element_ty)
        scores = tl.dot(q, tl.trans(_widened(k, WIDE_DOTS)), input_precision="ieee") * scale
        if HAS_SOFTCAP:
            scores = _capped(scores, softcap)
        mask = index[None, :] < seen[:, None]
        if HAS_TREES:
            mask |= _is_ancestor(ancestors + token, is_row, index - num_committed)
        if HAS_WINDOW:
            of_slot = context_positions + offset + index
            mask &= _is_near(positions + token, is_row, of_slot, index, num_committed, window)
        scores = tl.where(mask & is_slot[None, :], scores * LOG2_E, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, 1))
        base = tl.where(new_top == float("-inf"), 0.0, new_top)
        weights, rescale = tl.exp2(scores - base[:, None]), tl.exp2(top - base)
        v = _load_rows(values, place * VALUE_DIM, is_slot, value_dim, VALUE_DIM).to(query.dtype.element_ty)
        rounded = _widened(weights.to(v.dtype), WIDE_DOTS)
        weighted = tl.dot(rounded, _widened(v, WIDE_DOTS), input_precision="ieee")
        result = result * rescale[:, None] + weighted
        total = total * rescale + tl.sum(weights, 1)
        top = new_top
    if partial >= 0:
        result, weight = _normalized(result, total, top)
        place = (partial * num_kv_heads + kv_head) * BLOCK_M + row
        tl.store(partial_weight + place, weight, mask=is_row)
        _store_rows(partial_out, place * VALUE_DIM, is_row, value_dim, VALUE_DIM, result)
    else:
        if HAS_SINKS:
            result, total, top = _with_sinks(result, total, top, sinks + head, is_row)
        result, _ = _normalized(result, total, top)
        place = token * (num_kv_heads * GROUP) + head
        _store_rows(out, place * VALUE_DIM, is_row, value_dim, VALUE_DIM, result)


@triton.jit(do_not_specialize_on_alignment=TABLES)
def combine(  # noqa: PLR0913, a kernel has no objects to bundle its arguments in
    out: tl.tensor,
    partial_out: tl.tensor,
    partial_weight: tl.tensor,
    merges: tl.tensor,
    sinks: tl.tensor,
    GROUP: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_S: tl.constexpr,
    HAS_SINKS: tl.constexpr,
) -> None:
    """Joins the partial results of the tiles that share their tokens; a program is (token, head).

    Shapes:
        out, partial_out, partial_weight, sinks: see `attend`.
        merges: int32 [num_merges, MERGE_FIELDS]; those of no partial results do nothing.
    """
    merge = merges + tl.program_id(0) * MERGE_FIELDS
    token, row_token = tl.load(merge), tl.load(merge + 1)
    first_partial, num_partials = tl.load(merge + 2), tl.load(merge + 3)
    if num_partials == 0:
        return
    head, num_heads = tl.program_id(1), tl.num_programs(1)
    split, dim = tl.arange(0, BLOCK_S), tl.arange(0, BLOCK_V)
    is_split = split < num_partials
    place = (first_partial + split) * (num_heads // GROUP) + head // GROUP
    place = place * BLOCK_M + row_token * GROUP + head % GROUP
    weight = tl.load(partial_weight + place, mask=is_split, other=float("-inf"))
    top = tl.max(weight, 0)
    if HAS_SINKS:
        sink = tl.load(sinks + head).to(tl.float32) * LOG2_E
        top = tl.maximum(top, sink)
    weight = tl.exp2(weight - top)
    total = tl.sum(weight, 0)
    if HAS_SINKS:
        total += tl.exp2(sink - top)
    at = partial_out + place[:, None] * VALUE_DIM + dim[None, :]
    parts = tl.load(at, mask=is_split[:, None] & (dim < VALUE_DIM)[None, :], other=0.0)
    result = tl.sum(parts * weight[:, None], 0) / total
    at = out + (token * num_heads + head) * VALUE_DIM + dim
    tl.store(at, result.to(out.dtype.element_ty), mask=dim < VALUE_DIM)


@triton.jit
def _load_rows(
    base: tl.tensor, begins: tl.tensor, is_row: tl.tensor, dim: tl.tensor, DIM: tl.constexpr
) -> tl.tensor:
    """[rows, dim] from where rows begin; zeros where there is no row, and behind DIM."""
    mask = is_row[:, None] & (dim < DIM)[None, :]
    return tl.load(base + begins[:, None] + dim[None, :], mask=mask, other=0.0)


@triton.jit
def _store_rows(
    base: tl.tensor,
    begins: tl.tensor,
    is_row: tl.tensor,
    dim: tl.tensor,
    DIM: tl.constexpr,
    block: tl.tensor,
) -> None:
    mask = is_row[:, None] & (dim < DIM)[None, :]
    tl.store(base + begins[:, None] + dim[None, :], block.to(base.dtype.element_ty), mask=mask)


@triton.jit
def _widened(block: tl.tensor, WIDE_DOTS: tl.constexpr) -> tl.tensor:
    if WIDE_DOTS:
        block = block.to(tl.float32)
    return block


@triton.jit
def _capped(scores: tl.tensor, softcap: float) -> tl.tensor:
    # tanh by way of exp, which alone is in every build of Triton; exp's overflow gives the right limit.
    return softcap * (1.0 - 2.0 / (tl.exp(2.0 * scores / softcap) + 1.0))


@triton.jit
def _is_ancestor(words: tl.tensor, is_row: tl.tensor, node: tl.tensor) -> tl.tensor:
    """Bool [rows, slots]: whether draft node `node` (from 0; less for committed tokens) is an ancestor."""
    word = tl.load(words, mask=is_row, other=0)
    bits = (word[:, None] >> tl.maximum(node, 0)[None, :].to(tl.int64)) & 1
    return (bits == 1) & (node >= 0)[None, :]


@triton.jit
def _is_near(
    of_row: tl.tensor,
    is_row: tl.tensor,
    of_key: tl.tensor,
    index: tl.tensor,
    num_committed: tl.tensor,
    window: int,
) -> tl.tensor:
    """Bool [rows, slots]: whether a slot's position is in a row's window. Committed slots lie in order."""
    at = tl.load(of_row, mask=is_row, other=0)
    position = tl.load(of_key, mask=index >= num_committed, other=0)
    position = tl.where(index < num_committed, index, position)
    return at[:, None] - position[None, :] < window


@triton.jit
def _with_sinks(
    result: tl.tensor, total: tl.tensor, top: tl.tensor, sinks: tl.tensor, is_row: tl.tensor
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """The sums with each row's sink in the denominator."""
    sink = tl.load(sinks, mask=is_row, other=0.0).to(tl.float32) * LOG2_E
    new_top = tl.maximum(top, sink)
    rescale = tl.exp2(top - new_top)
    return result * rescale[:, None], total * rescale + tl.exp2(sink - new_top), new_top


@triton.jit
def _normalized(result: tl.tensor, total: tl.tensor, top: tl.tensor) -> tuple[tl.tensor, tl.tensor]:
    """The softmax's result and log2 of its denominator; rows that saw nothing get 0 and minus infinity."""
    some = tl.where(total == 0.0, 1.0, total)
    weight = tl.where(total == 0.0, float("-inf"), top + tl.log2(some))
    return result / some[:, None], weight
