"""Which texts a draft head follows: those of all requests, until drafts no longer pay for it under load."""

from collections.abc import Sequence

from engine.core.request import Request
from engine.speculation.drafter import Drafter
from engine.speculation.planner import Planner

_EVERY = 8
"""Steps from one review to the next."""

_TRIAL = 16
"""Of so many texts for which drafts would not pay one is followed: or else nobody would see them improve."""

_PATIENCE = 8
"""Reviews in a row by which drafts would not pay, before the head lets go of the texts it follows."""


class Following:
    """Lets a head follow the texts that its drafts may pay for.

    It reads each hidden state of the target's once, as it comes by, drafted for or not: with many requests in
    a step that is a twentieth of its time. A text that was let go stays so, since what was missed cannot be
    made up.

    Args:
        drafters: All methods; one at most follows texts.
        planner: Says whether drafts may pay.
    """

    def __init__(self, drafters: Sequence[Drafter], planner: Planner) -> None:
        self._head = next(((place, each) for place, each in enumerate(drafters) if each.needs.follows), None)
        self._planner = planner
        self._num_steps = self._num_idle = self._num_refused = 0

    def begins(self, request: Request, num_requests: int) -> bool:
        """Whether the head is to follow a new request's text.

        Args:
            request: The new one.
            num_requests: All there are at the moment, with it.
        """
        if self._head is None or not request.params.speculation.enabled:
            return False
        method, drafter = self._head
        if drafter.room.has_outgrown(request):
            return False
        if self._planner.follows_texts(method, num_requests):
            return True
        self._num_refused += 1
        return self._num_refused % _TRIAL == 0

    def review(self, running: Sequence[Request]) -> None:
        """Lets go of all texts where drafts would not have paid for long; called once a step."""
        self._num_steps += 1
        if self._head is None or self._num_steps % _EVERY:
            return
        method, drafter = self._head
        followed = [request for request in running if request.needs_draft_cache]
        if not followed or self._planner.follows_texts(method, len(running)):
            self._num_idle = 0
            return
        self._num_idle += 1
        if self._num_idle >= _PATIENCE:
            for request in followed:
                request.needs_draft_cache = False
                drafter.speculator.release(request.request_id)
