"""Requests that have become too long for a draft, each of which is told of once."""

import logging
from collections.abc import Iterable, Sequence

from engine.core.request import Request
from engine.speculation.drafter import Drafter

logger = logging.getLogger(__name__)


class Outgrown:
    """Notes who goes on without a method whose context is full.

    Args:
        drafters: All methods.
    """

    def __init__(self, drafters: Sequence[Drafter]) -> None:
        self._bounded = [drafter for drafter in drafters if drafter.room.is_bounded]
        self._known: set[str] = set()

    def __contains__(self, request_id: str) -> bool:
        """Whether that request is among them."""
        return request_id in self._known

    def note(self, running: Iterable[Request]) -> int:
        """Looks for new ones, and counts them."""
        return sum(map(self._note, running)) if self._bounded else 0

    def forget(self, request_id: str) -> None:
        """Drops a request that ended."""
        self._known.discard(request_id)

    def _note(self, request: Request) -> bool:
        if request.request_id in self._known or not request.params.speculation.enabled:
            return False
        outgrown = [drafter.method for drafter in self._bounded if drafter.room.has_outgrown(request)]
        if not outgrown:
            return False
        self._known.add(request.request_id)
        logger.info(
            "request %s has %d tokens, more than the draft's context holds: it goes on without %s",
            request.request_id,
            request.num_tokens,
            " and ".join(outgrown),
        )
        return True
