"""Watchdog: notices that a loop hangs, from a thread of its own."""

import threading
from collections.abc import Callable

LOOKS = 4
"""How often in its time a round is looked at."""


class Watchdog:
    """Looks whether a loop goes round.

    It counts its looks instead of reading a clock: a process that stood still as a whole, because it was
    paused, finds no fault with its loop when it comes to.

    Args:
        seconds: A round that takes longer hangs; noticed up to a quarter of that later.
        on_hang: Called once for each round that hangs, on the watchdog's thread, with what to say of it.
    """

    def __init__(self, seconds: float, on_hang: Callable[[str], None]) -> None:
        self._seconds = seconds
        self._on_hang = on_hang
        self._round = 0
        self._hung_round = -1
        self._is_working = False
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="outrider-watchdog", daemon=True)

    @property
    def complaint(self) -> str:
        """What to say of a loop that hangs; empty as soon as it does not."""
        if not self._is_working or self._hung_round != self._round:
            return ""
        return f"the engine hangs: it has been at one step for more than {self._seconds:g} seconds"

    def start(self) -> None:
        """Starts to look."""
        self._thread.start()

    def close(self) -> None:
        """Looks no more."""
        self._closed.set()

    def beat(self) -> None:
        """The loop begins another round."""
        self._round += 1
        self._is_working = True

    def rest(self) -> None:
        """The loop waits for work, for as long as it may take."""
        self._is_working = False

    def _watch(self) -> None:
        seen, count = self._round, 0
        while not self._closed.wait(self._seconds / LOOKS):
            if not self._is_working or self._round != seen:
                seen, count = self._round, 0
                continue
            count += 1
            if count == LOOKS:
                self._hung_round = seen
                self._on_hang(self.complaint)
