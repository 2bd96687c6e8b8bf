"""CalibrationBook: what promises have been worth, by how much was promised."""

from collections.abc import Collection, Sequence
from itertools import accumulate

_NUM_BINS = 10
# Promised tokens that count as if they had come: of all promises together, and per bin as often as of all.
_WEIGHT = 30.0
_BIN_WEIGHT = 4.0
# Promised tokens after which all count half, so that those of whom none are checked any more are forgotten.
_MEMORY = 1000.0


class CalibrationBook:
    """Accepted tokens over promised ones, of the nodes that were checked.

    Which nodes are checked depends on what they promise, so that the ones which promise too much are among
    them more often than the others (the winner's curse). Most of all where little is promised: there a node
    is checked for a chance of a quarter that is a tenth, while sure ones are checked whatever they are worth.
    """

    def __init__(self) -> None:
        self._promised = [0.0] * _NUM_BINS
        self._stood = [0.0] * _NUM_BINS
        self._factors: list[float] | None = None

    @property
    def overall(self) -> float:
        """Accepted tokens over those that all nodes together had promised."""
        return (sum(self._stood) + _WEIGHT) / (sum(self._promised) + _WEIGHT)

    def corrected(self, chances: Sequence[float]) -> list[float]:
        """What chances that never rise are worth; these do not rise either."""
        if self._factors is None:
            overall = self.overall
            self._factors = [
                (stood + _BIN_WEIGHT * overall) / (promised + _BIN_WEIGHT)
                for stood, promised in zip(self._stood, self._promised, strict=True)
            ]
        factors = self._factors
        return list(accumulate((min(1.0, chance * factors[_bin_of(chance)]) for chance in chances), min))

    def note(self, chances: Sequence[float], accepted: Collection[int]) -> None:
        """Holds the nodes of a tree against its verdict.

        Args:
            chances: What each promised, node 1 first.
            accepted: The nodes that stand.
        """
        self._factors = None
        for node, chance in enumerate(chances, start=1):
            place = _bin_of(chance)
            self._promised[place] += chance
            self._stood[place] += node in accepted
        if sum(self._promised) > _MEMORY:
            self._promised = [tokens / 2 for tokens in self._promised]
            self._stood = [tokens / 2 for tokens in self._stood]


def _bin_of(chance: float) -> int:
    return min(int(chance * _NUM_BINS), _NUM_BINS - 1)
