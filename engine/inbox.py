"""Inbox: where one request's outputs wait for its reader; Inboxes: how the engine's thread delivers them."""

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from engine.errors import EngineError
from engine.outputs import RequestOutput

logger = logging.getLogger(__name__)
Delivery = RequestOutput | EngineError


class Inbox:
    """Where one request's outputs wait for its reader."""

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.queue: asyncio.Queue[Delivery] = asyncio.Queue()

    def refuse(self, error: EngineError) -> None:
        """Puts an error in, from another thread."""
        hand_over(self.loop, [partial(self.queue.put_nowait, error)])


class Inboxes:
    """The inboxes of the requests that an engine has, for its thread alone."""

    def __init__(self) -> None:
        self._by_request: dict[str, Inbox] = {}

    def __len__(self) -> int:
        return len(self._by_request)

    def get(self, request_id: str) -> Inbox | None:
        """The inbox of a request that has not ended."""
        return self._by_request.get(request_id)

    def open(self, request_id: str, inbox: Inbox) -> None:
        """Keeps the inbox until the request ends."""
        self._by_request[request_id] = inbox

    def deliver(self, deliveries: Mapping[str, Delivery]) -> None:
        """Hands each request what is new, in one call per event loop."""
        by_loop: dict[asyncio.AbstractEventLoop, list[Callable[[], None]]] = {}
        for request_id, delivery in deliveries.items():
            inbox = self._by_request.get(request_id)
            if inbox is None:
                continue
            if isinstance(delivery, EngineError) or delivery.finish_reason is not None:
                del self._by_request[request_id]
            by_loop.setdefault(inbox.loop, []).append(partial(inbox.queue.put_nowait, delivery))
        for loop, calls in by_loop.items():
            hand_over(loop, calls)


def hand_over(loop: asyncio.AbstractEventLoop, calls: Sequence[Callable[[], None]]) -> None:
    """Has an event loop make calls, from another thread."""
    try:
        loop.call_soon_threadsafe(lambda: [call() for call in calls])
    except RuntimeError:
        logger.debug("outputs dropped: the event loop of their readers is closed")
