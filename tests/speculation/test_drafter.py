"""A method's calls: checked, timed, and harmless when they fail."""

from collections.abc import Callable, Sequence

import pytest

from engine.speculation.base import DraftRequest, ProposalContext, Requirements
from engine.speculation.draft_room import DraftRoom
from engine.speculation.drafter import Called, Drafter
from engine.token_tree import EMPTY_TREE, Proposal, TokenTree
from tests.speculation.drafting import Blocks, Text

CHAIN = TokenTree.chain((1, 2, 3))


class Saying:
    """Proposes what it was given; its cache gains two tokens a call."""

    def __init__(self, tree: TokenTree, *, estimates: bool = False) -> None:
        self._tree = tree
        self._num_calls = 0
        self.requirements = Requirements(has_cache=not estimates, estimates=estimates)

    def propose(self, context: ProposalContext) -> list[TokenTree]:
        self._num_calls += 1
        return [self._tree for _ in context.requests]

    def num_computed_tokens(self, request_id: str) -> int:
        return 2 * self._num_calls

    def release(self, request_id: str) -> None:
        """Nothing is kept."""


def ticking() -> Callable[[], float]:
    now = [0.0]

    def clock() -> float:
        now[0] += 0.5
        return now[0]

    return clock


def asked(count: int = 2, budget: int = 3) -> list[DraftRequest]:
    blocks = Blocks()
    return [Text(f"r{place}", [1, 2, 3], blocks).ask(budget) for place in range(count)]


def call(tree: TokenTree, requests: Sequence[DraftRequest], *, estimates: bool = False) -> Called:
    drafter = Drafter("method", Saying(tree, estimates=estimates), DraftRoom(4, 100, None), 10)
    return drafter.call(requests, ticking())


def test_a_call_is_measured() -> None:
    called = call(CHAIN, asked())
    assert called.trees == [CHAIN, CHAIN]
    # Six nodes, and two tokens that each request's cache gained.
    assert (called.num_levels, called.num_rows, called.seconds) == (3, 10, 0.5)


DRAWN = TokenTree((1,), (0,), Proposal.SAMPLED, (object(),), (0.5,))


@pytest.mark.parametrize(
    ("tree", "estimates", "message"),
    [
        (TokenTree.chain((1, 2, 3, 4)), False, "4 draft nodes proposed, but the budget was 3"),
        (TokenTree.chain((1, 10)), False, "draft token 10 is outside 0 to 9"),
        (CHAIN, True, "may be cut by its estimates"),
        (DRAWN, True, "is not drawn"),
    ],
)
def test_a_broken_promise_costs_the_drafts_of_the_step(
    tree: TokenTree, estimates: bool, message: str, caplog: pytest.LogCaptureFixture
) -> None:
    called = call(tree, asked(), estimates=estimates)
    assert called.trees == [EMPTY_TREE, EMPTY_TREE]
    assert called.seconds is None
    assert message in caplog.text
