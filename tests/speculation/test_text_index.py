"""The index against a search that looks at everything."""

import random
from collections.abc import Sequence
from itertools import pairwise

import pytest

from engine.speculation.text_index import BORDER, TextIndex, token_behind


def brute_force(texts: Sequence[Sequence[int]], tail: Sequence[int], smallest: int) -> set[tuple[int, ...]]:
    """What follows each place, up to its text's end, in front of it the length of the match."""
    found = []
    for text in texts:
        for end in range(1, len(text)):
            length = 0
            while length < min(end, len(tail)) and text[end - 1 - length] == tail[-1 - length]:
                length += 1
            if length >= smallest:
                found.append((length, *text[end:]))
    return set(found)


def seen(index: TextIndex, tail: Sequence[int], limit: int = 1000) -> list[tuple[int, ...]]:
    places = []
    for place in index.find(tail, limit):
        held = list(place.tokens[place.end :])
        if BORDER in held:
            held = held[: held.index(BORDER)]
        places.append((place.length, *held))
    return places


@pytest.mark.parametrize("sizes", [(1,), (1, 2, 3), (2, 3), (1, 4)])
def test_a_growing_text(sizes: tuple[int, ...]) -> None:
    rng = random.Random(sum(sizes))
    for _ in range(20):
        index, text = TextIndex(sizes), list[int]()
        for _ in range(15):
            new = [rng.randrange(3) for _ in range(rng.randint(0, 4))]
            index.extend(new)
            text += new
            assert len(index) == len(text)
            assert list(index.tail(5)) == text[-5:]
            found = seen(index, index.tail(6))
            assert set(found) == brute_force([text], text[-6:], min(sizes)), text
            assert [place[0] for place in found] == sorted((place[0] for place in found), reverse=True)
            # Of equally long ones the latest first: less text stands behind it.
            assert all(a[0] > b[0] or len(a) < len(b) for a, b in pairwise(found))


def test_a_queue_of_texts() -> None:
    rng = random.Random(1)
    index, texts = TextIndex((1, 3)), list[list[int]]()
    for _ in range(200):
        texts.append([rng.randrange(3) for _ in range(rng.randint(1, 9))])
        index.extend(texts[-1])
        index.close()
        while len(texts) > 5:
            index.drop(len(texts.pop(0)) + 1)
        tail = [rng.randrange(3) for _ in range(4)]
        places = {place for place in seen(index, tail) if len(place) > 1}
        assert places == brute_force(texts, tail, 1)


def test_nothing_matches_across_a_border() -> None:
    index = TextIndex((1, 2))
    index.extend((1, 2))
    index.close()
    index.extend((3, 4))
    index.close()
    assert seen(index, (2, 3)) == [(1, 4)]


def test_a_limit_keeps_the_latest_of_the_longest_ngram() -> None:
    index = TextIndex((1, 2))
    index.extend((1, 2, 70, 1, 2, 71, 2, 72, 1, 2, 73, 5))
    assert [place[:2] for place in seen(index, (1, 2), 2)] == [(2, 73), (2, 72 - 1)]
    assert len(seen(index, (1, 2), 1)) == 1


def test_what_is_dropped_leaves_nothing_behind() -> None:
    index = TextIndex((1, 2, 3))
    for _ in range(50):
        index.extend((1, 2, 3, 4, 5))
        index.close()
    index.drop(50 * 6)
    assert len(index) == 0
    assert not any(latest or earlier for latest, earlier, _ in index._tables)
    index.extend((7, 8, 7))
    assert seen(index, (7,)) == [(1, 8, 7)]


def test_a_text_that_grows_continues_itself() -> None:
    index = TextIndex((2,))
    index.extend((5, 1, 2, 3, 1, 2))
    [place] = index.find((1, 2), 9)
    path: list[int] = []
    for _ in range(6):
        path.append(token_behind(place, path))
    assert path == [3, 1, 2, 3, 1, 2]
