"""The planner: how many draft nodes each request gets in the coming step."""

from engine.core.request import Request


class Planner:
    """Gives every request what it asked for, or the configured number, within the room it has.

    Args:
        num_draft_tokens: Nodes per step where the request does not say.
        max_model_len: Tokens prompt and answer share.
        draft_max_model_len: Tokens behind which the speculator cannot draft; None is no limit.
    """

    def __init__(self, num_draft_tokens: int, max_model_len: int, draft_max_model_len: int | None) -> None:
        self._num_draft_tokens = num_draft_tokens
        self._max_model_len = max_model_len
        self._draft_max_model_len = draft_max_model_len

    def has_outgrown(self, request: Request) -> bool:
        """Whether the request is too long for the speculator for good."""
        limit = self._draft_max_model_len
        return limit is not None and request.num_tokens >= limit

    def node_budget(self, request: Request) -> int:
        """Draft nodes the request can use, never more than it has room for.

        A step commits its accepted nodes and one token more, so the last place is never a draft's.
        """
        room = min(
            request.stop_rules.max_tokens - request.num_output_tokens,
            self._max_model_len - request.num_tokens,
        )
        wanted = request.params.speculation.num_draft_tokens or self._num_draft_tokens
        budget = min(wanted, room - 1)
        if self._draft_max_model_len is not None:
            budget = min(budget, self._draft_max_model_len - request.num_tokens)
        return max(0, budget)
