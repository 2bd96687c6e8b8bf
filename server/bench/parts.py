"""Where the time of a server's steps goes, read from the metrics that Outrider has and others lack."""

import re
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass

import httpx

_PART = re.compile(r'^outrider_step_seconds_total\{.*?\bpart="(\w+)".*?\} (\S+)$', re.MULTILINE)
_STEPS = re.compile(r"^outrider_target_forwards_total\{.*?\} (\S+)$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class StepTime:
    """What some steps took.

    Attributes:
        steps: How many.
        seconds: By the parts of a step, in their order.
    """

    steps: float
    seconds: Mapping[str, float]

    @property
    def total(self) -> float:
        """Seconds of all parts together."""
        return sum(self.seconds.values())

    def plus(self, other: "StepTime", sign: int = 1) -> "StepTime":
        """The sum of both, or the difference if `sign` is -1."""
        seconds = {part: own + sign * other.seconds.get(part, 0.0) for part, own in self.seconds.items()}
        return StepTime(self.steps + sign * other.steps, seconds)


class StepWatch:
    """Adds up what a server's steps take while it is being measured; its asking is not in the figures.

    Args:
        http: With the API's root as its base URL; the metrics lie beside it.
    """

    def __init__(self, http: httpx.AsyncClient) -> None:
        self._http = http
        self._metrics = str(http.base_url).rstrip("/").removesuffix("/v1") + "/metrics"
        self._time: StepTime | None = None

    @asynccontextmanager
    async def watching(self) -> AsyncIterator[None]:
        """Counts what the block makes the server do."""
        before = await self._read()
        yield
        after = None if before is None else await self._read()
        if before is not None and after is not None:
            spent = after.plus(before, -1)
            self._time = spent if self._time is None else self._time.plus(spent)

    def take(self) -> StepTime | None:
        """What was counted since the last call; None of a server that does not say."""
        taken, self._time = self._time, None
        return taken

    async def _read(self) -> StepTime | None:
        try:
            response = await self._http.get(self._metrics)
        except httpx.HTTPError:
            return None
        seconds = {part: float(value) for part, value in _PART.findall(response.text)}
        steps = _STEPS.search(response.text)
        return StepTime(float(steps[1]), seconds) if steps and seconds else None
