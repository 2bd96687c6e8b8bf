from collections.abc import Callable

import pytest

from engine.core.block_pool import BlockPool


def take(pool: BlockPool, count: int) -> list[int]:
    blocks = pool.allocate(count)
    assert blocks is not None
    return blocks


def publish(pool: BlockPool, blocks: list[int], prefix: str = "") -> list[bytes]:
    keys = [f"{prefix}{block}".encode() for block in blocks]
    for block, key in zip(blocks, keys, strict=True):
        pool.publish(block, key)
    return keys


def test_all_blocks_or_none() -> None:
    pool = BlockPool(3)
    assert pool.allocate(4) is None
    assert pool.num_free == 3
    assert sorted(take(pool, 3)) == [0, 1, 2]
    assert pool.num_free == 0
    assert pool.allocate(1) is None
    assert pool.allocate(0) == []


def test_a_block_is_free_when_its_last_holder_lets_go() -> None:
    pool = BlockPool(2)
    [block] = take(pool, 1)
    pool.hold(block)
    pool.check_integrity([[block], [block]])
    pool.release([block])
    assert pool.is_held(block)
    assert pool.num_free == 1
    pool.check_integrity([[block]])
    pool.release([block])
    assert [pool.is_held(block) for block in range(2)] == [False, False]
    assert pool.num_free == 2
    pool.check_integrity([])


def test_releasing_what_nobody_holds_fails() -> None:
    pool = BlockPool(2)
    blocks = take(pool, 1)
    pool.release(blocks)
    with pytest.raises(AssertionError, match=f"block {blocks[0]} released but not held"):
        pool.release(blocks)


def test_content_outlives_its_holder() -> None:
    pool = BlockPool(4)
    blocks = take(pool, 2)
    keys = publish(pool, blocks)
    pool.release(blocks)
    assert [pool.lookup(key) for key in keys] == blocks
    for block in blocks:
        pool.hold(block)
    pool.check_integrity([blocks])
    assert pool.num_free == 2
    assert not set(take(pool, 2)) & set(blocks)


def test_blocks_without_content_are_taken_first() -> None:
    pool = BlockPool(6)
    cached, plain = take(pool, 3), take(pool, 3)
    keys = publish(pool, cached)
    pool.release(plain)
    pool.release(cached)
    assert sorted(take(pool, 3)) == sorted(plain)
    assert [pool.lookup(key) for key in keys] == cached


def test_plain_blocks_released_later_are_still_taken_before_content() -> None:
    pool = BlockPool(4)
    cached, plain = take(pool, 2), take(pool, 2)
    publish(pool, cached)
    pool.release(cached)
    pool.release(plain)
    assert sorted(take(pool, 2)) == sorted(plain)


def test_least_recently_used_content_goes_first_and_a_tail_before_its_beginning() -> None:
    pool = BlockPool(6)
    old, new = take(pool, 3), take(pool, 3)
    publish(pool, old)
    publish(pool, new)
    pool.release(old)
    pool.release(new)
    assert [take(pool, 1)[0] for _ in range(6)] == [*reversed(old), *reversed(new)]


def test_use_makes_content_young_again() -> None:
    pool = BlockPool(4)
    first, second = take(pool, 2), take(pool, 2)
    publish(pool, first)
    publish(pool, second)
    pool.release(first)
    pool.release(second)
    for block in first:
        pool.hold(block)
    pool.release(first)
    assert [take(pool, 1)[0] for _ in range(4)] == [*reversed(second), *reversed(first)]


def test_taking_a_block_forgets_its_content_and_its_draft_mark() -> None:
    pool = BlockPool(1)
    blocks = take(pool, 1)
    [key] = publish(pool, blocks)
    pool.mark_in_draft_cache(0)
    pool.release(blocks)
    take(pool, 1)
    assert pool.lookup(key) is None
    assert not pool.is_in_draft_cache(0)
    pool.check_integrity([[0]])


def test_equal_content_is_kept_once() -> None:
    pool = BlockPool(2)
    first, second = take(pool, 2)
    pool.publish(first, b"same")
    pool.publish(second, b"same")
    assert pool.lookup(b"same") == first
    pool.check_integrity([[first], [second]])
    pool.release([second])
    assert pool.lookup(b"same") == first
    assert take(pool, 1) == [second]
    assert pool.lookup(b"same") == first


def test_publishing_again_changes_nothing() -> None:
    pool = BlockPool(1)
    take(pool, 1)
    pool.publish(0, b"key")
    pool.mark_in_draft_cache(0)
    pool.publish(0, b"key")
    assert pool.lookup(b"key") == 0
    assert pool.is_in_draft_cache(0)


def test_only_published_blocks_take_a_draft_mark() -> None:
    pool = BlockPool(2)
    take(pool, 2)
    pool.mark_in_draft_cache(0)
    assert not pool.is_in_draft_cache(0)
    pool.publish(1, b"key")
    assert not pool.is_in_draft_cache(1)
    pool.mark_in_draft_cache(1)
    assert pool.is_in_draft_cache(1)


def test_unknown_content() -> None:
    assert BlockPool(1).lookup(b"key") is None


def _lost_holder(pool: BlockPool) -> None:
    pool._blocks[0].holders -= 1


def _leaked_block(pool: BlockPool) -> None:
    pool._blocks[3].holders += 1
    del pool._free[3]


def _held_and_free(pool: BlockPool) -> None:
    pool._free[0] = None


def _neither_held_nor_free(pool: BlockPool) -> None:
    del pool._free[3]


def _key_nobody_finds(pool: BlockPool) -> None:
    pool._blocks[1].key = b"unlisted"


def _key_of_another_block(pool: BlockPool) -> None:
    pool._blocks[1].key = b"zero"


def _listed_without_key(pool: BlockPool) -> None:
    pool._cached[b"ghost"] = 1


def _stale_draft_mark(pool: BlockPool) -> None:
    pool._blocks[1].in_draft_cache = True


@pytest.mark.parametrize(
    ("corrupt", "message"),
    [
        (_lost_holder, "block 0: 0 holders noted, 1 tables contain it"),
        (_leaked_block, "block 3: 1 holders noted, 0 tables contain it"),
        (_held_and_free, "block 0: free list is wrong"),
        (_neither_held_nor_free, "block 3: free list is wrong"),
        (_key_nobody_finds, "block 1: cached under a key that leads elsewhere"),
        (_key_of_another_block, "block 1: cached under a key that leads elsewhere"),
        (_listed_without_key, "block 1: key of another content"),
        (_stale_draft_mark, "block 1: stale draft mark"),
    ],
)
def test_integrity_check_finds(corrupt: Callable[[BlockPool], None], message: str) -> None:
    pool = BlockPool(4)
    table = take(pool, 3)
    assert table == [0, 1, 2]
    pool.publish(0, b"zero")
    pool.mark_in_draft_cache(0)
    pool.check_integrity([table])
    corrupt(pool)
    with pytest.raises(AssertionError, match=message):
        pool.check_integrity([table])


def test_integrity_check_finds_a_table_that_differs() -> None:
    pool = BlockPool(4)
    table = take(pool, 2)
    with pytest.raises(AssertionError, match="holders noted"):
        pool.check_integrity([])
    with pytest.raises(AssertionError, match="holders noted"):
        pool.check_integrity([table, [3]])
    with pytest.raises(AssertionError, match="a block stands twice in one table"):
        pool.check_integrity([[table[0], table[0]]])


def test_a_block_that_will_be_marked_stands_for_one_that_is_not() -> None:
    pool = BlockPool(3)
    plain, marked, late = take(pool, 3)
    pool.publish(plain, b"same")
    pool.publish(marked, b"same")
    pool.supersede(marked, b"same")
    pool.mark_in_draft_cache(marked)
    assert pool.lookup(b"same") == marked
    assert pool.is_in_draft_cache(marked)
    assert not pool.is_in_draft_cache(plain)
    # One mark is as good as another, and content that nobody published stays unknown.
    pool.supersede(late, b"same")
    pool.supersede(late, b"other")
    assert pool.lookup(b"same") == marked
    assert pool.lookup(b"other") is None
    pool.check_integrity([[plain], [marked], [late]])
    pool.release([plain])
    assert take(pool, 1) == [plain]
    assert pool.lookup(b"same") == marked
