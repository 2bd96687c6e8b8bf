"""Suffix decoding: drafts from everything that was said before (Oliaro et al. 2024, SuffixDecoding)."""

from collections.abc import Sequence
from dataclasses import dataclass
from heapq import merge

from engine.speculation.base import DraftRequest, ProposalContext, Requirements
from engine.speculation.continuation import GrowthRules, Room, grow, learn
from engine.speculation.evidence import new_rates
from engine.speculation.ngram import ending_ids
from engine.speculation.text_index import Occurrence, TextIndex
from engine.speculation.text_store import TextStore
from engine.token_tree import EMPTY_TREE, TokenTree

# Places considered per step, of the request's own text and of the shared ones each.
MAX_PLACES = 32

# The n-grams by which a request's own text is searched.
SIZES = (1, 2, 4, 8)

# A match this long needs no shorter ones beside it: those it was found with will do.
LONG_MATCH = 8


class SuffixSpeculator:
    """Drafts what followed the last tokens in the request's own text and in the shared ones, by counts.

    Where prompt lookup follows one place, this weighs all of them and may draft a tree.

    Args:
        rules: Limits of a draft's growth.
        max_depth: Tokens of a match that count, at most.
        eos_token_ids: The target's EOS ids; nothing is drafted behind them.
        store: Texts of finished requests; None uses each request's own text alone.
    """

    def __init__(
        self, rules: GrowthRules, max_depth: int, eos_token_ids: frozenset[int], store: TextStore | None
    ) -> None:
        self._rules = rules
        self._max_depth = max_depth
        self._eos_token_ids = eos_token_ids
        self._store = store
        self._readers: dict[str, _Reader] = {}

    @property
    def requirements(self) -> Requirements:
        """Finished texts, if they are shared; and room for nodes beside each other in trees."""
        return Requirements(text_store=self._store, branches=self._rules.is_tree)

    def propose(self, context: ProposalContext) -> list[TokenTree]:
        """See Speculator."""
        return [self._propose(request) if request.budget > 0 else EMPTY_TREE for request in context.requests]

    def num_computed_tokens(self, request_id: str) -> int:
        """0: there is no cache."""
        return 0

    def release(self, request_id: str) -> None:
        """Drops the request's own tree and record."""
        self._readers.pop(request_id, None)

    def _propose(self, request: DraftRequest) -> TokenTree:
        reader = self._readers.get(request.request_id)
        if reader is None or reader.num_read > len(request.token_ids):
            prompt = request.token_ids[: request.num_prompt_tokens]
            search = _Search(self._max_depth, request.params.cache_scope, self._store)
            reader = self._readers[request.request_id] = _Reader(search, prompt)
        reader.read(request.token_ids[reader.num_read :])
        ends = ending_ids(request, self._eos_token_ids)
        room = Room(request.budget, request.max_depth, request.num_requests)
        return grow(reader.places, reader.rates, self._rules, room, ends)


@dataclass(frozen=True, slots=True)
class _Search:
    """Where a request may look.

    Attributes:
        max_depth: Tokens of a match that count, at most.
        scope: Whose finished texts it may see.
        store: The finished texts; None for none.
    """

    max_depth: int
    scope: str
    store: TextStore | None

    def find(self, index: TextIndex) -> list[Occurrence]:
        """Places where the end of the request's own text occurred, longest match first."""
        tail = index.tail(self.max_depth)
        places = index.find(tail, MAX_PLACES)
        if self.store is None:
            return places
        shared = self.store.find(self.scope, tail, MAX_PLACES)
        return list(merge(places, shared, key=lambda place: place.length, reverse=True))


class _Reader:
    """Follows one request: its text, the places that continue it, and how often such places were right.

    But for the shared texts, what it knows is a function of the tokens alone, however many came at a time.
    """

    def __init__(self, search: _Search, prompt: Sequence[int]) -> None:
        self._search = search
        self._index = TextIndex([size for size in SIZES if size <= search.max_depth])
        self._index.extend(prompt)
        self.rates = new_rates()
        self.places = search.find(self._index)

    @property
    def num_read(self) -> int:
        """Tokens of the request that are known."""
        return len(self._index)

    def read(self, tokens: Sequence[int]) -> None:
        """Takes in what was committed."""
        for token in tokens:
            self.places = learn(self.places, token, self.rates)
            self._index.extend((token,))
            if not self.places or self.places[0].length < LONG_MATCH:
                self.places = self._search.find(self._index)
