import pytest

from engine.sampling_params import SamplingParams, SpeculationParams
from engine.speculation.draft_room import DraftRoom
from tests.core.builders import make_request, prompt


@pytest.mark.parametrize(
    ("num_tokens", "expected"),
    [(10, 4), (95, 4), (96, 3), (97, 2), (98, 1), (99, 0), (100, 0), (101, 0)],
)
def test_drafts_and_the_token_behind_them_fit_the_context(num_tokens: int, expected: int) -> None:
    room = DraftRoom(4, 100, None)
    request = make_request("a", prompt(num_tokens))
    assert room.node_budget(request) == expected
    assert num_tokens + expected + 1 <= 100 or expected == 0


@pytest.mark.parametrize(
    ("max_tokens", "expected"), [(0, 0), (1, 0), (2, 1), (4, 3), (5, 4), (6, 4), (99, 4)]
)
def test_drafts_and_the_token_behind_them_fit_max_tokens(max_tokens: int, expected: int) -> None:
    room = DraftRoom(4, 1000, None)
    request = make_request("a", prompt(10), max_tokens=max_tokens)
    assert room.node_budget(request) == expected


def test_room_for_the_answer_shrinks_as_it_grows() -> None:
    room = DraftRoom(4, 1000, None)
    request = make_request("a", prompt(10), max_tokens=7)
    budgets = []
    for token in range(1, 8):
        request.token_ids.append(token)
        budgets.append(room.node_budget(request))
    assert budgets == [4, 4, 3, 2, 1, 0, 0]


@pytest.mark.parametrize(
    ("num_tokens", "expected", "outgrown"),
    [(46, 4, False), (47, 3, False), (49, 1, False), (50, 0, True), (51, 0, True), (500, 0, True)],
)
def test_a_speculator_with_a_shorter_context_is_outgrown(
    num_tokens: int, expected: int, outgrown: bool
) -> None:
    room = DraftRoom(4, 1000, 50)
    request = make_request("a", prompt(num_tokens))
    assert room.node_budget(request) == expected
    assert room.has_outgrown(request) is outgrown


def test_a_speculator_without_a_limit_is_never_outgrown() -> None:
    assert not DraftRoom(4, 1000, None).has_outgrown(make_request("a", prompt(999)))


def test_a_speculator_with_a_longer_context_changes_nothing() -> None:
    assert DraftRoom(4, 100, 200).node_budget(make_request("a", prompt(97))) == 2


@pytest.mark.parametrize(("wanted", "expected"), [(None, 4), (1, 1), (3, 3), (9, 9), (63, 19)])
def test_a_request_says_how_many_drafts_it_wants(wanted: int | None, expected: int) -> None:
    params = SamplingParams(speculation=SpeculationParams(num_draft_tokens=wanted))
    request = make_request("a", prompt(10), max_tokens=20, params=params)
    assert DraftRoom(4, 1000, None).node_budget(request) == expected


@pytest.mark.parametrize(
    ("num_tokens", "nodes", "depth"),
    [(10, 16, 63), (83, 16, 16), (95, 16, 4), (97, 16, 2), (98, 16, 1), (99, 0, 0), (101, 0, 0)],
)
def test_a_trees_room_is_in_its_levels_and_not_in_its_nodes(num_tokens: int, nodes: int, depth: int) -> None:
    room = DraftRoom(16, 100, None, branches=True)
    request = make_request("a", prompt(num_tokens))
    assert room.node_budget(request) == nodes
    assert room.max_depth(request) == depth


@pytest.mark.parametrize(("max_tokens", "nodes", "depth"), [(1, 0, 0), (2, 16, 1), (4, 16, 3), (99, 16, 39)])
def test_a_trees_levels_fit_max_tokens_and_the_drafts_context(
    max_tokens: int, nodes: int, depth: int
) -> None:
    room = DraftRoom(16, 1000, 49, branches=True)
    request = make_request("a", prompt(10), max_tokens=max_tokens)
    assert room.node_budget(request) == nodes
    assert room.max_depth(request) == depth
