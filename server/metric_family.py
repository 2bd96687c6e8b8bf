"""EngineFamily: makes the engine's metrics, all with the same labels."""

from collections.abc import Iterable, Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

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
