"""Hands the target's hidden states from its pass to the speculator, once it is settled which tokens stand."""

from collections.abc import Sequence

import torch

from engine.core.scheduler import ScheduledRequest
from engine.sampling.uploading import upload
from engine.speculation.base import FeatureRows

_COPIED_WHOLE = 64
"""A step of no more rows is copied at once instead of part by part."""


class StepFeatures:
    """The hidden states of a step's tokens, and of earlier steps' that nobody has taken yet.

    A row is a token's of the batch: committed ones, and nodes of which a few turn out to stand. What follows
    each other in the text is picked out of them:

        batch       a5 a6 │ b9 n1 n2 n3        verdict on b: nodes 1 and 3 stand
        positions    5  6 │  9 10 10 11
        features     5  6 │  9 10    11

    Args:
        keeps: Whether what was not taken is kept; for who has to see every position, if not in every step.
    """

    def __init__(self, *, keeps: bool = False) -> None:
        self.keeps = keeps
        self._rows: torch.Tensor | None = None
        self._begins: dict[str, int] = {}
        self._standing: dict[str, list[FeatureRows]] = {}
        self._num_waiting: dict[str, int] = {}
        self._is_shared = False

    def begin(self, scheduled: Sequence[ScheduledRequest], rows: torch.Tensor) -> None:
        """Takes a step's rows.

        Args:
            scheduled: The parts of the step.
            rows: [T, width]; per part its committed tokens' rows, then its nodes'.
        """
        # The step's rows are overwritten by the next one's.
        self._is_shared = self.keeps and len(rows) <= _COPIED_WHOLE
        self._rows = rows.clone() if self._is_shared else rows
        if not self.keeps:
            self._standing.clear()
            self._num_waiting.clear()
        self._begins.clear()
        place = 0
        for item in scheduled:
            self._begins[item.request.request_id] = place
            place += item.num_tokens + len(item.tree)

    def commit(self, item: ScheduledRequest, accepted: Sequence[int]) -> None:
        """Picks the rows of a part that stand; called before its request moves on.

        Args:
            item: The part.
            accepted: The nodes that stand, one below the other.
        """
        assert self._rows is not None, "a step begins before its tokens are committed"
        request = item.request
        begin = self._begins[request.request_id]
        end = begin + item.num_tokens
        if all(node == place for place, node in enumerate(accepted, start=1)):
            rows = self._rows[begin : end + len(accepted)]
        else:
            places = [*range(begin, end), *(end - 1 + node for node in accepted)]
            rows = self._rows[upload(places, torch.int64, self._rows.device)]
        if self.keeps and not self._is_shared:
            rows = rows.clone()
        name = request.request_id
        self._standing.setdefault(name, []).append(FeatureRows(request.num_computed_tokens, rows))
        self._num_waiting[name] = self._num_waiting.get(name, 0) + item.num_tokens + len(accepted)

    def num_waiting(self, request_id: str) -> int:
        """Positions of a request that nobody has taken yet."""
        return self._num_waiting.get(request_id, 0)

    def take(self, request_id: str) -> FeatureRows | None:
        """The rows of a request that nobody has taken yet, handed out once; None if there are none."""
        self._num_waiting.pop(request_id, None)
        pieces = self._standing.pop(request_id, ())
        if len(pieces) < 2:
            return next(iter(pieces), None)
        return FeatureRows(pieces[0].start, torch.cat([piece.rows for piece in pieces]))

    def drop(self, request_id: str) -> None:
        """Forgets a request."""
        self._standing.pop(request_id, None)
        self._num_waiting.pop(request_id, None)
