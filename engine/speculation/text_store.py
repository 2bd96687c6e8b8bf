"""TextStore: texts of finished requests, for later requests of the same scope and no others."""

from array import array
from collections import deque
from collections.abc import Sequence

from engine.sampling_params import MAX_DRAFT_TOKENS
from engine.speculation.text_index import BORDER, Occurrence, TextIndex

# Between requests short matches say little, and each size costs memory for every token.
SIZES = (3, 8)

# Tokens of the prompt that are kept in front of an answer.
LEAD = 16


class TextStore:
    """Finished texts by scope, in bounded memory: the oldest make room, whosever they are.

    A token costs about 300 bytes.

    Args:
        max_texts: Texts held at most, over all scopes.
        max_tokens: Tokens held at most, over all scopes, one per text for its border included.
    """

    def __init__(self, max_texts: int, max_tokens: int) -> None:
        self._max_texts = max_texts
        self._max_tokens = max_tokens
        self._indexes: dict[str, TextIndex] = {}
        # Scope and size of each text, the oldest first.
        self._texts: deque[tuple[str, int]] = deque()
        self._num_tokens = 0

    def __len__(self) -> int:
        """Texts held."""
        return len(self._texts)

    @property
    def num_tokens(self) -> int:
        """Tokens held, borders included."""
        return self._num_tokens

    def add(self, scope: str, tokens: Sequence[int], num_prompt_tokens: int) -> None:
        """Takes in the answer of a finished request, with the end of the prompt by which it is found.

        Args:
            scope: Whose text it is.
            tokens: Prompt and answer; of an answer that is too long for the store the end is kept.
            num_prompt_tokens: How many of them are the prompt.
        """
        if len(tokens) == num_prompt_tokens:
            return
        kept = tokens[max(num_prompt_tokens - LEAD, len(tokens) - self._max_tokens + 1, 0) :]
        self._texts.append((scope, len(kept) + 1))
        self._num_tokens += len(kept) + 1
        while len(self._texts) > self._max_texts or self._num_tokens > self._max_tokens:
            self._drop_oldest()
        index = self._indexes.setdefault(scope, TextIndex(SIZES))
        index.extend(kept)
        index.close()

    def find(self, scope: str, tail: Sequence[int], limit: int) -> list[Occurrence]:
        """See TextIndex.find; places in texts of `scope` alone.

        Each place comes with a copy of what a draft could use, since the store may drop the text before the
        draft is judged.
        """
        index = self._indexes.get(scope)
        return [] if index is None else [_copied(place) for place in index.find(tail, limit)]

    def _drop_oldest(self) -> None:
        scope, size = self._texts.popleft()
        self._num_tokens -= size
        index = self._indexes[scope]
        index.drop(size)
        if not len(index):
            del self._indexes[scope]


def _copied(place: Occurrence) -> Occurrence:
    behind = place.tokens[place.end : place.end + MAX_DRAFT_TOKENS]
    return Occurrence(array("i", (*behind, BORDER)), 0, place.length)
