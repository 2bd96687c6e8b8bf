"""Inbox: where one request's outputs wait for its reader; Inboxes: how the engine's thread delivers them."""

import asyncio
import logging
from collections import deque
from collections.abc import Mapping, Sequence

from engine.client import MAX_BATCH
from engine.errors import EngineError
from engine.outputs import RequestOutput

logger = logging.getLogger(__name__)
Delivery = RequestOutput | EngineError


class Inbox:
    """Where one request's outputs wait for its reader, on whose event loop it is made.

    It does for a single reader what asyncio.Queue does, at a third of the cost.

    Attributes:
        loop: The event loop.
    """

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self._waiting: deque[Delivery] = deque()
        self._reader: asyncio.Future[None] | None = None

    def put(self, delivery: Delivery) -> None:
        """Puts something in, on the event loop."""
        self._waiting.append(delivery)
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)

    def refuse(self, error: EngineError) -> None:
        """Puts an error in, from another thread."""
        hand_over(self.loop, [(self, error)])

    async def take(self) -> list[RequestOutput]:
        """Takes out what there is, MAX_BATCH outputs at most, or waits for it.

        Raises:
            EngineError: What was put in, once the outputs before it are out.
        """
        while not self._waiting:
            self._reader = self.loop.create_future()
            await self._reader
        outputs: list[RequestOutput] = []
        while self._waiting and len(outputs) < MAX_BATCH:
            delivery = self._waiting[0]
            if isinstance(delivery, EngineError):
                if not outputs:
                    raise delivery
                break
            outputs.append(delivery)
            self._waiting.popleft()
        return outputs


class Inboxes:
    """The inboxes of the requests that an engine has, for its thread alone."""

    def __init__(self) -> None:
        self._by_request: dict[str, Inbox] = {}
        self._held: Mapping[str, Delivery] = {}

    def __len__(self) -> int:
        return len(self._by_request)

    def get(self, request_id: str) -> Inbox | None:
        """The inbox of a request that has not ended."""
        return self._by_request.get(request_id)

    def open(self, request_id: str, inbox: Inbox) -> None:
        """Keeps the inbox until the request ends."""
        self._by_request[request_id] = inbox

    def hold(self, deliveries: Mapping[str, Delivery]) -> None:
        """Keeps what is new until `deliver_held`, or until something newer is delivered.

        Clients that get something take the interpreter's lock, which nobody needs while a device computes.
        """
        self.deliver_held()
        self._held = deliveries

    def deliver_held(self) -> None:
        """Hands over what is kept."""
        held, self._held = self._held, {}
        self._deliver(held)

    def deliver(self, deliveries: Mapping[str, Delivery]) -> None:
        """Hands each request what is new, in one call per event loop."""
        self.deliver_held()
        self._deliver(deliveries)

    def _deliver(self, deliveries: Mapping[str, Delivery]) -> None:
        by_loop: dict[asyncio.AbstractEventLoop, list[tuple[Inbox, Delivery]]] = {}
        for request_id, delivery in deliveries.items():
            inbox = self._by_request.get(request_id)
            if inbox is None:
                continue
            if isinstance(delivery, EngineError) or delivery.finish_reason is not None:
                del self._by_request[request_id]
            by_loop.setdefault(inbox.loop, []).append((inbox, delivery))
        for loop, addressed in by_loop.items():
            hand_over(loop, addressed)


def hand_over(loop: asyncio.AbstractEventLoop, addressed: Sequence[tuple[Inbox, Delivery]]) -> None:
    """Has an event loop put deliveries into inboxes, from another thread."""
    try:
        loop.call_soon_threadsafe(_put_all, addressed)
    except RuntimeError:
        logger.debug("outputs dropped: the event loop of their readers is closed")


def _put_all(addressed: Sequence[tuple[Inbox, Delivery]]) -> None:
    for inbox, delivery in addressed:
        inbox.put(delivery)
