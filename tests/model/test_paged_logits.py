"""Paged logits equal transformers' own forward, for every architecture we name, on every backend."""

import pytest
import torch
from transformers import PreTrainedModel

from engine.model.attention.interface import probe_layers
from engine.model.input_batch import SequenceSlice
from engine.model.kv_cache import PagedKVCache
from engine.model.model_runner import ModelRunner
from engine.token_tree import TokenTree
from tests.operators import BACKENDS, make_backend
from tests.tiny import ARCHITECTURES, VOCAB_SIZE, tiny_model

BLOCK_SIZE = 4
TOLERANCE = 2e-4
TOKENS = [7, 31, 7, 99, 250, 3, 3, 41, 16, 8, 77, 120, 5]


pytestmark = pytest.mark.parametrize("backend", BACKENDS)


def make_runner(model: PreTrainedModel, backend: str) -> ModelRunner:
    cache = PagedKVCache(probe_layers(model), 32, BLOCK_SIZE, torch.float32, torch.device("cpu"))
    return ModelRunner(model, cache, make_backend(backend), VOCAB_SIZE)


def reference_logits(arch: str, tokens: list[int]) -> torch.Tensor:
    model = tiny_model(arch, attention="eager")
    with torch.inference_mode():
        logits: torch.Tensor = model(torch.tensor([tokens]), use_cache=False).logits[0]
    return logits


def close(ours: torch.Tensor, theirs: torch.Tensor) -> bool:
    return torch.allclose(ours, theirs, rtol=TOLERANCE, atol=TOLERANCE * float(theirs.abs().max()))


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_chunks_scattered_over_blocks_equal_the_whole(arch: str, backend: str) -> None:
    runner = make_runner(tiny_model(arch), backend)
    table = [9, 2, 30, 5]
    rows = []
    for start, end in ((0, 5), (5, 6), (6, 12), (12, 13)):
        piece = SequenceSlice(TOKENS[start:end], start, table, rows=end - start)
        rows.append(runner.forward(runner.build([piece])))
    assert close(torch.cat(rows), reference_logits(arch, TOKENS))


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_neighbours_in_the_batch_do_not_show(arch: str, backend: str) -> None:
    runner = make_runner(tiny_model(arch), backend)
    other = [200, 100, 50, 25, 12, 6]
    runner.forward(runner.build([SequenceSlice(TOKENS[:9], 0, [0, 1, 2, 3], rows=0)]))
    rows = runner.forward(
        runner.build(
            [SequenceSlice(other, 0, [10, 11], rows=1), SequenceSlice(TOKENS[9:], 9, [0, 1, 2, 3], rows=4)]
        )
    )
    assert close(rows[:1], reference_logits(arch, other)[-1:])
    assert close(rows[1:], reference_logits(arch, TOKENS)[9:])


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_tree_nodes_see_their_own_path_only(arch: str, backend: str) -> None:
    runner = make_runner(tiny_model(arch), backend)
    tree = TokenTree((11, 12, 13, 14, 15), (0, 0, 1, 2, 3))
    table = [3, 1, 8, 20, 4]
    runner.forward(runner.build([SequenceSlice(TOKENS[:8], 0, table, rows=0)]))
    rows = runner.forward(runner.build([SequenceSlice(TOKENS[8:], 8, table, tree, rows=1 + len(tree))]))
    for node in range(len(tree) + 1):
        path = [*TOKENS, *tree.path_tokens(node)]
        assert close(rows[node : node + 1], reference_logits(arch, path)[-1:]), node


def test_accepted_nodes_moved_into_line_serve_later_tokens(backend: str) -> None:
    runner = make_runner(tiny_model("llama"), backend)
    tree = TokenTree((11, 12, 13, 14), (0, 0, 2, 3))
    table = [3, 1, 8, 20, 4]
    runner.forward(runner.build([SequenceSlice(TOKENS, 0, table, tree, rows=1)]))
    path = tree.path(4)
    slots = [table[i // BLOCK_SIZE] * BLOCK_SIZE + i % BLOCK_SIZE for i in range(20)]
    tail = len(TOKENS)
    runner.cache.move(
        [slots[tail - 1 + node] for node in path], [slots[tail + depth] for depth in range(len(path))]
    )
    committed = [*TOKENS, *tree.path_tokens(4), 40]
    row = runner.forward(runner.build([SequenceSlice([40], len(committed) - 1, table)]))
    assert close(row, reference_logits("llama", committed)[-1:])


def test_block_table_too_short_is_an_error(backend: str) -> None:
    runner = make_runner(tiny_model("llama"), backend)
    with pytest.raises(ValueError, match="13 slots wanted"):
        runner.build([SequenceSlice(TOKENS, 0, [0, 1, 2])])
