"""ConfidenceBook: how often drafted tokens stand, by how sure the draft was of them."""

from collections.abc import Sequence

from engine.token_tree import TokenTree

NUM_BINS = 10
"""The draft's own probabilities are told apart in so many steps from 0 to 1."""

_PRIOR_WEIGHT = 8.0  # Tests that a bin's own middle counts for.
_MEMORY = 400.0  # Tests of a bin after which all of its count half.


class ConfidenceBook:
    """Chances by confidence, of chains that were checked.

    A draft's probability for its own token tells hard places from easy ones, but it is no chance: a head is
    surer than it should be. What stood says what its probabilities are worth.
    """

    def __init__(self) -> None:
        self._tried = [0.0] * NUM_BINS
        self._stood = [0.0] * NUM_BINS
        self._chances: tuple[float, ...] | None = None

    @property
    def chances(self) -> tuple[float, ...]:
        """Per bin the chance that such a token stands, if all before it do."""
        if self._chances is None:
            self._chances = tuple(
                (stood + _PRIOR_WEIGHT * (place + 0.5) / NUM_BINS) / (tried + _PRIOR_WEIGHT)
                for place, (stood, tried) in enumerate(zip(self._stood, self._tried, strict=True))
            )
        return self._chances

    def chance(self, confidences: Sequence[float]) -> float:
        """The chance that all tokens of a chain stand."""
        chances = self.chances
        product = 1.0
        for confidence in confidences:
            product *= chances[bin_of(confidence)]
        return product

    def note(self, tree: TokenTree, committed: Sequence[int]) -> None:
        """Learns which tokens have come since a chain was proposed; trees without confidences say nothing."""
        for token, confidence, came in zip(tree.tokens, tree.confidences, committed, strict=False):
            place = bin_of(confidence)
            self._chances = None
            self._tried[place] += 1.0
            self._stood[place] += token == came
            if self._tried[place] > _MEMORY:
                self._tried[place] /= 2
                self._stood[place] /= 2
            if token != came:
                break


def bin_of(confidence: float) -> int:
    """The bin of a probability."""
    return min(int(confidence * NUM_BINS), NUM_BINS - 1)
