"""The Speculator protocol: something cheap that guesses the next tokens.

A speculator is asked once per step for all requests at the same time. What it is told is frozen; what it
returns is one TokenTree per request. It decides nothing about the answer: the target does.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from engine.grammar import Matcher
from engine.model.hidden_states import HiddenSelection
from engine.sampling_params import SamplingParams
from engine.speculation.evidence import ALONE, RowPrice
from engine.speculation.text_store import TextStore
from engine.speculation.tree_shape import TreeShape
from engine.token_tree import MAX_NODES, TokenTree


@dataclass(frozen=True, slots=True)
class Requirements:
    """What a speculator needs of the engine, read once when the engine is built.

    Attributes:
        has_cache: It keeps key/value tensors indexed by the engine's block tables.
        max_model_len: It cannot draft behind this many tokens; None is no limit of its own.
        text_store: Where the engine shall put the texts of requests that have ended; None is nowhere.
        branches: Its trees may have more nodes than levels, so that short room costs levels and not nodes.
        hidden_states: What it reads of the target; None is nothing. Together with `has_cache` it has to be
            told of every position, so that it is asked with a budget of 0 too, and the prefix cache gives
            its requests only what is in its own cache as well.
        estimates: Its trees say how likely each node is to stand, in `probabilities`, and cost next to
            nothing. So it is asked before it is known how many nodes pay, and its trees are cut afterwards.
        shape: What its trees usually look like, for estimates of how many nodes pay; None is a chain.
        ends_early: Its chains end where it is not sure enough of them (`DraftRequest.least`), unless their
            tokens are drawn for a ratio rule.
    """

    has_cache: bool = False
    max_model_len: int | None = None
    text_store: TextStore | None = None
    branches: bool = False
    hidden_states: HiddenSelection | None = None
    estimates: bool = False
    shape: TreeShape | None = None
    ends_early: bool = False

    @property
    def follows(self) -> bool:
        """Whether its cache is made of the target's hidden states, which pass by only once."""
        return self.has_cache and self.hidden_states is not None


@dataclass(frozen=True, slots=True)
class FeatureRows:
    """Hidden states of the target at consecutive positions of a request.

    Attributes:
        start: The first position.
        rows: [num_positions, width], the states that were asked for side by side, in the target's type. A
            piece of the whole batch's tensor: whoever keeps it copies it.
    """

    start: int
    rows: torch.Tensor

    @property
    def end(self) -> int:
        """The position behind the last one."""
        return self.start + len(self.rows)


@dataclass(frozen=True, slots=True)
class DraftRequest:
    """One request as a speculator sees it, after a step's tokens have been committed.

    Attributes:
        request_id: Which request.
        token_ids: Prompt and answer so far; only committed tokens.
        num_prompt_tokens: How many of them are the prompt.
        num_computed_tokens: Leading tokens that are in the target's cache: all but the last one when the
            request is decoding, fewer while its prompt is still being read.
        num_cached_tokens: Leading tokens that the prefix cache supplied for the *speculator's* cache when
            the request was last admitted; where a cache starts to compute.
        block_table: Block ids of the request; they cover token_ids and `budget` more slots.
        params: Its sampling parameters, the seed resolved.
        budget: Draft nodes wanted at most. 0 while the prompt is being read, and in steps that shall go
            without a draft: nothing to propose, but a cache may follow up to num_computed_tokens.
        max_depth: Levels at most: deeper nodes have no room in the context or in the answer.
        least: A chain whose chance to stand falls below that is not drafted further.
        price: Whether a node is worth its row, for those who know how likely it is to stand.
        features: Hidden states of the committed positions that the last step computed, up to
            num_computed_tokens; None if nobody asked for them.
        matcher: Follows the answer through its grammar; None leaves it free. Tokens drawn from a recorded
            distribution must come from rows that it has masked; of others the engine takes out those that
            it does not allow.
    """

    request_id: str
    token_ids: Sequence[int]
    num_prompt_tokens: int
    num_computed_tokens: int
    num_cached_tokens: int
    block_table: Sequence[int]
    params: SamplingParams
    budget: int
    max_depth: int = MAX_NODES
    least: float = 0.0
    price: RowPrice = ALONE
    features: FeatureRows | None = None
    matcher: Matcher | None = None


@dataclass(frozen=True, slots=True)
class ProposalContext:
    """All requests that may speculate in the coming step."""

    requests: tuple[DraftRequest, ...]


class Speculator(Protocol):
    """Proposes draft trees. An exception costs one step's drafts, never a request."""

    @property
    def requirements(self) -> Requirements:
        """What the engine has to provide."""

    def propose(self, context: ProposalContext) -> list[TokenTree]:
        """One tree per request of the context, in its order, within its `budget` and `max_depth`.

        Trees hold ids of the target's vocabulary only; the empty tree is always a fine answer.
        """

    def num_computed_tokens(self, request_id: str) -> int:
        """Leading committed tokens whose keys and values are in the speculator's cache; 0 without one."""

    def release(self, request_id: str) -> None:
        """Forgets a request that ended or was preempted; unknown ids are no error."""
