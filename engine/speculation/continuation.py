"""From the places where a text occurred before to the tree of what may follow (Oliaro et al. 2024)."""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import count

from engine.speculation.evidence import Rate, level_of, pays
from engine.speculation.text_index import BORDER, Occurrence, token_behind
from engine.token_tree import MAX_NODES, TokenTree


@dataclass(frozen=True, slots=True)
class GrowthRules:
    """How large a draft may get.

    Attributes:
        factor: Draft tokens in a row that a match warrants per token of its length.
        min_probability: Paths less likely than this are not drafted.
        is_tree: Whether places that go on differently make branches; else the likeliest is followed.
    """

    factor: float
    min_probability: float
    is_tree: bool


@dataclass(frozen=True, slots=True)
class Room:
    """What the step leaves to a draft.

    Attributes:
        budget: Nodes at most.
        max_depth: Levels at most.
        num_requests: How many share the step.
    """

    budget: int
    max_depth: int = MAX_NODES
    num_requests: int = 1


@dataclass(slots=True)
class _Level:
    """The children of a node, seen from its longest matches down to those of one level.

    Attributes:
        rate: How often the next token is among the children of a node of this level.
        counts: Places per child.
    """

    rate: Rate
    counts: dict[int, int]


@dataclass(frozen=True, slots=True)
class _Candidate:
    """A node that may join the draft.

    Attributes:
        probability: Of its whole path.
        parent: Its parent's number in the tree.
        path: Tokens from below the root down to it.
        places: Those that have the path behind them, longest match first.
    """

    probability: float
    parent: int
    path: tuple[int, ...]
    places: Sequence[Occurrence]


def learn(places: Sequence[Occurrence], token: int, rates: Sequence[Rate]) -> list[Occurrence]:
    """Holds what the places predicted against the token that came.

    Args:
        places: Longest match first.
        token: What came.
        rates: Per level; what is noted is whether the children seen at that level had the token.

    Returns:
        The places that were right, moved on behind it.
    """
    for level in _levels(places, (), rates):
        came_true = token in level.counts
        level.rate.note(came_true)
        if came_true:
            break
    return [
        Occurrence(place.tokens, place.end + 1, place.length + 1)
        for place in places
        if token_behind(place, ()) == token
    ]


def grow(
    places: Sequence[Occurrence],
    rates: Sequence[Rate],
    rules: GrowthRules,
    room: Room,
    ends: Collection[int],
) -> TokenTree:
    """The tree of likeliest continuations, node by node until one no longer pays.

    Arctic's suffix decoding takes the counts of one match length, the one that promises most. Here all
    lengths have their say, weighted by how often each was right for this request (see `_distribution`).

    Args:
        places: Longest match first.
        rates: Per level, how often the next token was among those seen.
        rules: Limits.
        room: For nodes.
        ends: Ids behind which nothing is drafted.
    """
    tokens: list[int] = []
    parents: list[int] = []
    expected = 1.0
    # The likeliest first, of equal ones the first found.
    waiting: list[tuple[float, int, _Candidate]] = []
    number = count()
    node = _Candidate(1.0, 0, (), places)
    while len(tokens) < room.budget:
        is_last = len(node.path) == room.max_depth or (node.path and node.path[-1] in ends)
        if not is_last:
            for child in _children(node, len(tokens), rates, rules):
                heappush(waiting, (-child.probability, next(number), child))
        if not waiting or not pays(-waiting[0][0], expected, len(tokens), room.num_requests):
            break
        node = heappop(waiting)[2]
        tokens.append(node.path[-1])
        parents.append(node.parent)
        expected += node.probability
    return TokenTree(tuple(tokens), tuple(parents))


def _children(
    node: _Candidate, number: int, rates: Sequence[Rate], rules: GrowthRules
) -> Iterator[_Candidate]:
    """What may follow a node that has its place in the tree, `number`."""
    depth = len(node.path)
    places = [place for place in node.places if depth < rules.factor * place.length]
    following = _distribution(places, node.path, rates)
    if following and not rules.is_tree:
        likeliest = max(following, key=lambda token: following[token])
        following = {likeliest: following[likeliest]}
    for token, probability in following.items():
        probability *= node.probability
        if probability >= rules.min_probability:
            kept = [place for place in places if token_behind(place, node.path) == token]
            yield _Candidate(probability, number, (*node.path, token), kept)


def _distribution(
    places: Sequence[Occurrence], path: Sequence[int], rates: Sequence[Rate]
) -> dict[int, float]:
    """Probabilities of the tokens that may follow `path`.

    The longest matches speak first: with the probability that their level is right the next token is one of
    theirs, in proportion to their counts; with the rest the shorter matches are asked, as in prediction by
    partial matching (Cleary and Witten 1984).
    """
    following: dict[int, float] = {}
    left = 1.0
    for level in _levels(places, path, rates):
        trust = level.rate.value
        each = left * trust / sum(level.counts.values())
        for token, num_places in level.counts.items():
            following[token] = following.get(token, 0.0) + each * num_places
        left *= 1.0 - trust
    return following


def _levels(places: Sequence[Occurrence], path: Sequence[int], rates: Sequence[Rate]) -> Iterator[_Level]:
    """The node behind `path`, seen with longer matches alone, then with more and more of the shorter ones."""
    counts: dict[int, int] = {}
    current = -1
    for place in places:
        token = token_behind(place, path)
        if token == BORDER:
            continue
        level = level_of(place.length + len(path))
        if counts and level != current:
            yield _Level(rates[current], counts)
        current = level
        counts[token] = counts.get(token, 0) + 1
    if counts:
        yield _Level(rates[current], counts)
