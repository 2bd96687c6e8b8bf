"""How far to trust text that occurred before: what a request's own lookups came to, and when a node pays.

Every prediction is held against the tokens that came, whether or not it was drafted. So a request whose
lookups fail stops drafting, and drafts again once they would have been right; no probes are needed.
"""

from dataclasses import dataclass
from typing import Protocol

# A node is worth its row while it adds more to the tokens per step than its row adds to the step's time.
# Where nobody measures what that is, a row is taken for this share of a one-row step: 0.05 to 0.09 for the
# second row of a step on a CPU, 0.14 to 0.16 on average over sixteen.
ROW_COST = 0.12

# Conditional acceptance by the length of the match: 1, 2-3, 4-7, 8-15, 16-31, 32 and more tokens. Measured
# on greedy code, edits and chat of Qwen2.5-Coder-1.5B and SmolLM2-135M; what a request starts from.
PRIORS = (0.24, 0.5, 0.75, 0.85, 0.93, 0.97)

PRIOR_WEIGHT = 8.0  # Observations that a prior counts for.
MEMORY = 32.0  # Observations after which the older ones count half.


@dataclass(slots=True)
class Rate:
    """How often something came true: recent observations, shrunk to a prior.

    Attributes:
        prior: What is expected before anything was seen.
    """

    prior: float
    _num_true: float = 0.0
    _num_seen: float = 0.0

    @property
    def value(self) -> float:
        """The estimate, between 0 and 1."""
        return (self._num_true + self.prior * PRIOR_WEIGHT) / (self._num_seen + PRIOR_WEIGHT)

    def note(self, came_true: bool) -> None:
        """Enters an observation."""
        if self._num_seen >= MEMORY:
            self._num_true /= 2
            self._num_seen /= 2
        self._num_true += came_true
        self._num_seen += 1


def level_of(length: int) -> int:
    """The place in PRIORS of a match of `length` tokens, at least 1."""
    return min(length.bit_length(), len(PRIORS)) - 1


def new_rates() -> list[Rate]:
    """A rate per level, nothing seen yet."""
    return [Rate(prior) for prior in PRIORS]


class RowPrice(Protocol):
    """What a lookup is told of the cost of a row."""

    def pays(self, probability: float, expected_tokens: float, num_nodes: int) -> bool:
        """Whether one more draft node raises the tokens per time of a step.

        Args:
            probability: That the node is accepted.
            expected_tokens: Tokens the request gets without it: 1 and the probabilities of its nodes.
            num_nodes: Nodes the request has without it.
        """


@dataclass(frozen=True, slots=True)
class EqualShares:
    """The price before anything is measured: ROW_COST, the other requests of the step being like this one.

    The more of them share the step, the less of it is the reading of weights, and the surer a node has to be.

    Attributes:
        num_requests: How many the step serves.
    """

    num_requests: int = 1

    def pays(self, probability: float, expected_tokens: float, num_nodes: int) -> bool:
        """See RowPrice."""
        num_rows = self.num_requests * (1 + num_nodes)
        return probability * (1 + ROW_COST * (num_rows - 1)) > ROW_COST * self.num_requests * expected_tokens


ALONE = EqualShares(1)
"""The price for a request that has its step to itself."""


@dataclass(frozen=True, slots=True)
class MeasuredFloor:
    """The price as the planner measured it. Who pays it may still be cut when the whole batch is known.

    As in EqualShares the other requests of the step are taken to be like this one: a row is a smaller part of
    a step that others' drafts have made longer.

    Attributes:
        least: The chance that a first node must have to be worth the cheapest row.
    """

    least: float

    def pays(self, probability: float, expected_tokens: float, num_nodes: int) -> bool:
        """See RowPrice."""
        return probability * (1.0 + self.least * num_nodes) > self.least * expected_tokens
