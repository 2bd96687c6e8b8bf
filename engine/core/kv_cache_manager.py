"""KVCacheManager: which blocks each request holds, and which of them others may share."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import blake2b

from engine.core.block_pool import BlockPool
from engine.core.request import Request


@dataclass(slots=True)
class _Table:
    """A request's blocks, and how many of them others may share already."""

    blocks: list[int] = field(default_factory=list)
    num_published: int = 0
    num_draft_marked: int = 0


@dataclass(frozen=True, slots=True)
class PrefixMatch:
    """What the prefix cache knows of a request.

    Attributes:
        blocks: Leading blocks with its tokens.
        num_tokens: Tokens in them.
        num_draft_tokens: Those that the speculator's cache holds as well, again from the beginning.
    """

    blocks: tuple[int, ...]
    num_tokens: int
    num_draft_tokens: int


class KVCacheManager:
    """Block tables over one BlockPool; every cache of the engine is indexed by them.

    A full block enters the prefix cache when the target has computed it. It also carries a mark for the
    speculator's cache; where the mark is missing, the speculator computes the tokens anew into the same
    block, which writes what any other holder would write there. A speculator that cannot, since it is made
    of hidden states that the target gave when it computed the tokens, has its requests computed anew.
    """

    def __init__(self, num_blocks: int, block_size: int, *, prefix_caching: bool = True) -> None:
        self.block_size = block_size
        self.pool = BlockPool(num_blocks)
        self._prefix_caching = prefix_caching
        self._tables: dict[str, _Table] = {}

    @property
    def usage(self) -> float:
        """Share of the blocks that are held, 0 to 1."""
        return 1.0 - self.pool.num_free / self.pool.num_blocks

    def blocks_for(self, num_slots: int) -> int:
        """Blocks that hold so many slots."""
        return -(-num_slots // self.block_size)

    def block_table(self, request: Request) -> Sequence[int]:
        """The request's block ids in sequence order."""
        return self._tables[request.request_id].blocks

    def num_slots(self, request: Request) -> int:
        """Slots the request's blocks have."""
        return len(self._tables[request.request_id].blocks) * self.block_size

    def slot(self, request: Request, index: int) -> int:
        """Cache slot of the request's index-th token or scratch place."""
        block = self._tables[request.request_id].blocks[index // self.block_size]
        return block * self.block_size + index % self.block_size

    def moves(self, request: Request, accepted: Sequence[int]) -> tuple[list[int], list[int]]:
        """Where the keys and values of accepted nodes lie, and the slots in which their tokens belong."""
        moved = [(node, index) for index, node in enumerate(accepted) if node != index + 1]
        return (
            [self.slot(request, request.num_tokens - 1 + node) for node, _ in moved],
            [self.slot(request, request.num_tokens + index) for _, index in moved],
        )

    def num_looked_up(self, request: Request) -> int:
        """Tokens that `match_prefix` compares; none where the request may not use the prefix cache."""
        return request.num_tokens if self._prefix_caching and not request.needs_every_row else 0

    def match_prefix(self, request: Request) -> PrefixMatch:
        """Finds the longest cached beginning; the last token at least is left, since its row is needed."""
        if not self.num_looked_up(request):
            return PrefixMatch((), 0, 0)
        blocks: list[int] = []
        num_draft = 0
        for key in self._prefix_keys(request, (request.num_tokens - 1) // self.block_size):
            block_id = self.pool.lookup(key)
            if block_id is None:
                break
            if request.needs_draft_cache and not self.pool.is_in_draft_cache(block_id):
                break
            if num_draft == len(blocks) and self.pool.is_in_draft_cache(block_id):
                num_draft += 1
            blocks.append(block_id)
        return PrefixMatch(tuple(blocks), len(blocks) * self.block_size, num_draft * self.block_size)

    def will_share(self, reader: Request, request: Request, match: PrefixMatch, num_tokens: int) -> bool:
        """Whether a reader is about to compute at least num_tokens of what a request's match lacks.

        It is if it stands at the very block that is missing first, and goes on with the request's tokens in
        whole blocks. Keys are chained, so that the last one of them tells of all.

        Args:
            reader: A request with a table, some of whose prompt is still to be computed.
            request: Who would wait for it.
            match: What the prefix cache knows of `request` now.
            num_tokens: What waiting is worth; one block is looked at in any case.
        """
        if not self.num_looked_up(request):
            return False
        if request.needs_draft_cache and not reader.needs_draft_cache:
            return False
        place = len(match.blocks)
        if self._num_shareable(reader, request) != place:
            return False
        end = place + max(1, self.blocks_for(num_tokens))
        if end > min((request.num_tokens - 1) // self.block_size, reader.num_tokens // self.block_size):
            return False
        return self._prefix_keys(reader, end)[-1] == self._prefix_keys(request, end)[-1]

    def num_taken(self, match: PrefixMatch, num_slots: int) -> int:
        """Free blocks that an admission uses up: new ones, and matched ones that nobody holds."""
        held = sum(self.pool.is_held(block_id) for block_id in match.blocks)
        return self.blocks_for(num_slots) - held

    def num_missing(self, request: Request) -> int:
        """Blocks that a request with a table still needs for the tokens it has."""
        return self.blocks_for(request.num_tokens) - len(self._tables[request.request_id].blocks)

    def admit(self, request: Request, match: PrefixMatch, num_slots: int) -> bool:
        """Opens a block table that starts with the match and covers num_slots; False if the pool is dry.

        Raises:
            ValueError: The request has a table already.
        """
        if request.request_id in self._tables:
            raise ValueError(f"request {request.request_id} has a block table already")
        for block_id in match.blocks:
            self.pool.hold(block_id)
        fresh = self.pool.allocate(self.blocks_for(num_slots) - len(match.blocks))
        if fresh is None:
            self.pool.release(match.blocks)
            return False
        self._tables[request.request_id] = _Table([*match.blocks, *fresh])
        return True

    def extend(self, request: Request, num_slots: int, *, leave_free: int = 0) -> bool:
        """Grows the request's table to num_slots; False, with nothing changed, if the pool is too dry.

        Args:
            request: A request with a table.
            num_slots: Slots wanted in all.
            leave_free: Blocks that must stay free afterwards.
        """
        table = self._tables[request.request_id]
        missing = self.blocks_for(num_slots) - len(table.blocks)
        if missing <= 0:
            return True
        if self.pool.num_free - missing < leave_free:
            return False
        fresh = self.pool.allocate(missing)
        if fresh is None:
            return False
        table.blocks.extend(fresh)
        return True

    def publish(self, request: Request, num_draft_computed: int) -> None:
        """Lets others share the request's full blocks of computed, committed tokens.

        Args:
            request: A request with a table.
            num_draft_computed: Leading tokens that the speculator's cache holds.
        """
        if not self._prefix_caching:
            return
        table = self._tables[request.request_id]
        num_full = min(request.num_computed_tokens, request.num_tokens) // self.block_size
        num_marked = min(num_draft_computed // self.block_size, num_full)
        if num_full <= table.num_published and num_marked <= table.num_draft_marked:
            return  # As after most steps: a block is full every so many tokens.
        keys = self._prefix_keys(request, num_full)
        for index in range(table.num_published, num_full):
            self.pool.publish(table.blocks[index], keys[index])
        table.num_published = max(table.num_published, num_full)
        for index in range(table.num_draft_marked, num_marked):
            self.pool.supersede(table.blocks[index], keys[index])
            self.pool.mark_in_draft_cache(table.blocks[index])
        table.num_draft_marked = max(table.num_draft_marked, num_marked)

    def rematch(self, request: Request, match: PrefixMatch) -> None:
        """Puts a longer match in the place of a table that holds no more than a match."""
        self.free(request)
        admitted = self.admit(request, match, match.num_tokens)
        assert admitted, "a match takes no new blocks"

    def free(self, request: Request) -> None:
        """Gives the request's blocks back; one without a table is no error."""
        table = self._tables.pop(request.request_id, None)
        if table is not None:
            self.pool.release(table.blocks)

    def check_integrity(self) -> None:
        """Raises AssertionError unless block tables and pool agree."""
        self.pool.check_integrity(table.blocks for table in self._tables.values())

    def _num_shareable(self, reader: Request, request: Request) -> int:
        """Leading blocks of a reader that are computed as far as the request needs them to be."""
        if not request.needs_draft_cache:
            return reader.num_computed_tokens // self.block_size
        marked = self._tables[reader.request_id].num_draft_marked
        return max(marked, reader.num_draft_cached_tokens // self.block_size)

    def _prefix_keys(self, request: Request, count: int) -> list[bytes]:
        """Keys of the first `count` blocks: each a digest of its tokens and the key before it.

        A cryptographic digest, because a collision would show one client another's keys and values.
        """
        keys = request.prefix_keys
        while len(keys) < count:
            begin = len(keys) * self.block_size
            digest = blake2b(keys[-1] if keys else b"", digest_size=16)
            for token in request.token_ids[begin : begin + self.block_size]:
                digest.update(token.to_bytes(4, "little"))
            keys.append(digest.digest())
        return keys[:count]
