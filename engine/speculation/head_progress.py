"""How far an EAGLE head has followed a request, and the target's features that it has yet to read."""

from collections.abc import Iterable, Sequence

import torch

from engine.speculation.base import DraftRequest, FeatureRows
from engine.speculation.draft_cache import Motion
from engine.token_tree import EMPTY_TREE, TokenTree

MAX_PENDING = 64
"""Features that a request without a draft lets lie before the head reads them, in one cheap pass."""


class HeadProgress:
    """One request.

    Slot p of the head holds token p and the feature of position p - 1. Slot 0 has no feature and stays empty;
    it counts as computed.

    Args:
        num_cached: Leading tokens in the head's cache already: whole blocks.
        boundary: The feature of the last of them, [width]; None if there are none.

    Attributes:
        num_computed: Leading slots that are computed, of committed tokens and true features alone.
    """

    def __init__(self, num_cached: int = 0, boundary: torch.Tensor | None = None) -> None:
        self.num_computed = max(num_cached, 1)
        self._proposed = EMPTY_TREE
        self._num_drafted_behind = 0
        self._first = 0 if boundary is None else num_cached - 1
        self._rows: torch.Tensor | None = None if boundary is None else boundary[None].clone()
        self._is_lost = False

    @property
    def num_seen(self) -> int:
        """Leading positions whose features have come by."""
        return self._first + (0 if self._rows is None else len(self._rows))

    @property
    def num_followed(self) -> int:
        """Leading tokens that somebody else could go on from: computed, and the feature of the last known."""
        return min(self.num_computed, self.num_seen)

    def see(self, features: FeatureRows) -> None:
        """Takes features that came by; behind a gap there is no following any more."""
        if features.start != self.num_seen:
            self._is_lost = True
        elif not self._is_lost:
            kept = features.rows[:0] if self._rows is None else self._rows
            self._rows = torch.cat([kept, features.rows])

    def motion(self, request: DraftRequest) -> Motion | None:
        """What to compute: all that can be for a draft, and otherwise nothing until it is much."""
        if self._is_lost:
            return None
        num_tokens = len(request.token_ids)
        end = min(self.num_seen + 1, num_tokens)
        if request.budget > 0:
            # The last token's row is the first level's: it is computed again if nothing has come since.
            return Motion(request, max(1, min(self.num_computed, num_tokens - 1)), end)
        if end - self.num_computed < MAX_PENDING:
            return None
        return Motion(request, self.num_computed, end)

    def features(self, motion: Motion) -> torch.Tensor:
        """Those that a motion reads, [len(motion), width]."""
        assert self._rows is not None, "a motion is as long as there are features"
        return self._rows[motion.begin - 1 - self._first : motion.end - 1 - self._first]

    def compute(self, end: int) -> None:
        """Notes that slots up to `end` are computed; the last feature read stays, to draft from it again."""
        self.num_computed = end
        begin = max(end - 2, self._first)
        if self._rows is not None:
            self._rows, self._first = self._rows[begin - self._first :], begin

    def propose(self, tree: TokenTree, num_tokens: int) -> None:
        """Notes a draft behind so many committed tokens."""
        self._proposed, self._num_drafted_behind = tree, num_tokens

    def take_verdict(self, token_ids: Sequence[int]) -> tuple[TokenTree, Sequence[int]]:
        """The last draft, handed out once, and the tokens that have come since."""
        tree, self._proposed = self._proposed, EMPTY_TREE
        return tree, token_ids[self._num_drafted_behind :] if tree else ()


class BoundaryFeatures:
    """The feature of each block's last position, for whoever goes on from the block.

    Args:
        num_blocks: Blocks of the pool.
        block_size: Slots per block.
        like: A feature, for width, type and device.
    """

    def __init__(self, num_blocks: int, block_size: int, like: torch.Tensor) -> None:
        self._rows = like.new_zeros(num_blocks, like.shape[-1])
        self._block_size = block_size

    def keep(self, requests: Iterable[DraftRequest]) -> None:
        """Keeps what came by at the ends of the requests' blocks."""
        blocks: list[int] = []
        rows: list[torch.Tensor] = []
        size = self._block_size
        for request in requests:
            features = request.features
            if features is None:
                continue
            for position in range(features.start // size * size + size - 1, features.end, size):
                blocks.append(request.block_table[position // size])
                rows.append(features.rows[position - features.start])
        if blocks:
            index = torch.tensor(blocks, dtype=torch.int64, device=self._rows.device)
            self._rows.index_copy_(0, index, torch.stack(rows))

    def behind(self, request: DraftRequest) -> torch.Tensor | None:
        """The feature of the last position that a request found in the cache; None if it found none."""
        if not request.num_cached_tokens:
            return None
        return self._rows[request.block_table[request.num_cached_tokens // self._block_size - 1]]
