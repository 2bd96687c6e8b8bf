"""Steepness: what draft rows cost at the moment, over what the curve says that they do."""

# Steps after which an old one counts a third.
_MEMORY = 48.0
# Seconds that rows were to add, in units, from which on as much is believed of steps as of the curve.
_PRIOR = 0.3
# One step's rise over the expected, at most: it may have slept.
_MOST = 4.0


class Steepness:
    """How much more, or less, rows add to a step than was measured when the machine was at rest.

    A plain step waits for memory, more rows for arithmetic, and others on the machine slow the one or the
    other. The work around drafts, such as building their trees, is in it as well. Steps are held against
    plain ones of the same moment; where there were none of the one kind or of the other for a while it goes
    back to 1.
    """

    def __init__(self) -> None:
        self._seen = 0.0
        self._said = 0.0
        self.value = 1.0

    def observe(self, said: float, seen: float, unit: float) -> None:
        """Enters a step.

        Args:
            said: Seconds that its drafts were to add by the curve; 0 for a plain one.
            seen: Seconds that it took over what a plain one takes.
            unit: Seconds of a step of one row.
        """
        keep = 1.0 - 1.0 / _MEMORY
        self._seen *= keep
        self._said *= keep
        if said > 0.0:
            self._said += said / unit
            self._seen += min(max(seen, 0.0), _MOST * said) / unit
        self.value = (self._seen + _PRIOR) / (self._said + _PRIOR)
