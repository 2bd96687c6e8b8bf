"""On packed weights and with the C++ operators a row of logits has the same bits wherever it is computed."""

from collections.abc import Sequence

import pytest
import torch

from engine.config import DEFAULT_MODEL, DType, KVCacheDType, ModelConfig
from engine.errors import ModelNotFound
from engine.model.attention.choice import choose_backend
from engine.model.cache_type import choose_cache_type
from engine.model.input_batch import SequenceSlice
from engine.model.kv_cache import PagedKVCache
from engine.model.loaded_model import LoadedModel
from engine.model.loader import load_causal_lm, wrap_model
from engine.model.model_runner import ModelRunner
from engine.token_tree import TokenTree
from tests.operators import need_operators
from tests.tiny import round_to_four_bits, tiny_model

BLOCK_SIZE = 16
NUM_BLOCKS = 64
KINDS: tuple[DType, ...] = ("float16", "int8", "int4")


class Rows:
    """One sequence of tokens, whose logits at a place are computed in several ways."""

    def __init__(self, model: LoadedModel, num_tokens: int, cache: KVCacheDType) -> None:
        self.model = model
        self.cache: KVCacheDType = cache
        self.tokens = [(index * 7919 + 31) % model.vocab_size for index in range(num_tokens + 8)]
        self.table = [3, 40, 7, 22, 15, 9, 61, 30, 2, 5, 33, 12]

    def runner(self, upto: int, chunk: int = 1000) -> ModelRunner:
        """A runner with an empty cache that the first tokens are read into, in chunks."""
        model = self.model
        dtype = choose_cache_type(self.cache, model)
        cache = PagedKVCache(model.layers, NUM_BLOCKS, BLOCK_SIZE, dtype, model.device)
        runner = ModelRunner(
            model.module, cache, choose_backend(model.operators, model.device), model.vocab_size
        )
        for begin in range(0, upto, chunk):
            self.run(
                runner,
                SequenceSlice(self.tokens[begin : min(begin + chunk, upto)], begin, self.table, rows=0),
            )
        return runner

    @staticmethod
    def run(runner: ModelRunner, *pieces: SequenceSlice) -> torch.Tensor:
        return runner.forward(runner.build(list(pieces)))

    def alone(self, place: int) -> torch.Tensor:
        return self.run(self.runner(place), SequenceSlice([self.tokens[place]], place, self.table))[0]

    def among_others(self, place: int, others: Sequence[SequenceSlice]) -> torch.Tensor:
        own = SequenceSlice([self.tokens[place]], place, self.table)
        return self.run(self.runner(place), *others[:7], own, *others[7:])[7]

    def in_a_chunk(self, place: int, start: int, end: int, chunk: int) -> torch.Tensor:
        piece = SequenceSlice(self.tokens[start:end], start, self.table, rows=end - start)
        return self.run(self.runner(start, chunk), piece)[place - start]

    def as_a_node(self, place: int, depth: int) -> torch.Tensor:
        committed = place - depth
        parents = (0, 0, *range(2, depth + 1), 1)
        tree = TokenTree((1, *self.tokens[committed + 1 : place + 1], 2), parents)
        piece = SequenceSlice([self.tokens[committed]], committed, self.table, tree, rows=1 + len(tree))
        return self.run(self.runner(committed), piece)[1 + depth]


def check(model: LoadedModel, place: int, cache: KVCacheDType = "auto") -> None:
    rows = Rows(model, place, cache)
    expected = rows.alone(place)
    assert torch.isfinite(expected).all()
    others = [SequenceSlice([5 + block], 0, [block]) for block in range(45, 60)]
    assert torch.equal(rows.among_others(place, others), expected), "among 15 others"
    for start, chunk in ((0, 1000), (place - 5, 7), (place - 20, 64)):
        assert torch.equal(rows.in_a_chunk(place, start, place + 1, chunk), expected), f"a chunk from {start}"
    assert torch.equal(rows.in_a_chunk(place, 16, place + 7, 16), expected), "behind a prefix of one block"
    for depth in (1, 4):
        assert torch.equal(rows.as_a_node(place, depth), expected), f"a node of depth {depth}"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("arch", ["llama", "qwen2", "mistral", "gemma2"])
def test_tiny_models(arch: str, kind: DType) -> None:
    module = tiny_model(arch) if kind != "int4" else round_to_four_bits(tiny_model(arch))
    model = wrap_model(module, None, name=arch, dtype=kind, operators=need_operators())
    assert choose_cache_type("auto", model) == torch.float16
    # Within the first tile of 64 keys, and at the beginning of the second and of the third.
    for place in (33, 70, 129):
        check(model, place)


@pytest.mark.parametrize("cache", ["float32", "bfloat16"])
def test_tiny_models_with_other_caches(cache: KVCacheDType) -> None:
    model = wrap_model(tiny_model("llama"), None, name="llama", dtype="int8", operators=need_operators())
    check(model, 70, cache)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_the_default_model(kind: DType) -> None:
    need_operators()
    try:
        model = load_causal_lm(ModelConfig(model=DEFAULT_MODEL, dtype=kind, device="cpu", offline=True))
    except ModelNotFound:
        pytest.skip(f"{DEFAULT_MODEL} is not on this machine")
    check(model, 129)
