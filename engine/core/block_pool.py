"""BlockPool: hands out block ids, counts who holds them, and remembers what full blocks contain."""

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(slots=True)
class Block:
    """One block.

    Attributes:
        holders: Block tables that contain it.
        key: What it contains, as a prefix key; None while it is not in the prefix cache.
        in_draft_cache: Whether the speculator's cache holds its tokens as well.
    """

    holders: int = 0
    key: bytes | None = None
    in_draft_cache: bool = False


class BlockPool:
    """Blocks are free, held, or both free and cached: a free block keeps its content until it is needed.

    Free blocks are taken from the front of a queue. Blocks without cached content return to the front,
    cached ones to the back, so that the least recently used content is overwritten first.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._blocks = [Block() for _ in range(num_blocks)]
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))
        self._cached: dict[bytes, int] = {}

    @property
    def num_free(self) -> int:
        """Blocks that nobody holds."""
        return len(self._free)

    def allocate(self, count: int) -> list[int] | None:
        """Takes `count` blocks with undefined content, or none at all when there are too few."""
        if count > len(self._free):
            return None
        return [self._take(next(iter(self._free))) for _ in range(count)]

    def is_held(self, block_id: int) -> bool:
        """Whether any block table contains the block."""
        return self._blocks[block_id].holders > 0

    def hold(self, block_id: int) -> None:
        """Adds a holder to a block whose content is wanted."""
        block = self._blocks[block_id]
        if block.holders == 0:
            del self._free[block_id]
        block.holders += 1

    def release(self, block_ids: Iterable[int]) -> None:
        """Removes a holder from each block.

        Given in the order of a block table, the tail of a sequence is overwritten before its beginning,
        which is what other sequences are most likely to share.
        """
        for block_id in reversed(list(block_ids)):
            block = self._blocks[block_id]
            assert block.holders > 0, f"block {block_id} released but not held"
            block.holders -= 1
            if block.holders == 0:
                self._free[block_id] = None
                if block.key is None:
                    self._free.move_to_end(block_id, last=False)

    def publish(self, block_id: int, key: bytes) -> None:
        """Enters a full block into the prefix cache, unless another block already has the same content."""
        if key not in self._cached:
            self._cached[key] = block_id
            self._blocks[block_id].key = key

    def supersede(self, block_id: int, key: bytes) -> None:
        """Lets a block that is about to be marked stand for a published one of equal content without a mark.

        With the mark it serves requests that the other does not.
        """
        published = self._cached.get(key)
        if published is not None and published != block_id and not self.is_in_draft_cache(published):
            self._blocks[published].key = None
            self._blocks[block_id].key = key
            self._cached[key] = block_id

    def mark_in_draft_cache(self, block_id: int) -> None:
        """Notes that the speculator's cache holds a published block's tokens too."""
        if self._blocks[block_id].key is not None:
            self._blocks[block_id].in_draft_cache = True

    def lookup(self, key: bytes) -> int | None:
        """The block with this content, if there is one."""
        return self._cached.get(key)

    def is_in_draft_cache(self, block_id: int) -> bool:
        """Whether the speculator's cache holds the block's tokens too."""
        return self._blocks[block_id].in_draft_cache

    def check_integrity(self, tables: Iterable[list[int]]) -> None:
        """Raises AssertionError unless the books agree with the block tables that exist."""
        holders = [0] * self.num_blocks
        for table in tables:
            assert len(set(table)) == len(table), f"a block stands twice in one table: {table}"
            for block_id in table:
                holders[block_id] += 1
        for block_id, block in enumerate(self._blocks):
            assert block.holders == holders[block_id], (
                f"block {block_id}: {block.holders} holders noted, {holders[block_id]} tables contain it"
            )
            assert (block.holders == 0) == (block_id in self._free), f"block {block_id}: free list is wrong"
            assert block.key is None or self._cached.get(block.key) == block_id, (
                f"block {block_id}: cached under a key that leads elsewhere"
            )
            assert block.key is not None or not block.in_draft_cache, f"block {block_id}: stale draft mark"
        for key, block_id in self._cached.items():
            assert self._blocks[block_id].key == key, f"block {block_id}: key of another content"

    def _take(self, block_id: int) -> int:
        del self._free[block_id]
        block = self._blocks[block_id]
        if block.key is not None:
            del self._cached[block.key]
        block.key = None
        block.in_draft_cache = False
        block.holders = 1
        return block_id
