"""Rests and pauses: who was asked and got nothing is left alone for a while; deciding takes time as well."""

from dataclasses import dataclass

from engine.planning import PlanOutcome

# Of lookups that were kept nothing of for so many steps in a row, only every so many steps are asked for.
_PAUSES = ((96, 4), (32, 2))
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


class LookupPauses:
    """In which steps lookups are asked for: in all, but for texts that they have found nothing in for long.

    To ask takes a few hundredths of a step, and a match of some length is there a few steps later as well.
    """

    def __init__(self) -> None:
        self._idle: dict[str, int] = {}

    def are_over(self, request_id: str, step: int) -> bool:
        """Whether lookups are to be asked for a request. Those that pause do so in the same steps."""
        idle = self._idle.get(request_id, 0)
        return step % next((every for least, every in _PAUSES if idle >= least), 1) == 0

    def note(self, request_id: str, num_kept: int) -> None:
        """Enters how many nodes of what was found for a request were checked."""
        self._idle[request_id] = 0 if num_kept else self._idle.get(request_id, 0) + 1

    def forget(self, request_id: str) -> None:
        """Drops a request that ended."""
        self._idle.pop(request_id, None)
