"""Prompt lookup: the text that followed the last tokens the last time they occurred (Saxena 2023)."""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import count

from engine.speculation.base import DraftRequest, ProposalContext, Requirements
from engine.speculation.continuation import Room
from engine.speculation.evidence import Rate, RowPrice, level_of, new_rates
from engine.speculation.text_index import Occurrence, TextIndex, token_behind
from engine.token_tree import EMPTY_TREE, TokenTree

# Places compared to find the longest match, and how long a match may count.
MAX_PLACES = 32
MAX_MATCH = 64

# A match must be longer than this to be read on in behind a changed token, and then counts this much at most.
RESUMED_MATCH = 4
# That what follows a changed token is the old text again.
RESUMED_PRIOR = 0.3

# That the next match that goes on differently is right where the first is wrong: a guess, to begin with.
RIVAL_PRIOR = 0.3


class NgramSpeculator:
    """Looks the end of prompt and answer up in prompt and answer.

    Of all places where the last tokens occurred, the longest match wins, and of equal ones the latest. Where
    the text behind it runs into the end of the sequence, it goes on with the draft itself, so that a loop is
    continued for as long as the budget allows:

        sequence  5 1 2 3 1 2 │    latest (1 2) before the end: followed by 3 1 2 │ 3 1 2 ...
        draft                 │ 3 1 2 3 1

    Where other matches go on differently, the draft branches into what followed each, if such rivals were
    right often enough where the first match was wrong.

    Where the answer is an edited copy, the match breaks at each changed token. Reading on behind the token
    that was replaced resumes the copy a step later instead of an n-gram later, and a replacement that proved
    to be one (the copy went on behind it) is made in later drafts as well.

    A draft is as long as pays by what lookups of this request came to (`engine.speculation.evidence`).

    Args:
        ngram_min: Shortest match.
        ngram_max: Longest n-gram in the index. Longer matches are found by it too; where more than
            MAX_PLACES places share it, only the latest of them are compared.
        eos_token_ids: The target's EOS ids; a draft ends with the first one.
    """

    def __init__(self, ngram_min: int, ngram_max: int, eos_token_ids: frozenset[int]) -> None:
        if not 1 <= ngram_min <= ngram_max:
            raise ValueError(f"need 1 <= ngram_min <= ngram_max, got {ngram_min} and {ngram_max}")
        self._sizes = range(ngram_min, ngram_max + 1)
        self._eos_token_ids = eos_token_ids
        self._readers: dict[str, _Reader] = {}

    @property
    def requirements(self) -> Requirements:
        """None at all; its drafts may branch, and come with estimates."""
        return Requirements(branches=True, estimates=True)

    def propose(self, context: ProposalContext) -> list[TokenTree]:
        """See Speculator."""
        return [self._propose(request) if request.budget > 0 else EMPTY_TREE for request in context.requests]

    def num_computed_tokens(self, request_id: str) -> int:
        """0: there is no cache."""
        return 0

    def release(self, request_id: str) -> None:
        """Drops the request's index and record."""
        self._readers.pop(request_id, None)

    def _propose(self, request: DraftRequest) -> TokenTree:
        reader = self._readers.get(request.request_id)
        if reader is None or reader.num_read > len(request.token_ids):
            prompt = request.token_ids[: request.num_prompt_tokens]
            reader = self._readers[request.request_id] = _Reader(self._sizes, prompt)
        reader.read(request.token_ids[reader.num_read :])
        ends = ending_ids(request, self._eos_token_ids)
        return reader.draft(Room(request.budget, request.max_depth, request.price), ends)


def ending_ids(request: DraftRequest, eos_token_ids: frozenset[int]) -> Collection[int]:
    """Ids that end the request's answer: nothing behind them could ever be used."""
    ids = request.params.stop_token_ids
    return ids if request.params.ignore_eos else eos_token_ids.union(ids)


@dataclass(slots=True)
class _Branch:
    """A chain of the draft as far as it has come.

    Attributes:
        place: What it is copied from.
        tokens: From below the root.
        parent: The number of the node that the last of them hangs off.
        chance: That all of them stand.
    """

    place: Occurrence
    tokens: list[int]
    parent: int
    chance: float


class _Reader:
    """Follows one request: where its text is copied from, and how reliably.

    What it knows is a function of the tokens alone, however many came at a time.
    """

    def __init__(self, sizes: Sequence[int], prompt: Sequence[int]) -> None:
        self._index = TextIndex(sizes)
        self._index.extend(prompt)
        self._rates = new_rates()
        self._resumed_rate = Rate(RESUMED_PRIOR)
        self._rival_rate = Rate(RIVAL_PRIOR)
        # Longest match first. That is the one to read on in; the others are its rivals.
        self._places = self._find()
        self._is_resumed = False
        self._replacements: dict[int, int] = {}
        # A replacement (old token, new token) that waits for the copy to go on behind it.
        self._unproven: tuple[int, int] | None = None

    @property
    def num_read(self) -> int:
        """Tokens of the request that are known."""
        return len(self._index)

    def read(self, tokens: Sequence[int]) -> None:
        """Holds each committed token against what was predicted, and finds the place to read on."""
        for token in tokens:
            place = self._places[0] if self._places else None
            came_true = place is not None and self._judge(place, token)
            self._index.extend((token,))
            if place is not None and came_true:
                # No other match can have become longer than these, or later at the same length.
                originals = self._originals(token)
                right = [rival for rival in self._places[1:] if rival.tokens[rival.end] in originals]
                self._places = [
                    Occurrence(text, end + 1, min(length + 1, MAX_MATCH))
                    for text, end, length in (place, *right)
                ]
                self._is_resumed = False
            else:
                self._move_on(place, token)

    def draft(self, room: Room, ends: Collection[int]) -> TokenTree:
        """As many of the next tokens as pay, the likeliest first."""
        tokens: list[int] = []
        parents: list[int] = []
        chances: list[float] = []
        number = count()
        waiting: list[tuple[float, int, _Branch]] = []
        for branch in self._branches(room.price):
            heappush(waiting, (-branch.chance, next(number), branch))
        expected = 1.0
        while waiting and len(tokens) < room.budget:
            branch = heappop(waiting)[2]
            if not room.price.pays(branch.chance, expected, len(tokens)):
                break
            expected += branch.chance
            tokens.append(branch.tokens[-1])
            parents.append(branch.parent)
            chances.append(branch.chance)
            depth = len(branch.tokens)
            if depth < room.max_depth and branch.tokens[-1] not in ends:
                branch.chance *= self._rate(branch.place, depth).value
                branch.tokens.append(self._predict(branch.place, branch.tokens))
                branch.parent = len(tokens)
                heappush(waiting, (-branch.chance, next(number), branch))
        if not tokens:
            return EMPTY_TREE
        return TokenTree(tuple(tokens), tuple(parents), probabilities=tuple(chances))

    def _branches(self, price: RowPrice) -> Iterator[_Branch]:
        """What may come next, each of the matches having its say where those before it are wrong.

        What would not pay as the only node does not pay beside others; rivals promise less and less.
        """
        left, seen = 1.0, set[int]()
        for place in self._places:
            token = self._next(place)
            if token not in seen:
                chance = left * (self._rival_rate if seen else self._rate(place, 0)).value
                if price.pays(chance, 1.0, 0):
                    yield _Branch(place, [token], 0, chance)
                elif seen:
                    break
                seen.add(token)
                left -= chance

    def _judge(self, place: Occurrence, token: int) -> bool:
        """Whether the token is what `place` predicted; either is remembered."""
        predicted = self._next(place)
        came_true = predicted == token
        self._rate(place, 0).note(came_true)
        if came_true and self._is_resumed and self._unproven is not None:
            self._replacements.update([self._unproven])
        if not came_true:
            others = (other for rival in self._places if (other := self._next(rival)) != predicted)
            rival = next(others, None)
            if rival is not None:
                self._rival_rate.note(rival == token)
        if self._replacements and token_behind(place, ()) == token:
            self._replacements.pop(token, None)
        return came_true

    def _move_on(self, place: Occurrence | None, token: int) -> None:
        """Behind a token that was not predicted: to the longest match, or on in the copy behind `place`."""
        was_resumed = self._is_resumed
        self._places, self._is_resumed, self._unproven = self._find(), False, None
        if place is None or was_resumed or place.length < RESUMED_MATCH:
            return
        best = self._places[0].length if self._places else 0
        if not best or self._resumed_rate.value > self._rates[level_of(best)].value:
            self._unproven = (token_behind(place, ()), token)
            self._places = [Occurrence(place.tokens, place.end + 1, RESUMED_MATCH)]
            self._is_resumed = True

    def _find(self) -> list[Occurrence]:
        return self._index.find(self._index.tail(MAX_MATCH), MAX_PLACES)

    def _next(self, place: Occurrence) -> int:
        """What a place predicts behind the end of the text; there is a token behind each."""
        token = place.tokens[place.end]
        return self._replacements.get(token, token) if self._replacements else token

    def _originals(self, token: int) -> set[int]:
        """What has to stand behind a place for it to predict this token."""
        found = {old for old, new in self._replacements.items() if new == token}
        if token not in self._replacements:
            found.add(token)
        return found

    def _predict(self, place: Occurrence, path: Sequence[int]) -> int:
        token = token_behind(place, path)
        return self._replacements.get(token, token)

    def _rate(self, place: Occurrence, depth: int) -> Rate:
        if self._is_resumed and depth == 0:
            return self._resumed_rate
        return self._rates[level_of(place.length + depth)]
