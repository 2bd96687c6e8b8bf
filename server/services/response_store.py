"""ResponseStore: responses in memory, for those who made them."""

from collections import OrderedDict
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """A response that can be asked for and continued.

    Attributes:
        body: The response as it was answered, JSON.
        conversation: The messages up to its end, instructions excepted, JSON.
    """

    body: bytes
    conversation: bytes

    @property
    def num_bytes(self) -> int:
        """What it takes."""
        return len(self.body) + len(self.conversation)


class ResponseStore:
    """The responses that were used last, as many as there is room for.

    A response has its whole conversation with it, so that none depends on another that may be gone.

    Args:
        max_responses: How many at most; 0 stores none.
        max_bytes: How much they may take together.
    """

    def __init__(self, max_responses: int, max_bytes: int) -> None:
        self._max_responses = max_responses
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._by_key: OrderedDict[tuple[str, str], StoredResponse] = OrderedDict()

    def __len__(self) -> int:
        return len(self._by_key)

    @property
    def is_open(self) -> bool:
        """Whether it stores anything."""
        return self._max_responses > 0

    @property
    def num_bytes(self) -> int:
        """What all of them take."""
        return self._num_bytes

    def put(self, scope: str, response_id: str, response: StoredResponse) -> None:
        """Stores a response of a scope, unless there could never be room for it.

        Those that were not used for longest make room.
        """
        if response.num_bytes > self._max_bytes:
            return
        self._by_key[scope, response_id] = response
        self._num_bytes += response.num_bytes
        while len(self._by_key) > self._max_responses or self._num_bytes > self._max_bytes:
            _, gone = self._by_key.popitem(last=False)
            self._num_bytes -= gone.num_bytes

    def get(self, scope: str, response_id: str) -> StoredResponse | None:
        """A response of the scope, which counts as used; None if the scope has none of that id."""
        found = self._by_key.get((scope, response_id))
        if found is not None:
            self._by_key.move_to_end((scope, response_id))
        return found

    def remove(self, scope: str, response_id: str) -> bool:
        """Takes a response out; whether there was one."""
        gone = self._by_key.pop((scope, response_id), None)
        if gone is not None:
            self._num_bytes -= gone.num_bytes
        return gone is not None
