"""Acceptance by depth, rank and request: only what was tested counts."""

import pytest

from engine.speculation.acceptance_book import AcceptanceBook
from engine.speculation.tree_shape import PRIOR_RATES, TreeShape
from engine.token_tree import TokenTree

CHAIN = TokenTree.chain((1, 2, 3))
FORK = TokenTree((1, 2, 3, 4), (0, 0, 1, 1))
ROOM = (8, 8)


def values(book: AcceptanceBook, request_id: str, step: int = 0, least: float = 0.0) -> list[float]:
    return book.values(request_id, None, ROOM, least, step)[0]


def test_before_anything_is_known_the_prior_holds() -> None:
    found = values(AcceptanceBook(), "r")
    assert found == pytest.approx([PRIOR_RATES[0] ** depth for depth in range(1, 9)])


def test_nodes_behind_a_rejected_one_have_not_failed() -> None:
    """The first token stands half of the time, what follows a standing one always."""
    book = AcceptanceBook()
    for step in range(400):
        book.note("r", CHAIN, (1, 2, 3) if step % 2 else (), step)
    rates = [level[0] for level in book.rates()]
    assert rates[0] == pytest.approx(0.5, abs=0.05)
    assert rates[1] > 0.9
    assert rates[2] > 0.9


def test_a_leaf_tests_nothing() -> None:
    book = AcceptanceBook()
    book.note("r", CHAIN, (1, 2, 3), 0)
    assert book.num_verdicts == 3
    book.note("r", TokenTree.chain((1,)), (1,), 0)
    assert book.num_verdicts == 4


def test_a_level_that_a_draft_was_not_sure_enough_for_brought_nothing() -> None:
    book = AcceptanceBook()
    for _ in range(400):
        book.note("r", TokenTree.chain((1,)), (1,), 0, 4)
    assert book.rates()[0][0] > 0.9
    assert book.rates()[1][0] < 0.1
    assert book.num_verdicts == 800


def test_ranks_are_told_apart() -> None:
    book = AcceptanceBook()
    for step in range(400):
        book.note("r", FORK, (2,) if step % 4 == 0 else (1, 4) if step % 4 == 1 else (1,), step)
    first, second = book.rates()[:2]
    assert first[0] == pytest.approx(0.75, abs=0.05)
    assert first[1] == pytest.approx(0.25, abs=0.05)
    assert second[1] == pytest.approx(1 / 3, abs=0.08)


def test_a_request_is_told_from_the_others_and_others_help_where_it_is_new() -> None:
    book = AcceptanceBook()
    for step in range(200):
        book.note("good", CHAIN, (1, 2, 3), step)
        book.note("bad", CHAIN, (), step)
    assert values(book, "good", 200)[0] > 0.9
    assert values(book, "bad", 200)[0] < 0.25
    assert values(book, "bad", 200)[0] < values(book, "new", 200)[0] < values(book, "good", 200)[0]


def test_what_was_not_tested_for_long_counts_less() -> None:
    book = AcceptanceBook()
    for step in range(100):
        book.note("good", CHAIN, (1, 2, 3), step)
        book.note("bad", CHAIN, (), step)
    waiting = [values(book, "bad", step)[0] for step in (100, 300, 1000, 5000)]
    assert waiting == sorted(waiting)
    # In the end whoever was bad long ago is tried before somebody new.
    assert waiting[0] < values(book, "new", 5000)[0] < waiting[-1]


def test_values_end_where_they_are_too_small_and_where_room_ends() -> None:
    book = AcceptanceBook()
    assert len(values(book, "r", least=0.3)) == 2
    assert book.values("r", None, (3, 8), 0.0, 0) == book.values("r", None, (8, 3), 0.0, 0)
    assert book.values("r", None, (3, 8), 0.0, 0)[1] == [1, 2, 3]


def test_a_trees_nodes_fall_and_keep_to_their_depths() -> None:
    shape = TreeShape((0, 0, 1, 1, 2, 3))
    found, depths = AcceptanceBook().values("r", shape, (6, 2), 0.0, 0)
    assert depths == [1, 1, 2, 2, 2]
    assert found == sorted(found, reverse=True)
    assert found[0] == pytest.approx(PRIOR_RATES[0])
    assert found[1] == pytest.approx(PRIOR_RATES[1])


def test_a_request_that_ended_is_forgotten() -> None:
    book = AcceptanceBook()
    book.note("r", CHAIN, (1,), 7)
    assert book.last_tested("r") == 7
    assert [name for name, _, _ in book.own_rates()] == ["r"]
    book.forget("r")
    assert book.last_tested("r") == -1
    assert book.own_rates() == []
