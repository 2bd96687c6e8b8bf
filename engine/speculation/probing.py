"""ProbeSchedule: trial drafts for those who get none, so that an estimate can come back from zero."""

from collections.abc import Callable, Collection
from dataclasses import dataclass

# Nodes of a trial: the first is what it is about, the second tells luck from a text that has turned.
PROBE_NODES = 2

# What trials may cost, as a share of the time: usually, and while a method is hardly known.
_SHARE, _FIRST_SHARE = 0.01, 0.05
_HARDLY = 64
_LEAST_INTERVAL = 4
_MOST_BACKOFF = 8
# Successes in a row that are followed up at once.
_LONGEST_RUN = 8


@dataclass(slots=True)
class ProbeSchedule:
    """When to try one method again.

    The longer trials have been of no use, the further apart they are, up to a bound. One that succeeds is
    followed up in the next step, which is saved up for afterwards, so that the share of time holds.
    """

    _due: int = 0
    _backoff: int = 1
    _run: int = 0
    _asked: str | None = None
    _hot: str | None = None

    def may_pick(self, step: int) -> bool:
        """Whether `pick` could come to anything."""
        return self._hot is not None or step >= self._due

    def pick(
        self, step: int, wanting: Collection[str], last_tested: Callable[[str], int], interval: int
    ) -> str | None:
        """Who drafts for a trial in this step, if anybody.

        Args:
            step: Number of the step.
            wanting: Ids of the requests that get no nodes otherwise.
            last_tested: Tells when each was tested last.
            interval: Steps that pay for a trial.
        """
        if self._hot is not None and self._hot in wanting and self._run < _LONGEST_RUN:
            self._asked = self._hot
            self._run += 1
            self._due += interval
        elif wanting and step >= self._due:
            self._asked = min(wanting, key=last_tested)
            self._run = 1
            self._due = step + interval * self._backoff
            self._backoff = min(2 * self._backoff, _MOST_BACKOFF)
        else:
            return None
        self._hot = None
        return self._asked

    def note(self, request_id: str, stood: bool) -> None:
        """Enters a verdict on somebody's draft; only that of the trial matters."""
        if request_id == self._asked:
            self._asked = None
            self._hot = request_id if stood else None

    def recover(self) -> None:
        """The method drafts again without trials; the next trial may come soon."""
        self._backoff = 1


def interval(cost: float, num_verdicts: int) -> int:
    """Steps that pay for a trial.

    Args:
        cost: Of a trial, over that of a step.
        num_verdicts: How often the method was tested.
    """
    share = _FIRST_SHARE if num_verdicts < _HARDLY else _SHARE
    return max(_LEAST_INTERVAL, int(cost / share))
