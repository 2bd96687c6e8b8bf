"""EngineFamily: makes the engine's metrics, all with the same labels; Backlog: steps yet to be counted."""

import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Metric
from prometheus_client.registry import Collector

from engine.outputs import StepStats

STEPS_AT_ONCE = 16

# From one kernel launch on a GPU to a long chunk of prompt on a laptop.
STEP_BUCKETS = (
    *(0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025),
    *(0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0),
)


class EngineFamily:
    """Makes the engine's metrics, each with its labels already filled in."""

    def __init__(self, registry: CollectorRegistry, model_name: str, method: str) -> None:
        self._registry = registry
        self._labels = {"model_name": model_name, "method": method}

    def gauge(self, name: str, text: str) -> Gauge:
        """One that goes up and down."""
        family = Gauge(f"outrider_{name}", text, tuple(self._labels), registry=self._registry)
        return family.labels(**self._labels)

    def counter(self, name: str, text: str) -> Counter:
        """One that goes up."""
        family = Counter(f"outrider_{name}", text, tuple(self._labels), registry=self._registry)
        return family.labels(**self._labels)

    def counters(self, name: str, text: str, label: str, values: Iterable[str]) -> dict[str, Counter]:
        """One per value of a further label; all of them exist from the start."""
        family = Counter(f"outrider_{name}", text, (*self._labels, label), registry=self._registry)
        return {value: family.labels(**self._labels, **{label: value}) for value in values}

    def histogram(self, name: str, text: str, buckets: Sequence[float]) -> Histogram:
        """One that sorts values into buckets."""
        family = Histogram(
            f"outrider_{name}", text, tuple(self._labels), registry=self._registry, buckets=buckets
        )
        return family.labels(**self._labels)


class Backlog(Collector):
    """Steps that are not counted yet, a few at most, and none for whoever reads the registry.

    By the end of a step its weights have driven all code and data for counting out of the caches, so that to
    count a step takes four times as long as to count another one right behind it.

    Args:
        registry: Where the metrics are; nothing may be registered there before.
        count: Counts a step.
    """

    def __init__(self, registry: CollectorRegistry, count: Callable[[StepStats], None]) -> None:
        self._count = count
        self._steps: deque[StepStats] = deque()
        self._counting = threading.Lock()
        registry.register(self)

    def add(self, stats: StepStats) -> None:
        """Takes a step; from any thread."""
        self._steps.append(stats)
        if len(self._steps) >= STEPS_AT_ONCE:
            self._settle()

    def describe(self) -> Iterable[Metric]:
        """None: it has no metrics of its own."""
        return ()

    def collect(self) -> Iterable[Metric]:
        """Counts what is left, before the registry goes on to the metrics themselves."""
        self._settle()
        return ()

    def _settle(self) -> None:
        with self._counting:
            while self._steps:
                self._count(self._steps.popleft())
