"""The law of what a verification rule emits, by going through everything that chance may do.

A rule asks chance three kinds of questions: what the draft drew, how a coin fell, and, at the end, which
token comes next. `Chance` answers them by a script and notes what else it could have said, so that running
the rule again and again under all scripts visits every outcome with its probability. What comes out is the
joint law of the emitted tokens, to rounding, and it has to be the law of the target generating alone. A run
shorter than the longest one is continued by the target.
"""

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import cast

import torch

from engine.sampling.odds import Accepts, LawAt
from engine.sampling.verification import Verdict
from engine.token_tree import TokenTree

TOLERANCE = 1e-12

# tables[k][x_1, ..., x_k] is the law of token k + 1 behind those tokens.
Tables = list[torch.Tensor]
Tokens = tuple[int, ...]
Draws = Callable[[torch.Tensor, int], dict[Tokens, float]]
"""The law of a node's children: from q and their number to the probability of each outcome, in order."""
Judge = Callable[[TokenTree, LawAt, LawAt, Accepts], Verdict]
"""A rule: tree, p by node, q by draft node, coins."""


def random_tables(vocab_size: int, length: int, generator: torch.Generator, zeros: float = 0.0) -> Tables:
    tables = []
    for depth in range(length):
        logits = 2 * torch.randn([vocab_size] * (depth + 1), generator=generator, dtype=torch.float64)
        # Truncated distributions have zeros; the first token always stays possible.
        cut = torch.rand(logits.shape, generator=generator) < zeros
        cut[..., 0] = False
        tables.append(logits.masked_fill(cut, -torch.inf).softmax(dim=-1))
    return tables


def own_law(target: Tables) -> torch.Tensor:
    """The joint law of as many tokens as there are tables, generated one by one."""
    law = torch.ones((), dtype=torch.float64)
    for table in target:
        law = law[..., None] * table
    return law


class RunLaw:
    """Collects runs with their probabilities; shorter ones are continued by the target."""

    def __init__(self, target: Tables) -> None:
        self._target = target
        self._masses = [torch.zeros_like(table) for table in target]

    def add(self, run: Sequence[int], probability: float) -> None:
        self._masses[len(run) - 1][tuple(run)] += probability

    def add_all(self, prefix: Tokens, law: torch.Tensor, probability: float) -> None:
        """All runs of the prefix and one token more, drawn from the law."""
        self._masses[len(prefix)][prefix] += probability * law

    def distance(self) -> float:
        """Total variation distance from the target's own law."""
        law = self._masses[0]
        for mass, table in zip(self._masses[1:], self._target[1:], strict=True):
            law = law[..., None] * table + mass
        return float((law - own_law(self._target)).abs().sum() / 2)


class Chance:
    """Answers by a script, then by the first possible answer, noting the others as scripts to come."""

    def __init__(self) -> None:
        self._scripts: list[list[int]] = [[]]
        self._script: list[int] = []
        self._given: list[int] = []
        self.probability = 1.0

    def outcomes(self) -> Iterator[None]:
        """Yields once per outcome; `probability` is its own when the caller is done with it."""
        while self._scripts:
            self._script = self._scripts.pop()
            self._given = []
            self.probability = 1.0
            yield

    def answer(self, probabilities: Sequence[float]) -> int:
        """Which of several things happens."""
        place = len(self._given)
        if place < len(self._script):
            index = self._script[place]
        else:
            index, *others = [index for index, p in enumerate(probabilities) if p > 0.0]
            self._scripts += [[*self._given, other] for other in others]
        self._given.append(index)
        self.probability *= probabilities[index]
        return index

    def draws(self, law: torch.Tensor) -> int:
        """A token."""
        return self.answer(law.tolist())

    def accepts(self, node: int, chance: float) -> bool:
        """A coin."""
        return self.answer([1.0 - chance, chance]) == 1


class LazyTree:
    """A tree of given widths whose children are drawn when somebody looks at them, and not before.

    What nobody looks at cannot matter, and leaving it out is what keeps the outcomes few.
    """

    def __init__(self, chance: Chance, draws: Draws, widths: Sequence[int], draft: Tables) -> None:
        self.tokens: list[int] = []
        self.parents: list[int] = []
        self._chance = chance
        self._draws = draws
        self._widths = widths
        self._draft = draft
        self._children: dict[int, Tokens] = {}

    def path_tokens(self, node: int) -> Tokens:
        if node == 0:
            return ()
        return (*self.path_tokens(self.parents[node - 1]), self.tokens[node - 1])

    def as_tree(self) -> TokenTree:
        """Itself, for rules that ask for children and tokens only; chains are drawn whole."""
        if max(self._widths) > 1:
            return cast("TokenTree", self)
        node = 0
        while children := self.children(node):
            (node,) = children
        return TokenTree.chain(self.tokens)

    def children(self, node: int) -> Tokens:
        if node not in self._children:
            prefix = self.path_tokens(node)
            drawn: Tokens = ()
            if len(prefix) < len(self._widths):
                law = self._draws(self._draft[len(prefix)][prefix], self._widths[len(prefix)])
                options = list(law.items())
                drawn = options[self._chance.answer([p for _, p in options])][0]
            begin = len(self.tokens) + 1
            self.tokens += drawn
            self.parents += [node] * len(drawn)
            self._children[node] = tuple(range(begin, begin + len(drawn)))
        return self._children[node]


@dataclass(frozen=True)
class Experiment:
    """A way of drawing and a rule: right together, or a planted error."""

    draws: Draws
    judge: Judge


def distance(experiment: Experiment, widths: Sequence[int], target: Tables, draft: Tables) -> float:
    """Total variation between what comes out for trees of the given widths and the target's own law."""
    law = RunLaw(target)
    chance = Chance()
    for _ in chance.outcomes():
        tree = LazyTree(chance, experiment.draws, widths, draft)

        def law_at(node: int, tree: LazyTree = tree) -> torch.Tensor:
            prefix = tree.path_tokens(node)
            return target[len(prefix)][prefix]

        def draft_law_of(node: int, tree: LazyTree = tree) -> torch.Tensor:
            prefix = tree.path_tokens(tree.parents[node - 1])
            return draft[len(prefix)][prefix]

        verdict = experiment.judge(tree.as_tree(), law_at, draft_law_of, chance.accepts)
        end = verdict.accepted[-1] if verdict.accepted else 0
        last = law_at(end) if verdict.residual is None else verdict.residual
        law.add_all(tree.path_tokens(end), last, chance.probability)
    return law.distance()


def distances(
    experiment: Experiment, vocab_size: int, widths: Sequence[int], num_pairs: int, zeros: float = 0.0
) -> list[float]:
    """Distances over random pairs of target and draft; a quarter of them have zeros in any case."""
    generator = torch.Generator().manual_seed(2023)
    found = []
    for pair in range(num_pairs):
        share = zeros or (0.4 if pair % 4 == 3 else 0.0)
        target = random_tables(vocab_size, len(widths) + 1, generator, share)
        draft = random_tables(vocab_size, len(widths), generator, share)
        found.append(distance(experiment, widths, target, draft))
    return found


def independently(q: torch.Tensor, count: int) -> dict[Tokens, float]:
    """Siblings drawn with replacement."""
    p = q.tolist()
    tuples = itertools.product(range(len(p)), repeat=count)
    return {tokens: math.prod(p[token] for token in tokens) for tokens in tuples}


def without_replacement(q: torch.Tensor, count: int) -> dict[Tokens, float]:
    """Siblings drawn one after another; where the draft has nothing left, the lowest ids that are."""
    law: dict[Tokens, float] = {(): 1.0}
    for _ in range(count):
        longer: dict[Tokens, float] = {}
        for tokens, probability in law.items():
            left = q.clone()
            left[list(tokens)] = 0.0
            if float(left.sum()) == 0.0:
                others = [token for token in range(len(q)) if token not in tokens]
                longer[(*tokens, *others[:1])] = probability
                continue
            for token, share in enumerate((left / left.sum()).tolist()):
                if share > 0.0:
                    longer[(*tokens, token)] = probability * share
        law = longer
    return law
