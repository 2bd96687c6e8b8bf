"""Sampler: rows of logits and draft trees in, verified tokens per request out."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from engine.sampling.logits import chunks, process_logits
from engine.sampling.logprobs import RowLogprobs, row_logprobs
from engine.sampling.metadata import RowGroup
from engine.sampling.noise import NoiseKey, Stream, gumbel_noise, uniform
from engine.sampling.verification import acceptance_probabilities, count_accepted, follow_choices, residual
from engine.sampling_params import Acceptance, SamplingParams
from engine.token_tree import Proposal, TokenTree


@dataclass(frozen=True, slots=True)
class SamplingTask:
    """One request whose last token was computed in this step.

    Attributes:
        params: Its sampling parameters, the seed resolved.
        token_ids: Committed tokens, prompt and output.
        num_prompt_tokens: How many of them are the prompt.
        tree: The draft under verification; empty for plain decoding.
        eos_token_ids: The model's EOS ids; min_tokens bans them, and params.stop_token_ids with them.
    """

    params: SamplingParams
    token_ids: Sequence[int]
    num_prompt_tokens: int
    tree: TokenTree
    eos_token_ids: frozenset[int]


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


@dataclass(frozen=True, slots=True)
class DraftToken:
    """A token that a draft model drew.

    Attributes:
        token_id: The token.
        distribution: What it was drawn from, float32 [vocab_size], if it was drawn with the DRAFT stream.
    """

    token_id: int
    distribution: torch.Tensor | None


class Sampler:
    """Chooses tokens and verifies drafts; keeps no state between calls."""

    def __call__(self, logits: torch.Tensor, tasks: Sequence[SamplingTask]) -> list[SampledRun]:
        """Walks the draft of each task along its verified tokens.

        Args:
            logits: float32 [sum(1 + len(task.tree)), vocab_size]: per task the root's row, then a row per
                node in node order.
            tasks: Whose rows these are, in order.

        Raises:
            ValueError: The rows do not fit the tasks, or a tree of sampled tokens branches.
        """
        walks = _lay_out(tasks)
        processed = process_logits(logits, [walk.group for walk in walks])
        rows = [row for walk in walks for row in walk.rows_to_choose()]
        keys = [key for walk in walks for key in walk.keys_to_choose()]
        picked = processed if len(rows) == len(processed) else processed[torch.tensor(rows).to(logits.device)]
        choices = dict(zip(rows, choose_tokens(picked, keys).tolist(), strict=True))
        return [_run(walk, logits, processed, choices) for walk in walks]


def choose_tokens(processed: torch.Tensor, keys: Sequence[NoiseKey | None]) -> torch.Tensor:
    """The token of each row: argmax(log p + Gumbel noise), or the most likely one.

    Args:
        processed: Logits from `process_logits`, [num_rows, vocab_size].
        keys: Per row the key of its noise; None takes the most likely token, the lowest id among equals.

    Returns:
        int64 [num_rows].
    """
    if all(key is None for key in keys):
        return processed.argmax(dim=-1)
    vocab_size = processed.shape[1]
    tokens: list[torch.Tensor] = []
    for chunk in chunks(range(len(keys)), vocab_size):
        scores = processed[chunk[0] : chunk[-1] + 1].to(torch.float64)
        noisy = [(place, key) for place, row in enumerate(chunk) if (key := keys[row]) is not None]
        noise = gumbel_noise([key for _, key in noisy], vocab_size, processed.device)
        if len(noisy) == len(chunk):
            scores += noise
        else:
            index = torch.tensor([place for place, _ in noisy], dtype=torch.int64, device=processed.device)
            scores.index_add_(0, index, noise)
        tokens.append(scores.argmax(dim=-1))
    return torch.cat(tokens)


def draw_tokens(processed: torch.Tensor, keys: Sequence[NoiseKey | None]) -> list[DraftToken]:
    """Draws a draft model's next tokens.

    Keys of the TARGET stream couple the draft to the target's own noise (Daliri et al. 2024), which makes the
    two agree most often under the match rule. Keys of the DRAFT stream are independent of it, as the
    rejection rule demands.

    Args:
        processed: The draft's logits after `process_logits`, [num_rows, vocab_size].
        keys: Per row the key of its noise, from `RowGroup.noise_keys`; None takes the most likely token.
    """
    token_ids = choose_tokens(processed, keys).tolist()
    return [
        DraftToken(token, row.softmax(dim=-1) if key is not None and key.stream is Stream.DRAFT else None)
        for token, row, key in zip(token_ids, processed, keys, strict=True)
    ]


@dataclass(frozen=True, slots=True)
class _Walk:
    """One task and where its rows lie."""

    task: SamplingTask
    group: RowGroup
    begin: int

    @property
    def is_rejection(self) -> bool:
        """Whether the ratio rule verifies the draft; the match rule is right for everything else."""
        params, tree = self.task.params, self.task.tree
        return (
            params.speculation.acceptance is Acceptance.REJECTION
            and tree.proposal is Proposal.SAMPLED
            and not params.is_greedy
            and len(tree) > 0
        )

    def rows_to_choose(self) -> range:
        """Rows at which the target chooses; of a chain under the ratio rule only the bonus token's."""
        end = self.begin + len(self.group)
        return range(end - 1 if self.is_rejection else self.begin, end)

    def keys_to_choose(self) -> tuple[NoiseKey | None, ...]:
        """The noise of those rows."""
        keys = self.group.noise_keys(Stream.TARGET)
        return keys[-1:] if self.is_rejection else keys


def _lay_out(tasks: Sequence[SamplingTask]) -> list[_Walk]:
    walks: list[_Walk] = []
    begin = 0
    for task in tasks:
        tree = task.tree
        if tree.proposal is Proposal.SAMPLED and tree.parents != tuple(range(len(tree))):
            raise ValueError(f"sampled trees must be chains, got parents {tree.parents}")
        group = RowGroup(
            task.params, task.token_ids, task.num_prompt_tokens, task.eos_token_ids, RowGroup.tree_paths(tree)
        )
        walks.append(_Walk(task, group, begin))
        begin += len(group)
    return walks


def _run(walk: _Walk, logits: torch.Tensor, processed: torch.Tensor, choices: dict[int, int]) -> SampledRun:
    tree = walk.task.tree
    if walk.is_rejection:
        rows = processed[walk.begin : walk.begin + len(walk.group)]
        accepted, token = _verify_by_rejection(walk, rows, choices[walk.begin + len(tree)])
    else:
        at_nodes = [choices[walk.begin + node] for node in range(len(walk.group))]
        accepted = follow_choices(tree, at_nodes)
        token = at_nodes[accepted[-1] if accepted else 0]
    token_ids = (*(tree.tokens[node - 1] for node in accepted), token)
    num_top = walk.task.params.logprobs
    if num_top is None:
        return SampledRun(accepted, token_ids, None)
    rows = logits[[walk.begin, *(walk.begin + node for node in accepted)]]
    return SampledRun(accepted, token_ids, tuple(row_logprobs(rows, token_ids, num_top)))


def _verify_by_rejection(walk: _Walk, rows: torch.Tensor, bonus: int) -> tuple[tuple[int, ...], int]:
    """Accepted nodes and the next token of a sampled chain; rows are its processed logits."""
    tree = walk.task.tree
    p = rows.softmax(dim=-1)
    q = torch.stack([_as_tensor(distribution, p) for distribution in tree.distributions])
    coins = uniform([walk.group.noise_key(depth, Stream.ACCEPT) for depth in range(len(tree))])
    count = count_accepted(acceptance_probabilities(p, q, tree.tokens), coins)
    accepted = tuple(range(1, count + 1))
    if count == len(tree):
        return accepted, bonus
    replacement = residual(p[count], q[count]).log()[None]
    key = walk.group.noise_key(count, Stream.RESIDUAL)
    return accepted, int(choose_tokens(replacement, [key]))


def _as_tensor(distribution: object, like: torch.Tensor) -> torch.Tensor:
    # Trees know nothing of tensors; this is the one place that says what a distribution is.
    if not isinstance(distribution, torch.Tensor) or distribution.shape != like.shape[1:]:
        raise ValueError(f"a draft distribution must be a tensor of {like.shape[1]} probabilities")
    return distribution.to(like)
