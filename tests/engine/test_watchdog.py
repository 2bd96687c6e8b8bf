import threading
import time

from engine.watchdog import LOOKS, Watchdog

SECONDS = 0.4


class Watched:
    """A watchdog, what it says, and when it says something."""

    def __init__(self) -> None:
        self.complaints: list[str] = []
        self.heard = threading.Event()
        self.dog = Watchdog(SECONDS, self._hear)
        self.dog.start()

    def _hear(self, complaint: str) -> None:
        self.complaints.append(complaint)
        self.heard.set()


def test_a_round_that_takes_too_long_is_told_once_and_forgotten_when_it_is_over() -> None:
    watched = Watched()
    began = time.monotonic()
    watched.dog.beat()
    assert watched.heard.wait(10)
    assert time.monotonic() - began >= SECONDS * (LOOKS - 1) / LOOKS
    time.sleep(2 * SECONDS)
    assert watched.complaints == [watched.dog.complaint]
    assert "0.4 seconds" in watched.dog.complaint
    watched.dog.beat()
    assert watched.dog.complaint == ""
    watched.heard.clear()
    assert watched.heard.wait(10), "another round may hang as well"
    watched.dog.rest()
    assert watched.dog.complaint == ""
    watched.dog.close()


def test_neither_many_short_rounds_nor_waiting_is_a_hang() -> None:
    watched = Watched()
    end = time.monotonic() + 3 * SECONDS
    while time.monotonic() < end:
        watched.dog.beat()
        time.sleep(SECONDS / 50)
    watched.dog.rest()
    assert not watched.heard.wait(3 * SECONDS)
    watched.dog.close()


def test_a_closed_one_says_nothing() -> None:
    watched = Watched()
    watched.dog.close()
    watched.dog.beat()
    assert not watched.heard.wait(2 * SECONDS)
