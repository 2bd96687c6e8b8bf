"""Request: what the scheduler knows of one prompt and its answer."""

from dataclasses import dataclass, field
from enum import Enum, auto

from engine.core.stopping import StopRules
from engine.grammar import Matcher
from engine.sampling_params import SamplingParams
from engine.token_tree import EMPTY_TREE, TokenTree


class RequestStatus(Enum):
    """Where a request stands."""

    WAITING = auto()
    RUNNING = auto()
    FINISHED = auto()


@dataclass(slots=True, eq=False)
class Request:
    """A prompt, the answer so far, and how much of both is in the target's cache.

    There is no prefill phase and no decode phase: every step brings num_computed_tokens closer to the
    number of tokens, and where it arrives, a new token is chosen. Rolling back is lowering a number.

    Attributes:
        request_id: Its name, unique in the engine.
        token_ids: Prompt and committed answer.
        num_prompt_tokens: How many of them are the prompt.
        params: Sampling parameters, the seed resolved.
        stop_rules: When the answer ends, by token ids.
        num_computed_tokens: Leading tokens whose keys and values are in the target's cache.
        num_cached_tokens: Leading tokens the prefix cache supplied at the last admission; after a preemption
            they may be more than the prompt.
        num_draft_cached_tokens: Those among them that the speculator's cache holds too.
        needs_draft_cache: Whether only what the speculator's cache holds may come from the prefix cache: it
            could not make up for the rest.
        draft: The tree to be verified in the next step.
        matcher: Follows the answer through the grammar that it must obey; None where there is none.
        status: Where it stands.
        is_held: Whether it runs but sits steps out, while an older request computes what it needs.
        prefix_keys: Digests of its full blocks' contents, as far as they were needed.
    """

    request_id: str
    token_ids: list[int]
    num_prompt_tokens: int
    params: SamplingParams
    stop_rules: StopRules
    num_computed_tokens: int = 0
    num_cached_tokens: int = 0
    num_draft_cached_tokens: int = 0
    needs_draft_cache: bool = False
    draft: TokenTree = field(default=EMPTY_TREE)
    matcher: Matcher | None = None
    status: RequestStatus = RequestStatus.WAITING
    is_held: bool = False
    prefix_keys: list[bytes] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        """Prompt and answer so far."""
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        """The answer so far."""
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def num_uncomputed_tokens(self) -> int:
        """Tokens the target has yet to compute; 1 while the answer is being written."""
        return len(self.token_ids) - self.num_computed_tokens

    @property
    def needs_every_row(self) -> bool:
        """Whether each prompt token's logits are wanted, so that none may come from the prefix cache."""
        return self.params.prompt_logprobs is not None
