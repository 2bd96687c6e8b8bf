"""Rests: who was asked and got nothing is left alone for a while, since deciding takes time as well."""

from dataclasses import dataclass

from engine.planning import PlanOutcome

# Steps for which a method that got nothing is not asked again, unless the load falls.
_STEPS = 4


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
