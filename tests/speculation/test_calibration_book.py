"""Promises are believed as far as promises of their size were kept."""

import pytest

from engine.speculation.calibration_book import CalibrationBook


def taught(kept: dict[float, float], num_tests: int = 200) -> CalibrationBook:
    """By promised chance, how often it stood."""
    book = CalibrationBook()
    for number in range(num_tests):
        for chance, share in kept.items():
            stands = int((number + 1) * share) > int(number * share)
            book.note((chance,), (1,) if stands else ())
    return book


def test_small_promises_that_are_not_kept_are_corrected_and_large_ones_that_are_stay() -> None:
    book = taught({0.25: 0.1, 0.95: 0.95})
    assert book.corrected((0.95, 0.25)) == pytest.approx((0.95, 0.1), rel=0.1)


def test_what_was_never_checked_is_believed_as_all_the_rest() -> None:
    assert CalibrationBook().corrected((0.8, 0.3)) == [0.8, 0.3]
    book = taught({0.9: 0.0})
    assert book.corrected((0.35,))[0] < 0.1
    assert book.overall < 0.2


def test_chances_do_not_rise_and_are_chances() -> None:
    book = taught({0.85: 0.2, 0.75: 0.75})
    values = book.corrected((0.85, 0.75, 0.7))
    assert values == sorted(values, reverse=True)
    assert taught({0.9: 1.0}).corrected((0.99,)) == [1.0]


def test_what_is_not_checked_any_more_is_forgotten() -> None:
    book = taught({0.25: 0.0})
    [before] = book.corrected((0.25,))
    for _ in range(6000):
        book.note((0.95,), (1,))
    [after] = book.corrected((0.25,))
    assert before < 0.05
    assert after > 0.15
