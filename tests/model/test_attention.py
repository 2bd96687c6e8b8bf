"""The contract of attention backends, and the bits of the CPU's."""

import random
import zlib
from collections.abc import Sequence

import pytest
import torch

from engine.model.attention.interface import AttentionBackend, LayerOptions
from engine.model.input_batch import InputBatch, SequenceSlice
from engine.model.kv_cache import LayerShape, PagedKVCache, narrowed
from engine.token_tree import TokenTree
from tests.operators import BACKENDS, make_backend, need_operators

BLOCK_SIZE = 16
NUM_BLOCKS = 64
TREE = TokenTree(tuple(range(1, 9)), (0, 0, 1, 2, 3, 3, 6, 7))
PLAIN = LayerOptions(scale=0.3, window=None, softcap=None, sinks=None)
OPTIONS = {
    "plain": PLAIN,
    "short window": LayerOptions(scale=0.3, window=3, softcap=None, sinks=None),
    "long window": LayerOptions(scale=0.3, window=70, softcap=None, sinks=None),
    "softcap": LayerOptions(scale=0.3, window=None, softcap=2.0, sinks=None),
    "sinks": LayerOptions(
        scale=0.3, window=None, softcap=None, sinks=torch.tensor([3.0, -1.0, 0.5, 9.0] * 3)
    ),
    "all": LayerOptions(scale=0.3, window=7, softcap=1.5, sinks=torch.linspace(-2, 2, 12)),
}
# Heads, key/value heads, key dimension, value dimension: odd ones, and those of real models.
CACHES = [torch.float32, torch.float16, torch.bfloat16]
SHAPES = [(12, 12, 8, 8), (12, 4, 64, 64), (12, 2, 128, 80), (12, 1, 5, 11), (12, 3, 96, 128)]


class Sequences:
    """Random queries, keys and values of a few token sequences, by path, and a cache to run them through."""

    def __init__(self, shape: tuple[int, int, int, int], dtype: torch.dtype = torch.float32) -> None:
        self.num_heads, self.num_kv_heads, self.key_dim, self.value_dim = shape
        layer = LayerShape(self.num_kv_heads, self.key_dim, self.value_dim)
        self.cache = PagedKVCache([layer], NUM_BLOCKS, BLOCK_SIZE, dtype, torch.device("cpu"))
        self.cache.keys[0].fill_(float("nan"))
        self.cache.values[0].fill_(float("nan"))

    def token(self, name: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Query [H, K], key [G, K] and value [G, V] of a token, always the same for a name."""
        generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
        return (
            torch.randn(self.num_heads, self.key_dim, generator=generator),
            torch.randn(self.num_kv_heads, self.key_dim, generator=generator),
            torch.randn(self.num_kv_heads, self.value_dim, generator=generator),
        )

    def run(
        self,
        backend: AttentionBackend,
        pieces: Sequence[tuple[SequenceSlice, Sequence[str]]],
        options: LayerOptions,
    ) -> list[torch.Tensor]:
        """One pass; per piece the output [num_tokens, H, V]."""
        batch = InputBatch.build([piece for piece, _ in pieces], BLOCK_SIZE, torch.device("cpu"))
        columns = zip(*(self.token(name) for _, names in pieces for name in names), strict=True)
        query, key, value = (torch.stack(column, dim=1)[None] for column in columns)
        out = backend.plan(batch, self.cache).attend(0, query, key, value, options)[0]
        return list(torch.split(out, [len(piece) for piece, _ in pieces]))

    def exact(self, path: Sequence[str], options: LayerOptions) -> torch.Tensor:
        """What the last token of a path gets, [H, V], in float64, of what the cache holds."""
        tokens = [self.token(name) for name in path]
        group = self.num_heads // self.num_kv_heads
        query = tokens[-1][0].double()
        keys, values = (
            narrowed(torch.stack(column), self.cache.dtype).double().repeat_interleave(group, dim=1)
            for column in list(zip(*tokens, strict=True))[1:]
        )
        scores = torch.einsum("hd,nhd->hn", query, keys) * options.scale
        if options.softcap is not None:
            scores = torch.tanh(scores / options.softcap) * options.softcap
        if options.window is not None:
            scores[:, : max(0, len(path) - options.window)] = float("-inf")
        if options.sinks is not None:
            scores = torch.cat([scores, options.sinks.double()[:, None]], dim=1)
        weights = scores.softmax(dim=1)[:, : len(path)]
        return torch.einsum("hn,nhv->hv", weights, values)


def names(sequence: str, start: int, end: int) -> list[str]:
    return [f"{sequence}{index}" for index in range(start, end)]


def tree_names(sequence: str, tree: TokenTree) -> list[str]:
    return [
        f"{sequence} node {'-'.join(map(str, tree.path_tokens(node)))}" for node in range(1, len(tree) + 1)
    ]


def scattered_tables(seed: int) -> list[list[int]]:
    blocks = list(range(NUM_BLOCKS))
    random.Random(seed).shuffle(blocks)
    return [blocks[begin : begin + 16] for begin in range(0, NUM_BLOCKS, 16)]


# What is done with scores does not depend on how keys are read.
CASES = [(wish, torch.float32) for wish in OPTIONS] + [
    (wish, dtype) for wish in ("plain", "long window", "all") for dtype in CACHES[1:]
]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("wish", "dtype"), CASES, ids=str)
@pytest.mark.parametrize("backend", BACKENDS)
def test_every_row_attends_to_its_own_past(
    backend: str, wish: str, shape: tuple[int, int, int, int], dtype: torch.dtype
) -> None:
    """Chunks, single tokens and trees of several sequences side by side, contexts of several lengths."""
    chosen, options, sequences = make_backend(backend), OPTIONS[wish], Sequences(shape, dtype)
    a, b, c, d = scattered_tables(1)
    for start, end in ((0, 3), (3, 100), (100, 127)):
        sequences.run(
            chosen, [(SequenceSlice([0] * (end - start), start, b), names("b", start, end))], options
        )
    first = [
        (SequenceSlice([0] * 130, 0, a), names("a", 0, 130)),
        (SequenceSlice([0], 127, b, TREE), names("b", 127, 128) + tree_names("b", TREE)),
        (SequenceSlice([0] * 2, 0, c, TREE), names("c", 0, 2) + tree_names("c", TREE)),
        (SequenceSlice([0], 0, d), names("d", 0, 1)),
    ]
    out_a, out_b, out_c, out_d = sequences.run(chosen, first, options)
    for index in (0, 1, 5, 63, 64, 65, 129):
        assert_close(out_a[index], sequences.exact(names("a", 0, index + 1), options))
    for sequence, num_committed, rows in (("b", 128, out_b), ("c", 2, out_c)):
        nodes = tree_names(sequence, TREE)
        for node in range(len(TREE) + 1):
            path = names(sequence, 0, num_committed) + [nodes[step - 1] for step in TREE.path(node)]
            assert_close(rows[len(rows) - 1 - len(TREE) + node], sequences.exact(path, options))
    assert_close(out_d[0], sequences.exact(names("d", 0, 1), options))


def assert_close(ours: torch.Tensor, exact: torch.Tensor) -> None:
    torch.testing.assert_close(ours.double(), exact, rtol=1e-4, atol=2e-5)


BIT_CASES = [
    *((wish, (12, 4, 64, 64), torch.float32) for wish in OPTIONS),
    *((wish, (12, 4, 64, 64), torch.float16) for wish in OPTIONS),
    ("plain", (12, 4, 64, 64), torch.bfloat16),
    # A head of its own for each query; more to a group than are read together; sizes that fill no register.
    ("plain", (12, 12, 16, 8), torch.float16),
    ("long window", (12, 2, 128, 80), torch.float16),
    ("plain", (12, 1, 5, 11), torch.float16),
]


@pytest.mark.parametrize(("wish", "shape", "dtype"), BIT_CASES, ids=str)
@pytest.mark.parametrize("num_tokens", [1, 5, 63, 64, 65, 130, 200])
def test_a_row_has_the_same_bits_wherever_it_is_computed(
    wish: str, shape: tuple[int, int, int, int], dtype: torch.dtype, num_tokens: int
) -> None:
    backend, options = make_backend("cpu"), OPTIONS[wish]
    last, path = num_tokens - 1, names("a", 0, num_tokens)
    tables = scattered_tables(2)

    def prepared(upto: int, table: Sequence[int]) -> Sequences:
        sequences = Sequences(shape, dtype)
        if upto:
            sequences.run(backend, [(SequenceSlice([0] * upto, 0, table), path[:upto])], options)
        return sequences

    def alone(table: Sequence[int]) -> torch.Tensor:
        piece = (SequenceSlice([0], last, table), path[last:])
        return prepared(last, table).run(backend, [piece], options)[0][-1]

    expected = alone(tables[0])
    assert torch.equal(alone(tables[1]), expected), "in other blocks"
    others = [(SequenceSlice([0], 0, [block]), [f"other {block}"]) for block in tables[3][:15]]
    for place in (0, 7, 15):
        own = (SequenceSlice([0], last, tables[0]), path[last:])
        outs = prepared(last, tables[0]).run(backend, [*others[:place], own, *others[place:]], options)
        assert torch.equal(outs[place][-1], expected), "among 15 others"
    for start in {0, last // 2, max(0, last - 17)}:
        piece = (
            SequenceSlice([0] * (last + 4 - start), start, tables[0]),
            path[start:] + names("late", 0, 3),
        )
        row = prepared(start, tables[0]).run(backend, [piece], options)[0][last - start]
        assert torch.equal(row, expected), f"in a chunk from {start}"
    for depth in {1, 2, 5} & set(range(1, num_tokens)):
        committed = num_tokens - depth
        parents = (0, 0, *range(2, depth + 1), 1)
        tree = TokenTree(tuple(range(len(parents))), parents)
        nodes = ["wrong", *path[committed:], "also wrong"]
        piece = (SequenceSlice([0], committed - 1, tables[0], tree), [path[committed - 1], *nodes])
        row = prepared(committed - 1, tables[0]).run(backend, [piece], options)[0][1 + depth]
        assert torch.equal(row, expected), f"as a node of depth {depth}"


@pytest.mark.parametrize("wish", ["plain", "long window", "all"])
@pytest.mark.parametrize("kv_heads", [1, 3])
@pytest.mark.parametrize("num_tokens", [1, 5, 150])
def test_the_number_of_threads_does_not_show(num_tokens: int, kv_heads: int, wish: str) -> None:
    """Few rows are shared out by parts of their texts and by heads, many are not."""
    outs = []
    before = torch.get_num_threads()
    try:
        for threads in (1, 2, 3, 16):
            torch.set_num_threads(threads)
            sequences, (table, other, *_) = (
                Sequences((12, kv_heads, 64, 60), torch.float16),
                scattered_tables(3),
            )
            for start, end in ((0, 70), (70, 70 + num_tokens)):
                piece = (SequenceSlice([0] * (end - start), start, table), names("a", start, end))
                [out] = sequences.run(make_backend("cpu"), [piece], OPTIONS[wish])
            last = 70 + num_tokens
            tree = (SequenceSlice([0], last, table, TREE), names("a", last, last + 1) + tree_names("a", TREE))
            short = (SequenceSlice([0], 0, other), names("b", 0, 1))
            outs.append(torch.cat([out, *sequences.run(make_backend("cpu"), [tree, short], OPTIONS[wish])]))
    finally:
        torch.set_num_threads(before)
    for other_threads in outs[1:]:
        assert torch.equal(outs[0], other_threads)


def test_a_pass_without_tokens_ends_well() -> None:
    """However many threads there are to share it out among."""
    operators, nothing = need_operators(), torch.empty(0, dtype=torch.int64)
    query, key = torch.empty(1, 4, 0, 8), torch.empty(1, 2, 0, 8)
    cache = torch.zeros(16, 2, 8)
    try:
        for threads in (1, 4):
            operators.use_threads(threads)
            tables = (nothing, nothing.view(0, 5), nothing, nothing, nothing)
            out = operators.attend(query, key, key, cache, cache.clone(), *tables, 0.3, 0, 0.0, None)
            assert out.shape == (1, 0, 4, 8)
    finally:
        operators.use_threads(0)


@pytest.mark.parametrize("dtype", CACHES, ids=str)
@pytest.mark.parametrize("backend", BACKENDS)
def test_what_is_not_a_number_stays_so_and_in_its_own_rows(backend: str, dtype: torch.dtype) -> None:
    sequences = Sequences((4, 2, 8, 8), dtype)
    clean = Sequences((4, 2, 8, 8), dtype)
    a, b = scattered_tables(4)[:2]
    pieces = [
        (SequenceSlice([0] * 6, 0, a), names("a", 0, 6)),
        (SequenceSlice([0] * 6, 0, b), names("b", 0, 6)),
    ]
    batch = InputBatch.build([piece for piece, _ in pieces], BLOCK_SIZE, torch.device("cpu"))
    columns = zip(*(sequences.token(name) for _, row in pieces for name in row), strict=True)
    query, key, value = (torch.stack(column, dim=1)[None] for column in columns)
    key[0, :, 3] = float("nan")
    value[0, :, 8] = float("inf")
    out = make_backend(backend).plan(batch, sequences.cache).attend(0, query, key, value, PLAIN)[0]
    expected = torch.cat(clean.run(make_backend(backend), pieces, PLAIN))
    assert torch.isnan(out[3:6]).all()
    assert not torch.isfinite(out[8:12]).any()
    if backend == "cpu":  # Torch's own kernel multiplies hidden values by a weight of zero.
        assert torch.equal(out[[0, 1, 2, 6, 7]], expected[[0, 1, 2, 6, 7]])


@pytest.mark.parametrize("dtype", CACHES[1:], ids=str)
@pytest.mark.parametrize("backend", BACKENDS)
def test_numbers_are_rounded_to_nearest_and_saturate(backend: str, dtype: torch.dtype) -> None:
    limits = torch.finfo(dtype)
    half_way = 1 + limits.eps / 2  # Between 1, which is even, and the next.
    above = 1 + limits.eps / 2 + 2**-20
    largest = torch.finfo(torch.float32).max
    given = [
        half_way,
        above,
        -half_way,
        limits.max,
        largest,
        -largest,
        torch.inf,
        -torch.inf,
        torch.nan,
        0.1,
        1e-7,
    ]
    rounded = [1, 1 + limits.eps, -1, limits.max, limits.max, -limits.max, torch.inf, -torch.inf, torch.nan]
    # As many as fill a register and some more, which are converted in another way.
    numbers = torch.tensor([*given, *given])
    tenth = torch.tensor(0.1).to(dtype).item()
    least = torch.tensor(1e-7).to(dtype).item()
    expected = torch.tensor([*rounded, tenth, least] * 2, dtype=dtype)
    shape = LayerShape(1, len(numbers), len(numbers))
    cache = PagedKVCache([shape], 1, BLOCK_SIZE, dtype, torch.device("cpu"))
    batch = InputBatch.build([SequenceSlice([0], 0, [0])], BLOCK_SIZE, torch.device("cpu"))
    row = numbers.view(1, 1, 1, -1)
    make_backend(backend).plan(batch, cache).attend(0, torch.zeros_like(row), row, -row, PLAIN)
    for ours, theirs in ((cache.keys[0], expected), (cache.values[0], -expected)):
        torch.testing.assert_close(ours[0, 0], theirs, rtol=0, atol=0, equal_nan=True)


def test_a_cache_of_another_type_is_refused() -> None:
    sequences = Sequences((4, 2, 8, 8), torch.float64)
    with pytest.raises(RuntimeError, match="float32, float16 or bfloat16 here, not Double"):
        sequences.run(make_backend("cpu"), [(SequenceSlice([0], 0, [0]), ["a"])], PLAIN)
