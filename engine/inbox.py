"""Inbox: where one request's outputs wait for its reader, and how they get there from the engine's thread."""

import asyncio
import logging
from collections.abc import Callable, Sequence
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
        """Puts an error in, from the engine's thread."""
        hand_over(self.loop, [partial(self.queue.put_nowait, error)])


def hand_over(loop: asyncio.AbstractEventLoop, calls: Sequence[Callable[[], None]]) -> None:
    """Has an event loop make calls, from another thread."""
    try:
        loop.call_soon_threadsafe(lambda: [call() for call in calls])
    except RuntimeError:
        logger.debug("outputs dropped: the event loop of their readers is closed")
