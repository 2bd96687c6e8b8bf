"""How far a training is, on stderr."""

from collections.abc import Callable
from typing import Protocol, TextIO

_TERMINAL_INTERVAL, _LOG_INTERVAL = 0.5, 30.0


class Step(Protocol):
    """A step of a training."""

    @property
    def step(self) -> int:
        """Steps so far."""

    @property
    def epoch(self) -> float:
        """Times it has seen the data."""

    @property
    def progress(self) -> float:
        """Share of the training that is done."""

    @property
    def seconds_left(self) -> float | None:
        """An estimate."""

    @property
    def tokens_per_second(self) -> float:
        """In this step."""

    @property
    def loss(self) -> tuple[float, ...]:
        """Per pass."""

    @property
    def accuracy(self) -> tuple[float, ...]:
        """Per pass."""


class Progress:
    """A line that is drawn anew on a terminal, and now and then a new one elsewhere.

    Args:
        stream: Where to.
        clock: A monotonic clock in seconds.
    """

    def __init__(self, stream: TextIO, clock: Callable[[], float]) -> None:
        self._stream = stream
        self._clock = clock
        self._shown = float("-inf")
        self._is_open = False
        self._stage = ""
        self._began = (0.0, 0)

    def on_stage(self, stage: str, done: int, total: int) -> None:
        """Of a stage before the training."""
        if stage != self._stage:
            self._stage, self._began = stage, (self._clock(), done)
            self._shown = float("-inf")
        seconds, count = self._clock() - self._began[0], done - self._began[1]
        parts = [f"{stage}: {done:,} of {total:,}"]
        if count and seconds > 0:
            parts += [f"{count / seconds:,.1f}/s", left(seconds / count * (total - done))]
        self._show("  ".join(parts), is_last=done >= total)

    def on_step(self, step: Step) -> None:
        """Of the training."""
        loss = " ".join(f"{loss:.3f}" for loss in step.loss)
        accuracy = " ".join(f"{share:.3f}" for share in step.accuracy)
        parts = [
            f"training: {step.progress:.1%}, step {step.step}, epoch {step.epoch:.2f}",
            f"loss {loss}  right {accuracy}  {step.tokens_per_second:,.0f} tokens/s",
        ]
        if step.seconds_left is not None:
            parts.append(left(step.seconds_left))
        self._show("  ".join(parts), is_last=False)

    def say(self, line: str) -> None:
        """A line of its own."""
        self.close()
        self._stream.write(f"{line}\n")
        self._stream.flush()

    def close(self) -> None:
        """Leaves the line that is being drawn."""
        if self._is_open:
            self._stream.write("\n")
            self._is_open = False
            self._stream.flush()

    def _show(self, line: str, *, is_last: bool) -> None:
        is_terminal = self._stream.isatty()
        now = self._clock()
        if not is_last and now - self._shown < (_TERMINAL_INTERVAL if is_terminal else _LOG_INTERVAL):
            return
        self._shown = now
        self._stream.write(f"\r{line}\x1b[K" if is_terminal else f"{line}\n")
        self._is_open = is_terminal
        if is_last:
            self.close()
        self._stream.flush()


def left(seconds: float) -> str:
    """What is left of the time, in words."""
    minutes = round(seconds / 60)
    if minutes < 1:
        return f"{seconds:.0f} s left"
    return f"{minutes} min left" if minutes < 100 else f"{minutes // 60} h {minutes % 60} min left"
