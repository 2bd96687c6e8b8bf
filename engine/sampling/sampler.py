"""Sampler: rows of logits and draft trees in, verified tokens per request out."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice

import torch

from engine.acceptance import Rule, rule_for
from engine.grammar import Matcher
from engine.sampling.choosing import Choice, choose_at_once, choose_tokens
from engine.sampling.device_rows import DeviceRows
from engine.sampling.judging import coins_of, odds_of
from engine.sampling.logits import RowOperators, adjust_logits, process_logits
from engine.sampling.logprobs import RowLogprobs, row_logprobs
from engine.sampling.noise import NoiseKey, Stream
from engine.sampling.odds import Odds
from engine.sampling.row_group import RowGroup
from engine.sampling.uploading import upload
from engine.sampling.verification import follow_choices, verdict
from engine.sampling_params import SamplingParams
from engine.token_tree import TokenTree


@dataclass(frozen=True, slots=True)
class SamplingTask:
    """One request whose last token was computed in this step.

    Attributes:
        params: Its sampling parameters, the seed resolved.
        token_ids: Committed tokens, prompt and output.
        num_prompt_tokens: How many of them are the prompt.
        tree: The draft under verification; empty for plain decoding.
        eos_token_ids: The model's EOS ids; min_tokens bans them, and params.stop_token_ids with them.
        matcher: Follows the answer through its grammar; None leaves it free.
    """

    params: SamplingParams
    token_ids: Sequence[int]
    num_prompt_tokens: int
    tree: TokenTree
    eos_token_ids: frozenset[int]
    matcher: Matcher | None = None


@dataclass(frozen=True, slots=True)
class SampledRun:
    """What a step decided for one request.

    Attributes:
        accepted_nodes: Node numbers along the accepted path.
        token_ids: The accepted tokens, then the next token: the bonus, or the correction of a rejected one.
        logprobs: One entry per token, if params.logprobs is not None.
    """

    accepted_nodes: tuple[int, ...]
    token_ids: tuple[int, ...]
    logprobs: tuple[RowLogprobs, ...] | None


class Sampler:
    """Chooses tokens and verifies drafts; keeps no state between calls.

    Args:
        operators: What rows are processed with; None takes plain torch.
        far: For devices that it takes long to hear from: all that a walk may need is worked out with these
            for every node, also where it does not come by, and copied to the host once. Without them the
            walks go a level at a time and nothing is worked out in vain. The verdicts are the same.
    """

    def __init__(self, operators: RowOperators | None = None, *, far: DeviceRows | None = None) -> None:
        self._operators = operators
        self._far = far

    def __call__(self, logits: torch.Tensor, tasks: Sequence[SamplingTask]) -> list[SampledRun]:
        """Walks the draft of each task along its verified tokens.

        Args:
            logits: float32 [sum(1 + len(task.tree)), vocab_size]: per task the root's row, then a row per
                node in node order.
            tasks: Whose rows these are, in order.

        Raises:
            ValueError: The rows do not fit the tasks, or a tree does not fit the rule that is to verify it.
        """
        walks = _lay_out(tasks)
        groups = [walk.group for walk in walks]
        if self._far is not None:
            _decide_at_once(walks, self._far.process(logits, groups), self._far)
            return [walk.run(logits) for walk in walks]
        matched = [walk for walk in walks if walk.rule is Rule.MATCH]
        judged = [walk for walk in walks if walk.rule is not Rule.MATCH]
        if self._operators is not None and not judged:
            _match(walks, partial(choose_at_once, adjust_logits(logits, groups), operators=self._operators))
        else:
            processed = process_logits(logits, groups, self._operators)
            _match(matched, partial(_choose_processed, processed, operators=self._operators))
            _judge(judged, processed, self._operators)
        return [walk.run(logits) for walk in walks]


class _Walk:
    """One task on its way through its draft.

    Attributes:
        group: By what its rows are processed.
        begin: Where they begin.
        rule: What verifies the draft.
        accepted: The nodes accepted so far.
        next_token: The token behind them, once it is known.
    """

    def __init__(self, task: SamplingTask, begin: int) -> None:
        paths = RowGroup.tree_paths(task.tree)
        self.group = RowGroup(
            task.params, task.token_ids, task.num_prompt_tokens, task.eos_token_ids, paths, task.matcher
        )
        self.begin = begin
        self.rule = rule_for(task.params, task.tree)
        self.tree = task.tree
        self.accepted: tuple[int, ...] = ()
        self.next_token: int | None = None

    @property
    def node(self) -> int:
        """The node it has come to; the root is 0."""
        return self.accepted[-1] if self.accepted else 0

    def nodes_to_choose_at(self) -> Sequence[int]:
        """Where the match rule needs the target's choice next.

        That is the node it has come to. Where the likeliest token is taken it is every node at once: one pass
        without noise costs less than one pass per level.
        """
        return range(len(self.group)) if self.group.params.is_greedy else (self.node,)

    def target_key(self) -> NoiseKey | None:
        """The noise of the target's choice at `node`."""
        if self.group.params.is_greedy:
            return None
        return self.group.noise_key(len(self.accepted), Stream.TARGET)

    def odds(self, processed: torch.Tensor) -> Odds | None:
        """What its rule makes of its draft; None for match."""
        if self.rule is Rule.MATCH:
            return None
        return odds_of(self.rule, self.tree, processed[self.begin : self.begin + len(self.group)])

    def settle(self, odds: Odds | None, choices: Sequence[int], chances: Sequence[float]) -> None:
        """Goes all the way.

        Args:
            odds: See `odds`.
            choices: Per node the token that ends the walk there; for match the target's choice.
            chances: Per draft node what the odds say; for match none.
        """
        if odds is None:
            self.follow(dict(enumerate(choices)))
        else:
            coins = coins_of(self.rule, self.tree, self.group)
            self.accepted = odds.walk(lambda node: chances[node - 1], coins)
            self.next_token = choices[self.node]

    def follow(self, choices: Mapping[int, int]) -> None:
        """Goes as far as the target's choices, by node, lead."""
        self.accepted, self.next_token = follow_choices(self.tree, choices, self.accepted)

    def run(self, logits: torch.Tensor) -> SampledRun:
        """What was decided; logits are the raw rows of all tasks."""
        assert self.next_token is not None, "every walk ends in a token"
        token_ids = (*(self.tree.tokens[node - 1] for node in self.accepted), self.next_token)
        num_top = self.group.params.logprobs
        if num_top is None:
            return SampledRun(self.accepted, token_ids, None)
        rows = logits[[self.begin, *(self.begin + node for node in self.accepted)]]
        return SampledRun(self.accepted, token_ids, tuple(row_logprobs(rows, token_ids, num_top)))


def _lay_out(tasks: Sequence[SamplingTask]) -> list[_Walk]:
    walks: list[_Walk] = []
    begin = 0
    for task in tasks:
        walks.append(_Walk(task, begin))
        begin += 1 + len(task.tree)
    return walks


Choose = Callable[[Sequence[Choice]], list[int]]
"""Chooses tokens."""


def _match(walks: Sequence[_Walk], choose: Choose) -> None:
    """Verifies by the match rule, one level of all trees at a time."""
    while walks:
        nodes = [walk.nodes_to_choose_at() for walk in walks]
        wanted = [
            Choice(walk.begin + node, walk.group.params, walk.target_key())
            for walk, own in zip(walks, nodes, strict=True)
            for node in own
        ]
        tokens = iter(choose(wanted))
        for walk, own in zip(walks, nodes, strict=True):
            walk.follow({node: next(tokens) for node in own})
        walks = [walk for walk in walks if walk.next_token is None]


def _choose_processed(
    processed: torch.Tensor, choices: Sequence[Choice], operators: RowOperators | None
) -> list[int]:
    picked = processed
    if len(choices) < len(processed):
        picked = processed[upload([choice.row for choice in choices], torch.int64, processed.device)]
    tokens: list[int] = choose_tokens(picked, [choice.key for choice in choices], operators).tolist()
    return tokens


def _judge(walks: Sequence[_Walk], processed: torch.Tensor, operators: RowOperators | None) -> None:
    """Verifies by the other rules, and draws the next token of each."""
    rows: list[torch.Tensor] = []
    keys: list[NoiseKey | None] = []
    for walk in walks:
        odds = walk.odds(processed)
        assert odds is not None, "it does not match"
        found = verdict(odds, coins_of(walk.rule, walk.tree, walk.group))
        walk.accepted = found.accepted
        if found.residual is None:
            rows.append(processed[walk.begin + walk.node])
            keys.append(walk.target_key())
        else:
            rows.append(found.residual.log())
            keys.append(walk.group.noise_key(len(walk.accepted), Stream.RESIDUAL))
    if walks:
        tokens = choose_tokens(torch.stack(rows), keys, operators).tolist()
        for walk, token in zip(walks, tokens, strict=True):
            walk.next_token = token


def _decide_at_once(walks: Sequence[_Walk], processed: torch.Tensor, far: DeviceRows) -> None:
    """Verifies by any rule: each node has one law to end in, and each draft node one chance to stand."""
    endings: list[tuple[int, torch.Tensor]] = []
    chances: list[torch.Tensor] = []
    keys: list[NoiseKey | None] = []
    found = [walk.odds(processed) for walk in walks]
    for walk, odds in zip(walks, found, strict=True):
        own = list(walk.group.noise_keys(Stream.TARGET))
        if odds is not None:
            chances += [odds.chance(node) for node in range(1, len(own))]
            for node, path in enumerate(walk.group.paths):
                law = odds.ending(node)
                if law is not None:
                    endings.append((walk.begin + node, law))
                    own[node] = walk.group.noise_key(len(path), Stream.RESIDUAL)
        keys += own
    if endings:
        processed = processed.clone()
        for row, law in endings:
            processed[row] = law.log()
    numbers = _to_host(far.choose(processed, keys), chances) if walks else []
    choices, read = map(int, numbers[: len(keys)]), iter(numbers[len(keys) :])
    for walk, odds in zip(walks, found, strict=True):
        num_chances = 0 if odds is None else len(walk.tree)
        walk.settle(odds, [*islice(choices, len(walk.group))], [*islice(read, num_chances)])


def _to_host(tokens: torch.Tensor, chances: Sequence[torch.Tensor]) -> list[float]:
    """Tokens and chances in a row, in one copy; float64 holds every id exactly."""
    numbers = torch.cat([tokens.double(), torch.stack(list(chances))]) if chances else tokens
    read: list[float] = numbers.tolist()
    return read
