"""A smaller model of the same vocabulary drafts chains (Leviathan et al. 2023, Chen et al. 2023)."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from engine.acceptance import proposal_for
from engine.model.input_batch import SequenceSlice
from engine.model.model_runner import ModelRunner
from engine.sampling.logits import process_logits
from engine.sampling.metadata import RowGroup
from engine.sampling.noise import Stream
from engine.sampling.sampler import DraftToken, draw_tokens
from engine.sampling_params import SamplingParams
from engine.speculation.base import DraftRequest, ProposalContext, Requirements
from engine.token_tree import EMPTY_TREE, Proposal, TokenTree


class DraftModelSpeculator:
    """Drafts with a model that has a cache of its own, indexed by the engine's block tables.

    The cache follows the one rule of motion: a step computes the positions from what is computed to what is
    committed, and then the draft itself. With n committed tokens and a draft d1 ... d4:

        committed     draft                    what the next step finds
        ... x    │ d1   d2   d3  (d4)          d2 rejected: n + 1 tokens are computed, d2's slot is reused
        slot n-1 │ n    n+1  n+2               all accepted: n + 3 are; d4, which was drawn but not
                                               computed, is the first token of the next catch-up

    Args:
        runner: The draft model. Its vocab_size is the target's, so that no other id is ever drafted.
        max_model_len: Positions that the draft model has.
        max_num_batched_tokens: Tokens of one forward pass at most.
        eos_token_ids: The target's EOS ids; a draft ends with the first one.
    """

    def __init__(
        self,
        runner: ModelRunner,
        *,
        max_model_len: int,
        max_num_batched_tokens: int,
        eos_token_ids: frozenset[int],
    ) -> None:
        self._runner = runner
        self._max_model_len = max_model_len
        self._max_num_batched_tokens = max_num_batched_tokens
        self._eos_token_ids = eos_token_ids
        self._progress: dict[str, _Progress] = {}

    @property
    def requirements(self) -> Requirements:
        """A cache beside the target's, and drafts within the draft model's context."""
        return Requirements(has_cache=True, max_model_len=self._max_model_len)

    @torch.inference_mode()
    def propose(self, context: ProposalContext) -> list[TokenTree]:
        """See Speculator. One pass catches up for all requests, then one pass per further draft token."""
        # One order for the batch, whoever comes first in the context: rows may differ in their last bits
        # with their place in a matrix product.
        requests = sorted(context.requests, key=lambda request: request.request_id)
        chains = self._catch_up(self._plan(requests))
        while growing := [chain for chain in chains if chain.is_growing]:
            self._extend(growing)
        trees = {chain.request.request_id: chain.tree() for chain in chains}
        return [trees.get(request.request_id, EMPTY_TREE) for request in context.requests]

    def num_computed_tokens(self, request_id: str) -> int:
        """Committed tokens in the draft's cache; drafted ones count once a step finds them committed."""
        progress = self._progress.get(request_id)
        return 0 if progress is None else progress.num_computed

    def release(self, request_id: str) -> None:
        """Forgets how far the request's cache was."""
        self._progress.pop(request_id, None)

    def _plan(self, requests: Sequence[DraftRequest]) -> list["_Motion"]:
        """What each request computes in the catch-up pass, within the token limit.

        Those that may draft and miss the least come first, and everyone is left a token, so that whoever
        cannot catch up at once still makes progress.
        """
        wanted = [motion for request in requests if (motion := self._motion(request)) is not None]
        wanted.sort(key=lambda motion: (motion.request.budget == 0, len(motion)))
        spare = self._max_num_batched_tokens
        planned: list[_Motion] = []
        for index, motion in enumerate(wanted):
            num_behind = len(wanted) - index - 1
            allowed = max(spare - num_behind, min(spare, 1))
            motion = motion.shortened(allowed)
            planned.append(motion)
            spare -= len(motion)
        return planned

    def _motion(self, request: DraftRequest) -> "_Motion | None":
        """From what is computed to what is wanted; None where nothing is to be done."""
        num_tokens = len(request.token_ids)
        if num_tokens >= self._max_model_len:
            return None
        begin = self._num_valid(request)
        if request.budget > 0:
            # The last token's row is the first draft's, so it is computed again if nothing has come since.
            return _Motion(request, min(begin, num_tokens - 1), num_tokens)
        if begin < request.num_computed_tokens < num_tokens - 1:
            return _Motion(request, begin, request.num_computed_tokens)
        return None

    def _num_valid(self, request: DraftRequest) -> int:
        """Leading committed tokens that the cache holds, those drafted and accepted since included."""
        progress = self._progress.get(request.request_id)
        if progress is None:
            return request.num_cached_tokens
        begin = progress.num_computed
        committed = request.token_ids[begin : begin + len(progress.drafted)]
        for place, token in enumerate(committed):
            if token != progress.drafted[place]:
                return begin + place
        return begin + len(committed)

    def _catch_up(self, motions: Sequence["_Motion"]) -> list["_Chain"]:
        """Computes committed tokens and draws the first draft token of every request that is up to date."""
        moving = [motion for motion in motions if len(motion)]
        if not moving:
            return []
        logits = self._runner.forward(self._runner.build([motion.slice() for motion in moving]))
        for motion in moving:
            self._progress[motion.request.request_id] = _Progress(motion.end)
        chains = [
            _Chain(motion.request, min(motion.request.budget, self._max_model_len - motion.end))
            for motion in moving
            if motion.is_complete
        ]
        self._draw(chains, logits)
        return chains

    def _extend(self, chains: Sequence["_Chain"]) -> None:
        """Computes the last draft token of each chain and draws the next one."""
        logits = self._runner.forward(self._runner.build([chain.slice() for chain in chains]))
        for chain in chains:
            self._progress[chain.request.request_id] = _Progress(
                len(chain.request.token_ids), chain.token_ids
            )
        self._draw(chains, logits)

    def _draw(self, chains: Sequence["_Chain"], logits: torch.Tensor) -> None:
        """Draws a token per chain from its row, processed as if the chain had been emitted.

        Args:
            chains: Whose rows these are, in order.
            logits: float32 [len(chains), vocab_size].
        """
        groups = [chain.row_group(self._eos_token_ids) for chain in chains]
        keys = [key for group in groups for key in group.noise_keys(_STREAMS[_proposal(group.params)])]
        drawn = draw_tokens(process_logits(logits, groups), keys)
        for chain, group, token in zip(chains, groups, drawn, strict=True):
            chain.append(token, group.banned_token_ids)


@dataclass(frozen=True, slots=True)
class _Progress:
    """How far the cache of a request is.

    Attributes:
        num_computed: Leading tokens computed; all of them committed.
        drafted: Draft tokens computed behind them.
    """

    num_computed: int
    drafted: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class _Motion:
    """Committed tokens `begin` to `end` of a request, to be computed."""

    request: DraftRequest
    begin: int
    end: int

    def __len__(self) -> int:
        return self.end - self.begin

    @property
    def is_complete(self) -> bool:
        """Whether it yields the row of the first draft token."""
        return self.request.budget > 0 and self.end == len(self.request.token_ids)

    def shortened(self, num_tokens: int) -> "_Motion":
        """The first `num_tokens` of it."""
        return _Motion(self.request, self.begin, min(self.end, self.begin + num_tokens))

    def slice(self) -> SequenceSlice:
        """Its part of a forward pass."""
        tokens = self.request.token_ids[self.begin : self.end]
        return SequenceSlice(tokens, self.begin, self.request.block_table, rows=int(self.is_complete))


@dataclass(slots=True)
class _Chain:
    """The draft of one request while it grows.

    Attributes:
        request: Whose draft it is.
        budget: Tokens at most.
        token_ids: The tokens so far.
        distributions: What each was drawn from, for the ratio rule.
        has_ended: Whether the last token ends the answer, so that nothing behind it could be used.
    """

    request: DraftRequest
    budget: int
    token_ids: tuple[int, ...] = ()
    distributions: tuple[torch.Tensor, ...] = ()
    has_ended: bool = False

    @property
    def is_growing(self) -> bool:
        """Whether another token is wanted."""
        return not self.has_ended and len(self.token_ids) < self.budget

    def append(self, token: DraftToken, end_token_ids: Sequence[int]) -> None:
        """Takes the next token."""
        self.token_ids = (*self.token_ids, token.token_id)
        if token.distribution is not None:
            self.distributions = (*self.distributions, token.distribution)
        self.has_ended = token.token_id in end_token_ids

    def slice(self) -> SequenceSlice:
        """The last token's part of a forward pass: draft token j lies in slot n - 1 + j."""
        start = len(self.request.token_ids) - 1 + len(self.token_ids)
        return SequenceSlice(self.token_ids[-1:], start, self.request.block_table)

    def row_group(self, eos_token_ids: frozenset[int]) -> RowGroup:
        """What the next row is processed by: the history, and the chain as if it had been emitted."""
        request = self.request
        return RowGroup(
            request.params, request.token_ids, request.num_prompt_tokens, eos_token_ids, (self.token_ids,)
        )

    def tree(self) -> TokenTree:
        """The draft as it is proposed."""
        return TokenTree.chain(self.token_ids, _proposal(self.request.params), self.distributions)


def _proposal(params: SamplingParams) -> Proposal:
    """The way of drawing that serves the request's verification rule best."""
    return proposal_for(params, distinct=False)


_STREAMS = {
    # Without noise the stream does not matter.
    Proposal.DETERMINISTIC: Stream.TARGET,
    Proposal.COUPLED: Stream.TARGET,
    Proposal.SAMPLED: Stream.DRAFT,
}
