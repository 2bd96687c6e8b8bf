"""Prompt lookup: the text that followed the last n-gram the last time it occurred (Saxena 2023)."""

from collections.abc import Sequence

from engine.speculation.base import DraftRequest, ProposalContext, Requirements
from engine.token_tree import EMPTY_TREE, TokenTree


class NgramSpeculator:
    """Looks the end of prompt and answer up in prompt and answer.

    The longest n-gram that ends the sequence and occurred before wins, and of its occurrences the latest.
    Where the text behind it runs into the end of the sequence, it goes on with the draft itself, so that
    a loop is continued for as long as the budget allows:

        sequence  5 1 2 3 1 2 │    latest (1 2) before the end: followed by 3 1 2 │ 3 1 2 ...
        draft                 │ 3 1 2 3 1

    Args:
        ngram_min, ngram_max: Shortest and longest n-gram looked up.
        eos_token_ids: The target's EOS ids; a draft ends with the first one.
    """

    def __init__(self, ngram_min: int, ngram_max: int, eos_token_ids: frozenset[int]) -> None:
        if not 1 <= ngram_min <= ngram_max:
            raise ValueError(f"need 1 <= ngram_min <= ngram_max, got {ngram_min} and {ngram_max}")
        self._sizes = range(ngram_max, ngram_min - 1, -1)
        self._eos_token_ids = eos_token_ids
        self._indexes: dict[str, _Index] = {}

    @property
    def requirements(self) -> Requirements:
        """None at all."""
        return Requirements()

    def propose(self, context: ProposalContext) -> list[TokenTree]:
        """See Speculator."""
        return [self._propose(request) if request.budget > 0 else EMPTY_TREE for request in context.requests]

    def num_computed_tokens(self, request_id: str) -> int:
        """0: there is no cache."""
        return 0

    def release(self, request_id: str) -> None:
        """Drops the request's index."""
        self._indexes.pop(request_id, None)

    def _propose(self, request: DraftRequest) -> TokenTree:
        index = self._indexes.get(request.request_id)
        if index is None or index.num_indexed >= len(request.token_ids):
            index = self._indexes[request.request_id] = _Index(self._sizes)
        index.extend(request.token_ids)
        begin = index.find(request.token_ids)
        if begin is None:
            return EMPTY_TREE
        ends = set(request.params.stop_token_ids)
        if not request.params.ignore_eos:
            ends |= self._eos_token_ids
        return TokenTree.chain(_continuation(request.token_ids, begin, request.budget, ends))


class _Index:
    """Where each n-gram of one sequence occurred last, kept up to date as the sequence grows.

    Attributes:
        num_indexed: Leading tokens whose n-grams are known. The last token is always left out, because
            nothing follows it yet and the end must not be found as its own earlier occurrence.
    """

    def __init__(self, sizes: Sequence[int]) -> None:
        self.num_indexed = 0
        self._sizes = sizes
        self._last_end: dict[tuple[int, ...], int] = {}

    def extend(self, token_ids: Sequence[int]) -> None:
        """Enters the n-grams that end between num_indexed and the last token."""
        for end in range(self.num_indexed + 1, len(token_ids)):
            for size in self._sizes:
                if size <= end:
                    self._last_end[tuple(token_ids[end - size : end])] = end
        self.num_indexed = max(len(token_ids) - 1, 0)

    def find(self, token_ids: Sequence[int]) -> int | None:
        """Where the text behind the latest earlier occurrence of the end begins; None without one."""
        for size in self._sizes:
            if size < len(token_ids):
                end = self._last_end.get(tuple(token_ids[-size:]))
                if end is not None:
                    return end
        return None


def _continuation(token_ids: Sequence[int], begin: int, budget: int, ends: set[int]) -> list[int]:
    draft: list[int] = []
    for place in range(begin, begin + budget):
        token = token_ids[place] if place < len(token_ids) else draft[place - len(token_ids)]
        draft.append(token)
        if token in ends:
            break  # Nothing behind the end of the answer could ever be used.
    return draft
