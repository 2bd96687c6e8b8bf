"""A head as one operator says what its layers say one by one, in passes over trees and in whole chains."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate
from operator import mul
from typing import Any

import pytest
import torch

from engine.model.attention.cpu import CpuAttention
from engine.model.input_batch import SequenceSlice
from engine.model.kv_cache import LayerShape, PagedKVCache
from engine.sampling.logits import process_logits
from engine.sampling.noise import NoiseKey, Stream, gumbel_noise
from engine.sampling.row_group import RowGroup
from engine.sampling_params import SamplingParams
from engine.speculation.chain import GREEDY, ChainPlan, ChainWish
from engine.speculation.confidence import NUM_BINS, bin_of
from engine.speculation.head_runner import HeadOutput, HeadRunner
from engine.speculation.head_stack import stack_head
from engine.speculation.heads.config import EagleFamily
from engine.speculation.heads.eagle import EagleHead
from engine.speculation.loaded_head import wrap_eagle
from engine.speculation.target_ends import TargetEnds
from engine.token_tree import TokenTree
from tests.engines import load_tiny
from tests.heads import FAMILIES, eagle_config, random_eagle
from tests.operators import need_operators
from tests.tiny import VOCAB_SIZE

BLOCK_SIZE = 4
TABLES = ([3, 9, 4, 11], [7, 1, 8, 2], [5, 0, 6, 10])
TEXTS = ((5, 6, 7, 8, 9, 10), (20, 21), (30, 31, 32, 33))
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "biases": {"qkv_bias": True, "o_bias": True, "mlp_bias": True, "fc_bias": True},
    "two layers": {"num_layers": 2, "windows": (None, 3)},
    "eagle norms": {"norm_before_residual": True, "norm_output": True, "input_norm": True},
    "more norms": {"embedding_norm": True, "hidden_norm": True, "output_norm": True},
    "own ends": {"own_embeddings": True, "draft_vocab_size": VOCAB_SIZE},
}


def runners(head: EagleHead, dtype: torch.dtype = torch.float32) -> tuple[HeadRunner, HeadRunner]:
    """The same head twice: as one operator, and layer by layer."""
    target = load_tiny(dtype="int8")
    loaded = wrap_eagle(head, target, name="tiny")
    ends = TargetEnds(target.module, VOCAB_SIZE)
    shape = LayerShape(2, 8, 8)
    caches = [
        PagedKVCache([shape] * head.config.num_layers, 12, BLOCK_SIZE, dtype, target.device) for _ in range(2)
    ]
    backend = CpuAttention(need_operators())
    stack = stack_head(loaded.head, ends, caches[0], need_operators())
    assert stack is not None
    return (
        HeadRunner(loaded.head, caches[0], backend, ends, stack),
        HeadRunner(loaded.head, caches[1], backend, ends),
    )


def features(head: EagleHead, count: int) -> torch.Tensor:
    width = head.config.num_features * head.config.target_hidden_size
    return torch.randn(count, width, generator=torch.Generator().manual_seed(count))


def texts(rows: int = 1) -> list[SequenceSlice]:
    return [SequenceSlice(text[1:], 1, table, rows=rows) for text, table in zip(TEXTS, TABLES, strict=True)]


DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
NUM_TOKENS = sum(len(text) - 1 for text in TEXTS)


def by_levels(
    runner: HeadRunner, slices: Sequence[SequenceSlice], rows: torch.Tensor, wishes: Sequence[ChainWish]
) -> list[list[int]]:
    """Chains drafted a level at a time, with plain torch and no operator that draws."""
    out = runner.absorb(slices, rows)
    tokens: list[list[int]] = [[] for _ in slices]
    for level in range(max(wish.plan.length for wish in wishes)):
        for chain, row, wish in zip(tokens, spread(out), wishes, strict=True):
            chain.append(drawn(row, wish, level))
        pieces = [
            SequenceSlice(
                (),
                piece.start + len(piece),
                piece.block_table,
                TokenTree.chain(chain),
                num_cached_nodes=level,
            )
            for piece, chain in zip(slices, tokens, strict=True)
        ]
        out = runner.extend(pieces, out.carried)
    return [chain[: wish.plan.length] for chain, wish in zip(tokens, wishes, strict=True)]


def truncated(rows: torch.Tensor, wish: ChainWish) -> torch.Tensor:
    """In plain torch."""
    temperature, top_k, top_p, min_p = wish.truncation
    params = SamplingParams(temperature=temperature, top_k=int(top_k), top_p=top_p, min_p=min_p, seed=0)
    return process_logits(rows, [RowGroup(params, (1,), 1, frozenset())])


def drawn(row: torch.Tensor, wish: ChainWish, level: int) -> int:
    if not wish.keys:
        return int(row.argmax())
    scores = truncated(row[None], wish)[0].double()
    return int((scores + gumbel_noise([wish.padded_keys(8)[level]], len(row), row.device)[0]).argmax())


def spread(out: HeadOutput) -> torch.Tensor:
    """Over the target's ids."""
    return out.logits if out.ids is None else out.ids.spread(out.logits, -torch.inf)


def close(ours: torch.Tensor, theirs: torch.Tensor) -> bool:
    """Up to a step or two of the 16 bits that each layer rounds its input to, by the largest of a row."""
    return bool(((ours - theirs).abs() <= 4 * 2**-15 * theirs.abs().amax()).all())


def keys(length: int, seed: int) -> tuple[NoiseKey, ...]:
    return tuple(NoiseKey(seed, 0, place, Stream.DRAFT) for place in range(length))


WISHES = (
    ChainWish(ChainPlan(4), GREEDY),
    ChainWish(ChainPlan(2), (0.9, 0, 0.95, 0.0), keys(2, 1), needs_rows=True),
    ChainWish(ChainPlan(5), (1.3, 20, 1.0, 0.01), keys(5, 2)),
)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("options", OPTIONS.values(), ids=list(OPTIONS))
@torch.inference_mode()
def test_a_pass_over_texts_and_trees(family: EagleFamily, options: dict[str, Any]) -> None:
    head = random_eagle(eagle_config(family, **options), scale=0.2)
    tree = TokenTree((1, 2, 3), (0, 0, 1))
    results = []
    for runner in runners(head):
        first = runner.absorb(texts(rows=2)[:1] + texts()[1:], features(head, NUM_TOKENS))
        level = SequenceSlice((), len(TEXTS[0]), TABLES[0], tree.truncated(2), rows=2)
        second = runner.extend([level], first.carried[[1, 1]])
        last = SequenceSlice((), len(TEXTS[0]), TABLES[0], tree, rows=1, num_cached_nodes=2)
        results.append((first, second, runner.extend([last], second.carried[:1])))
    for ours, theirs in zip(*results, strict=True):
        assert close(ours.carried, theirs.carried)
        assert close(ours.logits, theirs.logits)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("options", OPTIONS.values(), ids=list(OPTIONS))
@torch.inference_mode()
def test_chains_are_those_that_levels_one_by_one_make(family: EagleFamily, options: dict[str, Any]) -> None:
    head = random_eagle(eagle_config(family, **options), scale=0.2)
    at_once, layer_by_layer = runners(head)
    rows = features(head, NUM_TOKENS)
    chains = [chain.tokens for chain in at_once.draft(texts(), rows, WISHES)]
    assert chains == by_levels(layer_by_layer, texts(), rows, WISHES)


@torch.inference_mode()
def test_a_chain_ends_where_its_chance_to_stand_falls_below_the_least() -> None:
    head = random_eagle(eagle_config("eagle3"), scale=0.5)
    runner, layer_by_layer = runners(head)
    rows = features(head, NUM_TOKENS)
    whole = runner.draft(texts(), rows, WISHES)
    first = spread(layer_by_layer.absorb(texts(), rows))
    laws = [
        row if wish.keys == () else truncated(row[None], wish)[0]
        for row, wish in zip(first, WISHES, strict=True)
    ]
    shares = [float(law.softmax(dim=-1).max()) for law in laws]
    assert [chain.confidences[0] for chain in whole] == pytest.approx(shares, rel=1e-3)
    assert [len(chain.confidences) for chain in whole] == [4, 2, 5]
    # A bin's chance is not its confidence: what counts is what the book says.
    chances = tuple(0.5 + place / 20 for place in range(NUM_BINS))
    for least in (0.2, 0.5, 0.7, 1.0):
        wishes = [replace(wish, plan=ChainPlan(wish.plan.length, least, chances)) for wish in WISHES]
        for chain, full in zip(runner.draft(texts(), rows, wishes), whole, strict=True):
            products = list(accumulate((chances[bin_of(each)] for each in full.confidences), mul))
            ends = [place for place, product in enumerate(products, start=1) if product < least]
            length = ends[0] if ends else len(full.tokens)
            assert chain.tokens == full.tokens[:length]
            assert len(chain.confidences) == len(chain.distributions) == length


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@torch.inference_mode()
def test_a_chain_has_the_same_bits_alone_and_beside_others(dtype: torch.dtype) -> None:
    head = random_eagle(eagle_config("eagle3"))
    runner, _ = runners(head, dtype)
    rows = features(head, NUM_TOKENS)
    together = runner.draft(texts(), rows, WISHES)
    begin = 0
    for piece, wish, expected in zip(texts(), WISHES, together, strict=True):
        [alone] = runner.draft([piece], rows[begin : begin + len(piece)], [wish])
        begin += len(piece)
        assert alone.tokens == expected.tokens
        for ours, theirs in zip(alone.distributions, expected.distributions, strict=True):
            assert (ours is None and theirs is None) or torch.equal(ours, theirs)  # type: ignore[arg-type]


@torch.inference_mode()
def test_texts_that_want_no_draft_are_computed_beside_chains() -> None:
    head = random_eagle(eagle_config("eagle3"))
    runner, other = runners(head)
    rows = features(head, NUM_TOKENS)
    begun = [texts(rows=0)[0], *texts()[1:]]
    assert len(runner.draft(begun, rows, [None, *WISHES[1:]])) == 2
    other.absorb(begun, rows)
    used = [table * BLOCK_SIZE + place for table, place in ((3, 1), (3, 2), (3, 3), (9, 0), (9, 1))]
    assert close(runner.cache.keys[0][used], other.cache.keys[0][used])
    assert close(runner.cache.values[0][used], other.cache.values[0][used])


@torch.inference_mode()
def test_a_drawn_chain_tells_what_it_was_drawn_from() -> None:
    head = random_eagle(eagle_config("eagle3"))
    runner, layer_by_layer = runners(head)
    rows = features(head, NUM_TOKENS)
    chain = runner.draft(texts()[:1], rows[:5], [WISHES[1]])[0]
    row = layer_by_layer.absorb(texts()[:1], rows[:5])
    expected = truncated(spread(row), WISHES[1]).softmax(dim=-1)[0]
    first = chain.distributions[0]
    assert first is not None
    assert first.shape == (VOCAB_SIZE,)
    assert torch.allclose(first, expected, atol=1e-4)
    assert 0 < int((first > 0).sum()) < VOCAB_SIZE / 2
    for token, law in zip(chain.tokens, chain.distributions, strict=True):
        assert law is not None
        assert law[token] > 0


def test_a_chain_beyond_its_blocks_is_refused() -> None:
    head = random_eagle(eagle_config("eagle3"))
    runner, _ = runners(head)
    piece = SequenceSlice(TEXTS[0][1:], 1, [3, 9])
    with torch.inference_mode():
        runner.draft([piece], features(head, 5), [ChainWish(ChainPlan(3), GREEDY)])
        with pytest.raises(ValueError, match="9 slots wanted, but 2 blocks of 4"):
            runner.draft([piece], features(head, 5), [ChainWish(ChainPlan(4), GREEDY)])


@pytest.mark.parametrize(
    ("options", "dtype"),
    [
        ({"qk_norm": True}, "int8"),
        ({"rope": DYNAMIC}, "int8"),
        ({}, "float32"),
    ],
)
def test_other_heads_are_called_layer_by_layer(options: dict[str, Any], dtype: Any) -> None:
    target = load_tiny(dtype=dtype)
    loaded = wrap_eagle(random_eagle(eagle_config("eagle3", **options)), target, name="tiny")
    cache = PagedKVCache([LayerShape(2, 8, 8)], 4, BLOCK_SIZE, torch.float32, target.device)
    ends = TargetEnds(target.module, VOCAB_SIZE)
    assert stack_head(loaded.head, ends, cache, need_operators()) is None
