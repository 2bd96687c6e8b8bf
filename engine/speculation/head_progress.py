"""How far an EAGLE head has followed a request, and the target's features that it has yet to read."""

from collections.abc import Iterable, Sequence

import torch

from engine.sampling.uploading import upload
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
        num_seen: Leading positions whose features have come by.
    """

    def __init__(self, num_cached: int = 0, boundary: torch.Tensor | None = None) -> None:
        self.num_computed = max(num_cached, 1)
        self._proposed = EMPTY_TREE
        self._num_drafted_behind = 0
        self.num_seen = num_cached
        # Kept features in the order of their positions, in as many pieces as they came in.
        self._pieces = [] if boundary is None else [boundary[None].clone()]
        self._is_lost = False

    @property
    def num_followed(self) -> int:
        """Leading tokens that somebody else could go on from: computed, and the feature of the last known."""
        return min(self.num_computed, self.num_seen)

    def see(self, features: FeatureRows) -> None:
        """Takes features that came by; behind a gap there is no following any more."""
        if features.start != self.num_seen:
            self._is_lost = True
        elif not self._is_lost:
            self._pieces.append(features.rows.clone())
            self.num_seen = features.end

    def motion(self, request: DraftRequest) -> Motion | None:
        """What to compute: all that can be for a draft, and otherwise nothing until it is much."""
        if self._is_lost:
            return None
        num_tokens = len(request.token_ids)
        if request.budget > 0:
            # The last token's row is the first level's: it is computed again if nothing has come since.
            end = min(self.num_seen + 1, num_tokens)
            return Motion(request, max(1, min(self.num_computed, num_tokens - 1)), end)
        # One slot more could be computed, but perhaps no block is there for it yet.
        if self.num_seen - self.num_computed < MAX_PENDING:
            return None
        return Motion(request, self.num_computed, self.num_seen)

    def features(self, motion: Motion) -> torch.Tensor:
        """Those that a motion reads, [len(motion), width]."""
        kept = self._kept()
        first = self.num_seen - len(kept)
        return kept[motion.begin - 1 - first : motion.end - 1 - first]

    def compute(self, end: int) -> None:
        """Notes that slots up to `end` are computed; the last feature read stays, to draft from it again."""
        self.num_computed = end
        self._pieces = [self._kept()[end - 2 - self.num_seen :]]

    def _kept(self) -> torch.Tensor:
        if len(self._pieces) > 1:
            self._pieces = [torch.cat(self._pieces)]
        return self._pieces[0]

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
            index = upload(blocks, torch.int64, self._rows.device)
            self._rows.index_copy_(0, index, torch.stack(rows))

    def behind(self, request: DraftRequest) -> torch.Tensor | None:
        """The feature of the last position that a request found in the cache; None if it found none."""
        if not request.num_cached_tokens:
            return None
        return self._rows[request.block_table[request.num_cached_tokens // self._block_size - 1]]
