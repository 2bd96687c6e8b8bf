"""Hands the target's hidden states from its pass to the speculator, once it is settled which tokens stand."""

from collections.abc import Sequence

import torch

from engine.core.scheduler import ScheduledRequest
from engine.speculation.base import FeatureRows


class StepFeatures:
    """The hidden states of one step's tokens.

    A row is a token's of the batch: committed ones, and nodes of which a few turn out to stand. What follows
    each other in the text is picked out of them:

        batch       a5 a6 │ b9 n1 n2 n3        verdict on b: nodes 1 and 3 stand
        positions    5  6 │  9 10 10 11
        features     5  6 │  9 10    11
    """

    def __init__(self) -> None:
        self._rows: torch.Tensor | None = None
        self._begins: dict[str, int] = {}
        self._standing: dict[str, FeatureRows] = {}

    def begin(self, scheduled: Sequence[ScheduledRequest], rows: torch.Tensor) -> None:
        """Takes a step's rows.

        Args:
            scheduled: The parts of the step.
            rows: [T, width]; per part its committed tokens' rows, then its nodes'.
        """
        self._rows = rows
        self._standing.clear()
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
            rows = self._rows[torch.tensor(places, dtype=torch.int64, device=self._rows.device)]
        self._standing[request.request_id] = FeatureRows(request.num_computed_tokens, rows)

    def take(self, request_id: str) -> FeatureRows | None:
        """The rows that a request got in this step, handed out once; None if there are none."""
        return self._standing.pop(request_id, None)
