"""DraftRoom: how many draft nodes a request has room for, and how deep they may lie."""

from engine.core.request import Request
from engine.token_tree import MAX_NODES


class DraftRoom:
    """The limits of one method's drafts: settings, contexts and the answer's end.

    Args:
        num_draft_tokens: Nodes per step where the request does not say.
        max_model_len: Tokens prompt and answer share.
        draft_max_model_len: Tokens behind which the speculator cannot draft; None is no limit.
        branches: Whether trees may have more nodes than levels; chains need no more nodes than have room.
    """

    def __init__(
        self,
        num_draft_tokens: int,
        max_model_len: int,
        draft_max_model_len: int | None,
        *,
        branches: bool = False,
    ) -> None:
        self._num_draft_tokens = num_draft_tokens
        self._max_model_len = max_model_len
        self._draft_max_model_len = draft_max_model_len
        self._branches = branches

    @property
    def is_bounded(self) -> bool:
        """Whether a request can become too long for the speculator."""
        return self._draft_max_model_len is not None

    def has_outgrown(self, request: Request) -> bool:
        """Whether the request is too long for the speculator for good."""
        limit = self._draft_max_model_len
        return limit is not None and request.num_tokens >= limit

    def node_budget(self, request: Request) -> int:
        """Draft nodes the request can use; none where there is no room for one."""
        wanted = request.params.speculation.num_draft_tokens or self._num_draft_tokens
        depth = self.max_depth(request)
        return wanted if self._branches and depth else min(wanted, depth)

    def max_depth(self, request: Request) -> int:
        """Draft tokens in a row that the request has room for.

        A step commits its accepted nodes and one token more, so the last place is never a draft's.
        """
        room = min(
            request.stop_rules.max_tokens - request.num_output_tokens,
            self._max_model_len - request.num_tokens,
        )
        depth = min(room - 1, MAX_NODES)
        if self._draft_max_model_len is not None:
            depth = min(depth, self._draft_max_model_len - request.num_tokens)
        return max(0, depth)
