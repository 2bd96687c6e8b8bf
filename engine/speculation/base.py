"""The Speculator protocol: something cheap that guesses the next tokens.

A speculator is asked once per step for all requests at the same time. What it is told is frozen; what it
returns is one TokenTree per request. It decides nothing about the answer: the target does.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from engine.grammar import Matcher
from engine.sampling_params import SamplingParams
from engine.speculation.text_store import TextStore
from engine.token_tree import MAX_NODES, TokenTree


@dataclass(frozen=True, slots=True)
class Requirements:
    """What a speculator needs of the engine, read once when the engine is built.

    Attributes:
        has_cache: It keeps key/value tensors indexed by the engine's block tables.
        max_model_len: It cannot draft behind this many tokens; None is no limit of its own.
        text_store: Where the engine shall put the texts of requests that have ended; None is nowhere.
        branches: Its trees may have more nodes than levels, so that short room costs levels and not nodes.
    """

    has_cache: bool = False
    max_model_len: int | None = None
    text_store: TextStore | None = None
    branches: bool = False


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
        budget: Draft nodes wanted at most. 0 while the prompt is being read: nothing to propose, but a
            cache may follow up to num_computed_tokens.
        max_depth: Levels at most: deeper nodes have no room in the context or in the answer.
        matcher: Follows the answer through its grammar; None leaves it free. Tokens drawn from a recorded
            distribution must come from rows that it has masked; of others the engine takes out those that
            it does not allow.
        num_requests: How many share the step, this one included: the more, the less rows come for free.
        prediction_budget: Nodes that the request's own prediction may draft, in a chain; it is bound by the
            room in context and answer and not by the method's settings. 0 without a prediction.
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
    matcher: Matcher | None = None
    num_requests: int = 1
    prediction_budget: int = 0


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
