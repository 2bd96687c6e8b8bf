"""Rests: who was asked and got nothing is left alone for a while; deciding takes time as well."""

from collections import deque
from dataclasses import dataclass
from statistics import median

from engine.planning import PlanOutcome

# Steps for which a method that got nothing is not asked again, unless the load falls.
# Of lookups that rest, one in so many steps is made.
_STEPS = 4
# Looks that a request's mean gain remembers, and the costs of recent ones whose median counts.
_MEMORY = 8.0
_RECENT = 9
# Of looks for a text that is new so many times their cost is expected.
_TRUST = 8.0


@dataclass(frozen=True, slots=True)
class _Rest:
    """One method's.

    Attributes:
        until: The step in which it is asked again,
        requests: or when there are fewer of them.
        outcome: Why it got nothing.
    """

    until: int
    requests: int
    outcome: PlanOutcome

    def lasts(self, step: int, num_requests: int) -> bool:
        """Whether it is not over yet."""
        return step < self.until and num_requests >= self.requests


class Rests:
    """Which methods rest.

    Args:
        num_methods: All there are.
    """

    def __init__(self, num_methods: int) -> None:
        self._rests: list[_Rest | None] = [None] * num_methods

    def outcome(self, step: int, num_requests: int) -> PlanOutcome | None:
        """Why one of them rests in a step of so many requests; None if none does."""
        lasting = (rest for rest in self._rests if rest is not None and rest.lasts(step, num_requests))
        return next((rest.outcome for rest in lasting), None)

    def is_over(self, method: int, step: int, num_requests: int) -> bool:
        """Whether a method is to be asked in a step of so many requests."""
        rest = self._rests[method]
        return rest is None or not rest.lasts(step, num_requests)

    def begin(self, method: int, step: int, num_requests: int, outcome: PlanOutcome) -> None:
        """Lets a method rest that got nothing in a step of so many requests."""
        self._rests[method] = _Rest(step + _STEPS, num_requests, outcome)

    def end(self, method: int) -> None:
        """A method drafts."""
        self._rests[method] = None


class LookupRests:
    """For which texts lookups are asked: for those where what they find is worth the asking.

    A look takes time for each request, whatever it finds. For who finds nothing that would be of use at the
    load of the moment it is taken in some steps alone.
    """

    def __init__(self) -> None:
        self._gains: dict[str, float] = {}
        self._costs: deque[float] = deque(maxlen=_RECENT)
        self._cost = 0.0

    def are_over(self, request_id: str, step: int) -> bool:
        """Whether to look for a request. Those that rest are asked for in the same steps."""
        return step % _STEPS == 0 or self._gains.get(request_id, self._cost) >= self._cost

    def note_cost(self, seconds: float, num_requests: int) -> None:
        """Enters what a look for so many requests took."""
        if num_requests:
            self._costs.append(seconds / num_requests)
            self._cost = median(self._costs)

    def note_gain(self, request_id: str, seconds: float) -> None:
        """Enters what a look for a request is expected to have won; nothing where nothing came of it."""
        gain = self._gains.get(request_id, _TRUST * self._cost)
        self._gains[request_id] = gain + (seconds - gain) / _MEMORY

    def forget(self, request_id: str) -> None:
        """Drops a request that ended."""
        self._gains.pop(request_id, None)
