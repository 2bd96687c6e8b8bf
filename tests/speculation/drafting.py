"""What the speculators' tests share: sequences with block tables, and a draft model whose passes are seen."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from transformers import PreTrainedModel

from engine.model.attention.interface import probe_layers
from engine.model.attention.reference import ReferenceAttention
from engine.model.input_batch import InputBatch
from engine.model.kv_cache import PagedKVCache
from engine.model.model_runner import ModelRunner
from engine.sampling_params import SamplingParams
from engine.speculation.base import DraftRequest, ProposalContext, Speculator
from engine.speculation.chain_growth import ChainGardener
from engine.speculation.draft_model import DraftLimits, DraftModelSpeculator
from engine.speculation.drawing import DrawingStyle
from engine.speculation.growing import TreeGrower
from engine.speculation.growth import Gardener
from engine.token_tree import TokenTree
from tests.tiny import VOCAB_SIZE

BLOCK_SIZE = 4
NUM_BLOCKS = 96
GREEDY = SamplingParams(temperature=0.0, ignore_eos=True)


class RecordingRunner(ModelRunner):
    """Keeps the batches it ran, and fails on demand once the cache has been written."""

    def __init__(self, module: PreTrainedModel, vocab_size: int = VOCAB_SIZE) -> None:
        cache = PagedKVCache(probe_layers(module), NUM_BLOCKS, BLOCK_SIZE, torch.float32, torch.device("cpu"))
        super().__init__(module, cache, ReferenceAttention(), vocab_size)
        self.passes: list[InputBatch] = []
        self.fails: Callable[[int], bool] = lambda number: False

    def forward(self, batch: InputBatch) -> torch.Tensor:
        logits = super().forward(batch)
        self.passes.append(batch)
        if self.fails(len(self.passes)):
            raise RuntimeError("planted")
        return logits


def make_drafter(
    runner: ModelRunner,
    *,
    max_model_len: int = 512,
    max_num_batched_tokens: int = 256,
    eos_token_ids: frozenset[int] = frozenset(),
    gardener: Gardener | None = None,
    style: DrawingStyle | None = None,
) -> DraftModelSpeculator:
    return DraftModelSpeculator(
        runner,
        DraftLimits(max_model_len, max_num_batched_tokens),
        TreeGrower(
            gardener or ChainGardener(), style or DrawingStyle(branches=gardener is not None), eos_token_ids
        ),
    )


class Blocks:
    """Block ids in a seeded disorder, each handed out once."""

    def __init__(self, seed: int = 0) -> None:
        self._free = list(range(NUM_BLOCKS))
        random.Random(seed).shuffle(self._free)

    def extend(self, table: list[int], num_slots: int) -> None:
        while len(table) * BLOCK_SIZE < num_slots:
            table.append(self._free.pop())


@dataclass
class Text:
    """One request as the engine holds it."""

    request_id: str
    tokens: list[int]
    blocks: Blocks
    params: SamplingParams = GREEDY
    table: list[int] = field(default_factory=list)
    num_cached: int = 0
    num_prompt: int = 0

    def __post_init__(self) -> None:
        self.num_prompt = self.num_prompt or len(self.tokens)

    def ask(self, budget: int, *, num_computed: int | None = None) -> DraftRequest:
        """The request with blocks for exactly its tokens and the budget."""
        self.blocks.extend(self.table, len(self.tokens) + budget)
        return DraftRequest(
            request_id=self.request_id,
            token_ids=self.tokens,
            num_prompt_tokens=self.num_prompt,
            num_computed_tokens=len(self.tokens) - 1 if num_computed is None else num_computed,
            num_cached_tokens=self.num_cached,
            block_table=self.table,
            params=self.params,
            budget=budget,
        )

    def slots(self, count: int) -> list[int]:
        return [self.table[i // BLOCK_SIZE] * BLOCK_SIZE + i % BLOCK_SIZE for i in range(count)]

    def commit(self, tree: TokenTree, num_accepted: int, rng: random.Random) -> None:
        """A verdict: the first draft tokens and one more, which is not the next draft token."""
        self.tokens += tree.tokens[:num_accepted]
        refused = tree.tokens[num_accepted : num_accepted + 1]
        self.tokens.append(rng.choice([token for token in range(VOCAB_SIZE) if token not in refused]))


def propose(speculator: Speculator, *requests: DraftRequest) -> list[TokenTree]:
    return speculator.propose(ProposalContext(requests))


def random_tokens(count: int, seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(VOCAB_SIZE) for _ in range(count)]


def next_logits(plain: PreTrainedModel, tokens: Sequence[int]) -> torch.Tensor:
    """The row behind `tokens` as transformers alone computes it, float32 [1, VOCAB_SIZE]."""
    with torch.inference_mode():
        logits: torch.Tensor = plain(torch.tensor([list(tokens)]), use_cache=False).logits[0, -1:]
    return logits[:, :VOCAB_SIZE].float()


def greedy_chain(plain: PreTrainedModel, tokens: Sequence[int], count: int) -> tuple[int, ...]:
    """What the draft chooses behind `tokens`, computed anew for every token."""
    text = list(tokens)
    for _ in range(count):
        text.append(int(next_logits(plain, text).argmax()))
    return tuple(text[len(tokens) :])
