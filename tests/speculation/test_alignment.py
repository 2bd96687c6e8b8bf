"""Alignment: edits of a predicted text are followed, learned and made again."""

import random
from collections.abc import Iterator

import pytest

from engine.speculation.alignment import Alignment
from engine.speculation.evidence import EqualShares

LINES = [f"    total = total + item.size({n}) if item else total - {n}\n" for n in range(40)]
TEXT = "def count(items):\n" + "".join(LINES) + "    return total\n"


def draft_of(
    alignment: Alignment, budget: int, *, num_requests: int = 1, ends: tuple[int, ...] = ()
) -> list[int]:
    tree = alignment.draft(budget, EqualShares(num_requests), ends)
    assert tree.parents == tuple(range(len(tree)))
    assert list(tree.probabilities) == sorted(tree.probabilities, reverse=True)
    return list(tree.tokens)


def drafted(prediction: str, answer: str, budget: int = 63) -> list[tuple[int, int]]:
    """Drafted and accepted tokens of each step of an answer that is known, one token per character."""
    return list(steps(Alignment(map(ord, prediction)), [ord(c) for c in answer], budget))


def steps(alignment: Alignment, answer: list[int], budget: int) -> Iterator[tuple[int, int]]:
    place = 1
    alignment.read(answer[:1])
    while place < len(answer):
        draft = draft_of(alignment, budget)
        accepted = 0
        while accepted < len(draft) and draft[accepted : accepted + 1] == answer[place + accepted :][:1]:
            accepted += 1
        yield len(draft), accepted
        alignment.read(answer[place : place + accepted + 1])
        place += accepted + 1


def tokens_per_step(prediction: str, answer: str) -> float:
    return len(answer) / len(drafted(prediction, answer))


def test_a_text_that_comes_as_predicted_takes_whole_trees() -> None:
    taken = drafted(TEXT, TEXT)
    assert all(drafts == accepted for drafts, accepted in taken)
    assert max(drafts for drafts, _ in taken) == 63
    assert len(TEXT) / len(taken) > 50


@pytest.mark.parametrize("name", ["amount", "sum", "t", "total_of_everything", "tally", "subtotal"])
def test_a_rename_is_learned(name: str) -> None:
    answer = TEXT.replace("total", name)
    assert tokens_per_step(TEXT, answer) > 25
    first_half = drafted(TEXT, answer[: len(answer) // 2])
    assert len(drafted(TEXT, answer)) < 2 * len(first_half), "what was learned pays later"


def test_an_insertion_and_a_deletion_in_every_line_are_learned() -> None:
    inserted = TEXT.replace("item.size(", "item.size(unit, ")
    assert tokens_per_step(TEXT, inserted) > 25
    assert tokens_per_step(inserted, TEXT) > 25


def varied_lines(count: int) -> list[str]:
    rng = random.Random(5)
    words = ["".join(rng.choices("abcdefghijklmnopqrstuvwxyz", k=rng.randint(3, 8))) for _ in range(60)]
    return [f"    {rng.choice(words)} = {rng.choice(words)}({rng.choice(words)})\n" for _ in range(count)]


def test_lines_that_come_go_or_move_cost_a_few_steps_each() -> None:
    lines = varied_lines(60)
    text, new = "".join(lines), "    print('unforeseen')\n"
    unchanged = len(drafted(text, text))
    for edits, answer in (
        (len(new), [*lines[:9], new, *lines[9:]]),
        (0, [*lines[:9], *lines[15:]]),
        (0, [*lines[:9], *lines[20:30], *lines[9:20], *lines[30:]]),
    ):
        assert len(drafted(text, "".join(answer))) - unchanged < edits + 45


def test_an_edit_that_is_not_made_everywhere_is_not_insisted_on() -> None:
    """Renamed in every other line: what fails is forgotten, and made only where its context is the same."""
    lines = TEXT.splitlines(keepends=True)
    answer = "".join(line.replace("total", "sum") if n % 2 else line for n, line in enumerate(lines))
    assert tokens_per_step(TEXT, answer) > 5


def test_an_answer_unlike_the_prediction_is_hardly_drafted() -> None:
    rng = random.Random(1)
    answer = "".join(rng.choice("qwxyzQWXYZ") for _ in range(600))
    taken = drafted(TEXT, answer)
    assert sum(drafts for drafts, _ in taken) < 60


def test_nothing_is_drafted_behind_the_end_or_an_ending_token() -> None:
    alignment = Alignment(b"abcdef")
    alignment.read(b"abcd")
    assert draft_of(alignment, 9) == [*b"ef"]
    assert draft_of(alignment, 9, ends=(ord("e"),)) == [ord("e")]
    alignment.read(b"ef")
    assert draft_of(alignment, 9) == []
    alignment.read(b"xyz" * 30)
    assert draft_of(alignment, 9) == []
    assert alignment.num_found == 6


def test_what_is_known_depends_on_the_texts_alone() -> None:
    rng = random.Random(0)
    for _ in range(60):
        prediction = [rng.randrange(5) for _ in range(rng.randrange(1, 60))]
        answer = [
            rng.randrange(5) if rng.random() < 0.2 else token
            for token in prediction
            for _ in range(rng.choice([0, 1, 1, 1, 2]))
        ]
        whole, pieces = Alignment(prediction), Alignment(prediction)
        whole.read(answer)
        rest = list(answer)
        while rest:
            cut = rng.randint(1, len(rest))
            draft_of(pieces, 7)
            pieces.read(rest[:cut])
            del rest[:cut]
        assert draft_of(whole, 63) == draft_of(pieces, 63)
        assert whole.num_found == pieces.num_found <= len(prediction)


def test_found_tokens_are_those_that_the_answer_has() -> None:
    def found(prediction: str, answer: str) -> int:
        alignment = Alignment(map(ord, prediction))
        alignment.read(map(ord, answer))
        return alignment.num_found

    assert found(TEXT, TEXT) == len(TEXT)
    assert found(TEXT, TEXT[:100]) == 100
    assert found(TEXT, "") == 0
    assert found("one two three four", "ten two three four") == len(" two three four")
    assert found("abc", "xyz") == 0


def test_many_requests_in_a_step_shorten_drafts() -> None:
    alignment = Alignment(map(ord, TEXT))
    alignment.read(map(ord, TEXT[:2]))
    alone = draft_of(alignment, 63)
    shared = draft_of(alignment, 63, num_requests=32)
    assert 0 < len(shared) < len(alone)
    assert alone[: len(shared)] == shared
