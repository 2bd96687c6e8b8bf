"""A tiny "model" that is a table of logits, and an engine in miniature that runs the sampler over it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from engine.sampling.logits import process_logits
from engine.sampling.noise import NoiseKey, Stream, gumbel_noise, uniform_rows
from engine.sampling.row_group import RowGroup
from engine.sampling.sampler import SampledRun, Sampler, SamplingTask
from engine.sampling_params import Acceptance, SamplingParams, SpeculationParams
from engine.token_tree import EMPTY_TREE, Proposal, TokenTree
from tests.sampling.drafts import DraftToken, draw_tokens

VOCAB = 12
EOS = frozenset({11})
PROMPT = (1, 2, 3)
REJECTION = SpeculationParams(acceptance=Acceptance.REJECTION)
BLOCK = SpeculationParams(acceptance=Acceptance.BLOCK)
TYPICAL = SpeculationParams(acceptance=Acceptance.TYPICAL)


class TableModel:
    """Logits that depend on the last two tokens."""

    def __init__(self, seed: int, vocab_size: int = VOCAB, spread: float = 2.0) -> None:
        generator = torch.Generator().manual_seed(seed)
        self._table = spread * torch.randn(vocab_size, vocab_size, vocab_size, generator=generator)

    def row(self, token_ids: Sequence[int]) -> torch.Tensor:
        return self._table[token_ids[-2], token_ids[-1]]

    def rows(self, tasks: Sequence[SamplingTask]) -> torch.Tensor:
        return torch.stack(
            [self.row([*task.token_ids, *path]) for task in tasks for path in RowGroup.tree_paths(task.tree)]
        )


MODEL = TableModel(1)
DRAFT = TableModel(2)


@dataclass(frozen=True)
class Line:
    """One request on its way."""

    params: SamplingParams
    token_ids: tuple[int, ...] = PROMPT

    def task(self, tree: TokenTree = EMPTY_TREE) -> SamplingTask:
        return SamplingTask(self.params, self.token_ids, len(PROMPT), tree, EOS)

    def taking(self, run: SampledRun) -> "Line":
        return replace(self, token_ids=self.token_ids + run.token_ids)


Drafter = Callable[[Sequence[Line]], list[TokenTree]]
Recorder = Callable[[torch.Tensor], torch.Tensor]


def each(tree_of: Callable[[Line], TokenTree]) -> Drafter:
    return lambda lines: [tree_of(line) for line in lines]


no_draft = each(lambda line: EMPTY_TREE)


def tasks_of(lines: Sequence[Line], drafter: Drafter) -> list[SamplingTask]:
    return [line.task(tree) for line, tree in zip(lines, drafter(lines), strict=True)]


def generate(
    lines: Sequence[Line], drafter: Drafter, num_tokens: int, model: TableModel = MODEL
) -> list[tuple[int, ...]]:
    """Runs all lines side by side until each has so many tokens."""
    length = len(PROMPT) + num_tokens
    lines = list(lines)
    while any(len(line.token_ids) < length for line in lines):
        tasks = tasks_of(lines, drafter)
        runs = Sampler()(model.rows(tasks), tasks)
        lines = [line.taking(run) for line, run in zip(lines, runs, strict=True)]
    return [line.token_ids[len(PROMPT) : length] for line in lines]


def generate_next(lines: Sequence[Line]) -> list[tuple[int, ...]]:
    tasks = tasks_of(lines, no_draft)
    return [run.token_ids for run in Sampler()(MODEL.rows(tasks), tasks)]


@each
def random_trees(line: Line) -> TokenTree:
    """Another tree at each place of each request, of any shape, now and then empty."""
    generator = torch.Generator().manual_seed(1000 * len(line.token_ids) + sum(line.token_ids))
    size = int(torch.randint(8, (), generator=generator))
    tokens = torch.randint(VOCAB, (size,), generator=generator).tolist()
    parents = [int(torch.randint(node, (), generator=generator)) for node in range(1, size + 1)]
    return TokenTree(tuple(tokens), tuple(parents))


def model_chain(model: TableModel, stream: Stream, length: int = 3) -> Drafter:
    """A draft model that draws chains with the noise of a stream."""

    def draft(lines: Sequence[Line]) -> list[TokenTree]:
        drawn: list[list[DraftToken]] = [[] for _ in lines]
        for _ in range(length):
            groups = [
                RowGroup(line.params, line.token_ids, len(PROMPT), EOS, (tuple(t.token_id for t in chain),))
                for line, chain in zip(lines, drawn, strict=True)
            ]
            rows = torch.stack([model.row([*group.token_ids, *group.paths[0]]) for group in groups])
            keys = [key for group in groups for key in group.noise_keys(stream)]
            for chain, token in zip(drawn, draw_tokens(process_logits(rows, groups), keys), strict=True):
                chain.append(token)
        return [as_tree(line, chain) for line, chain in zip(lines, drawn, strict=True)]

    def as_tree(line: Line, chain: list[DraftToken]) -> TokenTree:
        tokens = [token.token_id for token in chain]
        if line.params.is_greedy:
            return TokenTree.chain(tokens)
        if stream is Stream.DRAFT:
            return TokenTree.chain(tokens, Proposal.SAMPLED, [token.distribution for token in chain])
        return TokenTree.chain(tokens, Proposal.COUPLED)

    return draft


def drawn_trees(
    model: TableModel, widths: Sequence[int], proposal: Proposal, record: Recorder = lambda q: q
) -> Drafter:
    """A draft model that draws trees of given widths per depth, siblings as the proposal says.

    Args:
        model: Whose distributions the tokens are drawn from.
        widths: Children per node at each depth.
        proposal: SAMPLED or SAMPLED_DISTINCT.
        record: What is recorded of a distribution; anything but the thing itself is an error to be found.
    """

    def draft(lines: Sequence[Line]) -> list[TokenTree]:
        growing = [_Growing() for _ in lines]
        for depth, width in enumerate(widths):
            groups = [
                RowGroup(line.params, line.token_ids, len(PROMPT), EOS, tuple(path for _, path in tree.level))
                for line, tree in zip(lines, growing, strict=True)
            ]
            rows = [model.row([*group.token_ids, *path]) for group in groups for path in group.paths]
            processed = process_logits(torch.stack(rows), groups)
            keys = [group.noise_key(depth, Stream.DRAFT) for group in groups for _ in group.paths]
            drawn = zip(draw_siblings(processed, keys, width, proposal), processed.softmax(-1), strict=True)
            for tree in growing:
                tree.grow(
                    [(tokens, record(law)) for _, (tokens, law) in zip(tree.level, drawn, strict=False)]
                )
        return [TokenTree(tuple(t.tokens), tuple(t.parents), proposal, tuple(t.laws)) for t in growing]

    return draft


class _Growing:
    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.parents: list[int] = []
        self.laws: list[torch.Tensor] = []
        self.level: list[tuple[int, tuple[int, ...]]] = [(0, ())]

    def grow(self, drawn: Sequence[tuple[list[int], torch.Tensor]]) -> None:
        level = []
        for (node, path), (tokens, law) in zip(self.level, drawn, strict=True):
            for token in tokens:
                self.tokens.append(token)
                self.parents.append(node)
                self.laws.append(law)
                level.append((len(self.tokens), (*path, token)))
        self.level = level


def draw_siblings(
    rows: torch.Tensor, keys: Sequence[NoiseKey], count: int, proposal: Proposal
) -> list[list[int]]:
    """Tokens drawn from rows of log probabilities, in order."""
    if proposal is Proposal.SAMPLED_DISTINCT:
        drawn = (rows + gumbel_noise(keys, rows.shape[1], rows.device)).topk(count).indices
    else:
        borders = rows.double().softmax(dim=-1).cumsum(dim=-1)
        drawn = torch.searchsorted(borders, uniform_rows(keys, count, rows.device) * borders[:, -1:])
    tokens: list[list[int]] = drawn.tolist()
    return tokens


MIXED = [
    Line(SamplingParams(temperature=0.0)),
    Line(SamplingParams(temperature=0.0, frequency_penalty=2.0)),
    Line(SamplingParams(temperature=0.0, frequency_penalty=-2.0, min_tokens=9)),
    Line(SamplingParams(temperature=0.0, repetition_penalty=1.4, presence_penalty=0.5)),
    Line(SamplingParams(seed=-1)),
    Line(SamplingParams(seed=2**63 - 1, temperature=0.7, top_k=4, top_p=0.9)),
    Line(SamplingParams(seed=-(2**63), min_p=0.05, logit_bias=((4, 3.0), (5, -100.0)))),
    Line(
        SamplingParams(
            seed=3, presence_penalty=1.0, frequency_penalty=0.7, min_tokens=6, stop_token_ids=(4, 6)
        )
    ),
    Line(SamplingParams(seed=3, choice=1, temperature=2.0)),
]
DRAFTERS: dict[str, Drafter] = {
    "random trees": random_trees,
    "coupled draft model": model_chain(DRAFT, Stream.TARGET),
    "coupled target": model_chain(MODEL, Stream.TARGET, length=5),
    "sampled draft model": model_chain(DRAFT, Stream.DRAFT),
}
