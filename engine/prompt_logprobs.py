"""PromptLogprobs: how likely the target found each token of a prompt."""

from collections.abc import Callable

import torch

from engine.core.request import Request
from engine.core.scheduler import ScheduledRequest
from engine.outputs import TokenLogprob
from engine.sampling.logprobs import RowLogprobs, ranked, row_logprobs


class PromptLogprobs:
    """Collects them chunk by chunk, for the requests that want them.

    The row of a token speaks of the token behind it, so the first token of a prompt has none. A request
    that was preempted computes its prompt anew; what was collected before is kept.
    """

    def __init__(self) -> None:
        self._collected: dict[str, list[RowLogprobs]] = {}

    def wants(self, item: ScheduledRequest) -> bool:
        """Whether rows of the committed tokens in this part of a step are wanted."""
        request = item.request
        if not request.needs_every_row:
            return False
        return len(self._collected.get(request.request_id, ())) < request.num_prompt_tokens - 1

    def collect(self, item: ScheduledRequest, rows: torch.Tensor) -> None:
        """Takes the rows of the item's committed tokens, [item.num_tokens, vocab_size]."""
        request = item.request
        collected = self._collected.setdefault(request.request_id, [])
        start = request.num_computed_tokens
        skip = len(collected) - start
        end = min(start + item.num_tokens, request.num_prompt_tokens - 1)
        tokens = request.token_ids[start + skip + 1 : end + 1]
        num_top = request.params.prompt_logprobs
        assert num_top is not None
        if tokens:
            wanted = rows[skip : skip + len(tokens)]
            collected.extend(ranked(row_logprobs(wanted, tokens, num_top), wanted))

    def of(
        self, request: Request, spelled: Callable[[RowLogprobs], TokenLogprob]
    ) -> tuple[TokenLogprob | None, ...] | None:
        """What is told of a prompt: nothing of its first token; None if nobody asked."""
        if not request.needs_every_row:
            return None
        return (None, *map(spelled, self._collected.get(request.request_id, [])))

    def remove(self, request_id: str) -> None:
        """Forgets a request; unknown ids are no error."""
        self._collected.pop(request_id, None)
