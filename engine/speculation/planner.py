"""The planner: which requests draft how many nodes for the coming step, and by which method.

It goes by what steps took and by which drafts stood, all of it over before a token of the next draft is
drawn. So what it decides never depends on the tokens that it decides about, and every rule stays lossless.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from engine.planning import PlanOutcome
from engine.speculation.evidence import EqualShares, RowPrice
from engine.speculation.step_cost import StepShape


@dataclass(frozen=True, slots=True)
class Load:
    """The coming step before any drafts.

    Attributes:
        decoding: The requests that get a token.
        shape: All of it, the prompts that are read beside them included.
        num_draft_rows: Draft nodes that the step has room for.
        num_running: All requests that run.
        num_read: Prompt tokens that are read for certain; of what has yet to be admitted a part may be in
            the prefix cache.
    """

    decoding: StepShape
    shape: StepShape
    num_draft_rows: int
    num_running: int
    num_read: int = 0


@dataclass(frozen=True, slots=True)
class Offer:
    """A tree that is there already, with the drafter's own estimates.

    Attributes:
        place: Which of the requests it is for.
        method: Number of the method.
        probabilities: Per node the chance that it stands, falling.
    """

    place: int
    method: int
    probabilities: Sequence[float]


@dataclass(frozen=True, slots=True)
class Wish:
    """What a request could use of a method that has to be told how much to draft.

    Attributes:
        place: Which of the requests it is.
        request_id: Its name.
        num_nodes, max_depth: Room that it has.
        num_behind: Tokens that the method's cache has to catch up with.
        ends_early: Whether the draft ends where the method is not sure enough of it.
    """

    place: int
    request_id: str
    num_nodes: int
    max_depth: int
    num_behind: int = 1
    ends_early: bool = False


@dataclass(frozen=True, slots=True)
class Grant:
    """Nodes that a request may draft, and levels.

    Attributes:
        place: Which of the requests it is.
        num_nodes, max_depth: So many at most.
        least: Behind a chain that stands with less of a chance another level does not pay.
    """

    place: int
    num_nodes: int
    max_depth: int
    least: float = 0.0


@dataclass(frozen=True, slots=True)
class Allotment:
    """The planner's decision.

    Attributes:
        kept: Per offer, how many of its nodes to check.
        grants: Per method, who drafts.
        outcome: Why so little, if nothing was granted.
        num_probes: Trials among the grants.
        gains: Per offer the seconds that its nodes are expected to save all requests together; empty where
            nobody reckons.
    """

    kept: tuple[int, ...]
    grants: tuple[tuple[Grant, ...], ...]
    outcome: PlanOutcome
    num_probes: int = 0
    gains: tuple[float, ...] = ()


class Planner(Protocol):
    """Decides what is drafted."""

    @property
    def name(self) -> str:
        """As in the settings."""

    def price(self, load: Load) -> RowPrice | None:
        """What a row costs, for methods that estimate their own nodes; None where they need not be asked."""

    def listens(self, request_id: str) -> bool:
        """Whether methods that estimate are to be asked for a request in this step."""

    def asks(self, method: int, load: Load) -> bool:
        """Whether a method that does not estimate is to say in this step who could draft with it."""

    def allot(self, load: Load, offers: Sequence[Offer], wishes: Sequence[Sequence[Wish]]) -> Allotment:
        """Divides the nodes of a step.

        Args:
            load: The step.
            offers: Trees of the methods that estimate, at most one per request.
            wishes: Per method who could draft with it; nobody where it estimates, or was not asked.
        """

    def follows_prompts(self, method: int) -> bool:
        """Whether a method's cache is to follow prompts while they are read."""

    def follows_texts(self, method: int, num_requests: int) -> bool:
        """Whether a method that has to see whole texts shall follow them, with so many requests at once."""

    def note_verdict(self, method: int, request_id: str, stood: bool) -> None:
        """Learns whether a draft's first token stood."""


class FixedPlanner:
    """Gives every request what it asked for, or the configured number; the first method that has a draft."""

    name = "fixed"

    def price(self, load: Load) -> RowPrice | None:
        """See Planner."""
        return EqualShares(load.num_running)

    def listens(self, request_id: str) -> bool:
        """See Planner."""
        return True

    def asks(self, method: int, load: Load) -> bool:
        """See Planner."""
        return True

    def allot(self, load: Load, offers: Sequence[Offer], wishes: Sequence[Sequence[Wish]]) -> Allotment:
        """See Planner."""
        served = {offer.place for offer in offers}
        grants: list[tuple[Grant, ...]] = []
        for method in wishes:
            own = [
                Grant(wish.place, wish.num_nodes, wish.max_depth)
                for wish in method
                if wish.place not in served
            ]
            served.update(grant.place for grant in own)
            grants.append(tuple(own))
        kept = tuple(len(offer.probabilities) for offer in offers)
        outcome = PlanOutcome.SPECULATED if served else PlanOutcome.NO_DRAFT
        return Allotment(kept, tuple(grants), outcome)

    def follows_prompts(self, method: int) -> bool:
        """See Planner."""
        return True

    def follows_texts(self, method: int, num_requests: int) -> bool:
        """See Planner."""
        return True

    def note_verdict(self, method: int, request_id: str, stood: bool) -> None:
        """See Planner. There is nothing to learn."""
