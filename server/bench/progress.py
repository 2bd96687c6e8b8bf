"""How far a run is, on stderr."""

from collections.abc import Callable
from typing import Protocol, TextIO

_WIDTH = 24
_INTERVAL = 0.1


class Ended(Protocol):
    """A request that has ended."""

    @property
    def error(self) -> str | None:
        """Why it failed; None if it did not."""

    @property
    def num_tokens(self) -> int:
        """Tokens of the answer."""


class Progress:
    """A bar that grows with each answer; on what is no terminal a line at the end.

    Args:
        title: What is going on.
        total: Requests to come.
        stream: Where to draw.
        clock: A monotonic clock in seconds.
    """

    def __init__(self, title: str, total: int, stream: TextIO, clock: Callable[[], float]) -> None:
        self._title = title
        self._total = total
        self._stream = stream
        self._clock = clock
        self._began = self._drawn = clock()
        self._done = self._failed = self._tokens = 0

    def add(self, record: Ended) -> None:
        """Counts one request that has ended."""
        self._done += 1
        self._failed += record.error is not None
        self._tokens += record.num_tokens
        now = self._clock()
        if self._stream.isatty() and now - self._drawn >= _INTERVAL:
            self._drawn = now
            self._stream.write(f"\r{self.line}\x1b[K")
            self._stream.flush()

    def close(self) -> None:
        """Leaves the final line."""
        start, end = ("\r", "\x1b[K\n") if self._stream.isatty() else ("", "\n")
        self._stream.write(f"{start}{self.line}{end}")
        self._stream.flush()

    @property
    def line(self) -> str:
        """The state in a line."""
        filled = _WIDTH * self._done // max(1, self._total)
        elapsed = self._clock() - self._began
        parts = [f"{self._title} [{'=' * filled}{' ' * (_WIDTH - filled)}] {self._done}/{self._total}"]
        if elapsed > 0:
            parts.append(f"{self._tokens / elapsed:.1f} tokens/s")
        if 0 < self._done < self._total:
            parts.append(f"{elapsed / self._done * (self._total - self._done):.0f} s left")
        if self._failed:
            parts.append(f"{self._failed} failed")
        return "  ".join(parts)
