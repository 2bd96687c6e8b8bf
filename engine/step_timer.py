"""StepTimer: where an engine's time goes, by the parts of a step."""

from collections.abc import Callable
from contextlib import AbstractContextManager

from engine.outputs import StepPart

Region = Callable[[StepPart], AbstractContextManager[object]]


class StepTimer:
    """A stopwatch with a lap for each part: entering a part ends the one before.

    It costs a fraction of a microsecond per lap and so is always on. While a profiler looks on, the laps
    are its regions as well.

    Args:
        clock: Seconds, monotonic.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._seconds: dict[StepPart, float] = {}
        self._laps: dict[StepPart, float] = {}
        self._part: StepPart | None = None
        self._since = 0.0
        self._region: Region | None = None
        self._open_region: AbstractContextManager[object] | None = None

    def enter(self, part: StepPart) -> float:
        """Ends the part that runs, if one does, and begins another; says when."""
        return self._switch(part)

    def lap(self, part: StepPart) -> float:
        """Seconds of the last time that a part ran to its end."""
        return self._laps.get(part, 0.0)

    def leave(self) -> float:
        """Ends the part that runs, what follows belonging to none; says when."""
        return self._switch(None)

    def take(self) -> dict[StepPart, float]:
        """Seconds in each part since the last call; the part that runs goes on."""
        self._switch(self._part)
        taken, self._seconds = self._seconds, {}
        return taken

    def mark_regions(self, region: Region | None) -> None:
        """From the next part on opens such a region for each; None stops that."""
        self._region = region
        self._mark(self._part)

    def _switch(self, part: StepPart | None) -> float:
        now = self._clock()
        if self._part is not None:
            lap = self._laps[self._part] = now - self._since
            self._seconds[self._part] = self._seconds.get(self._part, 0.0) + lap
        if part is not self._part and (self._region or self._open_region) is not None:
            self._mark(part)
        self._part, self._since = part, now
        return now

    def _mark(self, part: StepPart | None) -> None:
        if self._open_region is not None:
            self._open_region.__exit__(None, None, None)
            self._open_region = None
        if self._region is not None and part is not None:
            self._open_region = self._region(part)
            self._open_region.__enter__()
