"""Models over keys and values in eight bits against models whose keys and values are rounded before."""

import importlib.util

import pytest
import torch

from engine.model.attention.interface import AttentionBackend, AttentionPlan, LayerOptions
from engine.model.attention.reference import ReferenceAttention
from engine.model.attention.tiles import SplitRules
from engine.model.input_batch import InputBatch, SequenceSlice
from engine.model.kv_cache import PagedKVCache
from engine.model.loader import wrap_model
from engine.model.model_runner import ModelRunner
from tests.model.attention_steps import TREE, tables
from tests.tiny import tiny_model

EIGHT_BITS = torch.float8_e4m3fn


class RoundedFirst:
    """The reference over a cache that rounds nothing, behind keys and values that were rounded already."""

    recorded = None

    def plan(self, batch: InputBatch, cache: PagedKVCache) -> AttentionPlan:
        return _RoundedPlan(ReferenceAttention().plan(batch, cache))


class _RoundedPlan:
    def __init__(self, inner: AttentionPlan) -> None:
        self._inner = inner

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, options: LayerOptions
    ) -> torch.Tensor:
        key, value = (tensor.to(EIGHT_BITS).to(tensor.dtype) for tensor in (key, value))
        return self._inner.attend(layer, query, key, value, options)


def logits(arch: str, backend: AttentionBackend, dtype: torch.dtype) -> torch.Tensor:
    """Of a prompt in chunks and a tree, of which a branch is moved into line, and a token behind it."""
    model = wrap_model(tiny_model(arch), None, name="tiny")
    [table] = tables(1)
    tokens = [(7 * token) % 250 for token in range(20)]
    cache = PagedKVCache(model.layers, len(table), 4, dtype, model.device)
    runner = ModelRunner(model.module, cache, backend, model.vocab_size)

    def run(piece: SequenceSlice) -> torch.Tensor:
        return runner.forward(runner.build([piece]))

    rows = [
        run(SequenceSlice(tokens[:9], 0, table, rows=9)),
        run(SequenceSlice(tokens[9:], 9, table, TREE, rows=1 + len(TREE))),
    ]
    slots = [4 * table[place // 4] + place % 4 for place in range(24)]
    # The second child of the root, as if it had been accepted.
    cache.move([slots[21]], [slots[20]])
    rows.append(run(SequenceSlice([9], 21, table)))
    return torch.cat(rows)


@pytest.mark.parametrize("arch", ["gemma2", "gpt_oss"])
def test_logits_are_those_of_rounded_keys_and_values(arch: str) -> None:
    expected = logits(arch, RoundedFirst(), torch.float32)
    assert torch.equal(logits(arch, ReferenceAttention(), EIGHT_BITS), expected)
    assert not torch.allclose(logits(arch, ReferenceAttention(), torch.float32), expected, atol=1e-4)
    if importlib.util.find_spec("triton") is None:
        pytest.skip("triton is not installed; it comes for Linux on x86-64 alone")
    from engine.model.attention.triton import TritonAttention

    rules = SplitRules(wanted_programs=1000, min_slots=16)
    got = logits(arch, TritonAttention(rules), EIGHT_BITS)
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)
