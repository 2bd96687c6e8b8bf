"""Heads in the tests of speculators, fed with hidden states of a tiny target as the engine would."""

from dataclasses import replace
from functools import cache

import torch
from transformers import PreTrainedModel

from engine.model.attention.reference import ReferenceAttention
from engine.model.kv_cache import LayerShape, PagedKVCache
from engine.speculation.base import DraftRequest, FeatureRows, ProposalContext, Requirements, Speculator
from engine.speculation.chain_growth import ChainGardener
from engine.speculation.drawing import DrawingStyle
from engine.speculation.eagle import EagleSpeculator
from engine.speculation.growing import TreeGrower
from engine.speculation.growth import Gardener
from engine.speculation.head_progress import BoundaryFeatures
from engine.speculation.head_runner import HeadRunner
from engine.speculation.heads.config import EagleFamily, Features
from engine.speculation.loaded_head import selection_of
from engine.speculation.medusa import MedusaSpeculator
from engine.speculation.medusa_runner import MedusaRunner
from engine.speculation.target_ends import TargetEnds
from engine.token_tree import TokenTree
from tests.heads import eagle_config, features_of, random_eagle, random_medusa
from tests.speculation.drafting import BLOCK_SIZE, NUM_BLOCKS
from tests.tiny import VOCAB_SIZE, tiny_model


@cache
def fed_by() -> PreTrainedModel:
    """The target."""
    return tiny_model("llama", attention="eager")


class Fed:
    """Hands a speculator the features of every position that has been computed since it was last asked."""

    def __init__(self, inner: Speculator, features: Features) -> None:
        self.inner = inner
        self._features = features
        self._sent: dict[str, int] = {}
        # What the inner one keeps, for tests that look for what is left behind.
        self._kept = next(value for value in vars(inner).values() if isinstance(value, dict))
        self.num_computed_tokens = inner.num_computed_tokens

    @property
    def requirements(self) -> Requirements:
        return self.inner.requirements

    def propose(self, context: ProposalContext) -> list[TokenTree]:
        return self.inner.propose(ProposalContext(tuple(map(self._feed, context.requests))))

    def release(self, request_id: str) -> None:
        self.inner.release(request_id)
        self._sent.pop(request_id, None)

    def _feed(self, request: DraftRequest) -> DraftRequest:
        begin = self._sent.get(request.request_id, request.num_cached_tokens)
        end = request.num_computed_tokens
        if begin == end:
            return request
        self._sent[request.request_id] = end
        rows = features_of(fed_by(), request.token_ids[:end], self._features)
        return replace(request, features=FeatureRows(begin, rows[begin:]))


def grower(gardener: Gardener | None) -> TreeGrower:
    style = DrawingStyle(branches=gardener is not None)
    return TreeGrower(gardener or ChainGardener(), style, frozenset({257}))


def fed_eagle(family: EagleFamily, gardener: Gardener | None = None, *, num_tokens: int = 24) -> Fed:
    """A head with random weights and a cache of NUM_BLOCKS; passes of `num_tokens` tokens at most."""
    head = random_eagle(eagle_config(family))
    cache = PagedKVCache([LayerShape(2, 8, 8)], NUM_BLOCKS, BLOCK_SIZE, torch.float32, torch.device("cpu"))
    runner = HeadRunner(head, cache, ReferenceAttention(), TargetEnds(fed_by(), VOCAB_SIZE))
    width = head.config.num_features * head.config.target_hidden_size
    boundaries = BoundaryFeatures(NUM_BLOCKS, BLOCK_SIZE, torch.empty(width))
    features = head.config.features
    return Fed(
        EagleSpeculator(runner, selection_of(features), boundaries, num_tokens, grower(gardener)), features
    )


def fed_medusa(gardener: Gardener | None = None) -> Fed:
    """Heads with random weights."""
    runner = MedusaRunner(random_medusa(), TargetEnds(fed_by(), VOCAB_SIZE))
    return Fed(MedusaSpeculator(runner, grower(gardener)), "last")
