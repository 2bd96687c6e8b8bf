import pytest

from engine.core.kv_cache_manager import KVCacheManager, PrefixMatch
from engine.core.request import Request
from engine.sampling_params import SamplingParams
from tests.core.builders import make_request, prompt

NO_MATCH = PrefixMatch((), 0, 0)


def admit(kv: KVCacheManager, request: Request) -> PrefixMatch:
    match = kv.match_prefix(request)
    assert kv.admit(request, match, request.num_tokens)
    return match


def compute(kv: KVCacheManager, request: Request, num_draft_computed: int = 0) -> None:
    """Admits a request and publishes its prompt as computed."""
    admit(kv, request)
    request.num_computed_tokens = request.num_tokens
    kv.publish(request, num_draft_computed)


def test_slots_follow_the_block_table() -> None:
    kv = KVCacheManager(4, 4)
    first, second = make_request("a", prompt(3)), make_request("b", prompt(6, 100))
    admit(kv, first)
    admit(kv, second)
    assert kv.extend(first, 8)
    blocks = kv.block_table(first)
    assert len(blocks) == 2
    assert kv.num_slots(first) == 8
    assert [kv.slot(first, index) for index in range(8)] == [
        block * 4 + offset for block in blocks for offset in range(4)
    ]
    assert not set(blocks) & set(kv.block_table(second))
    assert kv.usage == 1.0


@pytest.mark.parametrize(("num_slots", "blocks"), [(0, 0), (1, 1), (16, 1), (17, 2), (32, 2), (33, 3)])
def test_blocks_for(num_slots: int, blocks: int) -> None:
    assert KVCacheManager(4, 16).blocks_for(num_slots) == blocks


@pytest.mark.parametrize(
    ("num_shared", "num_tokens", "matched"),
    [(3, 12, 0), (4, 12, 4), (7, 12, 4), (8, 12, 8), (11, 12, 8), (12, 13, 12)],
)
def test_only_full_blocks_are_shared(num_shared: int, num_tokens: int, matched: int) -> None:
    kv = KVCacheManager(16, 4)
    owner = make_request("a", prompt(12))
    compute(kv, owner)
    other = make_request("b", prompt(num_shared) + prompt(num_tokens - num_shared, 500))
    match = admit(kv, other)
    assert match.num_tokens == matched
    assert match.blocks == tuple(kv.block_table(owner)[: matched // 4])
    assert list(kv.block_table(other)[: matched // 4]) == list(match.blocks)
    assert not set(kv.block_table(other)[matched // 4 :]) & set(kv.block_table(owner))
    kv.check_integrity()


@pytest.mark.parametrize(("num_tokens", "matched"), [(4, 0), (5, 4), (8, 4), (9, 8), (12, 8), (13, 12)])
def test_a_token_is_left_to_compute(num_tokens: int, matched: int) -> None:
    kv = KVCacheManager(16, 4)
    compute(kv, make_request("a", prompt(16)))
    match = kv.match_prefix(make_request("b", prompt(num_tokens)))
    assert match.num_tokens == matched < num_tokens


def test_a_partly_filled_block_is_not_shared_before_it_is_full() -> None:
    kv = KVCacheManager(16, 4)
    owner = make_request("a", prompt(6))
    compute(kv, owner)
    assert kv.match_prefix(make_request("b", prompt(20))).num_tokens == 4
    owner.token_ids.extend([7, 8])
    kv.publish(owner, 0)
    assert kv.match_prefix(make_request("b", prompt(20))).num_tokens == 4  # 7 and 8 are not computed
    owner.num_computed_tokens = 8
    kv.publish(owner, 0)
    assert kv.match_prefix(make_request("b", prompt(20))).num_tokens == 8


def test_computed_drafts_beyond_the_committed_tokens_are_not_shared() -> None:
    kv = KVCacheManager(16, 4)
    owner = make_request("a", prompt(7))
    admit(kv, owner)
    assert kv.extend(owner, 12)
    owner.num_computed_tokens = 12
    kv.publish(owner, 12)
    match = kv.match_prefix(make_request("b", prompt(20)))
    assert (match.num_tokens, match.num_draft_tokens) == (4, 4)
    owner.token_ids.append(8)
    kv.publish(owner, 12)
    match = kv.match_prefix(make_request("b", prompt(20)))
    assert (match.num_tokens, match.num_draft_tokens) == (8, 8)


@pytest.mark.parametrize("place", [0, 1, 3, 4, 7])
def test_a_key_depends_on_all_tokens_before(place: int) -> None:
    kv = KVCacheManager(16, 4)
    compute(kv, make_request("a", prompt(12)))
    tokens = prompt(13)
    tokens[place] = 999
    assert kv.match_prefix(make_request("b", tokens)).num_tokens == place // 4 * 4
    # The same tokens at another place are another content.
    assert kv.match_prefix(make_request("c", [*prompt(4, 5), 0])).num_tokens == 0


def test_keys_tell_large_token_ids_apart() -> None:
    kv = KVCacheManager(16, 4)
    compute(kv, make_request("a", [256, 0, 0, 0]))
    assert kv.match_prefix(make_request("b", [0, 1, 0, 0, 9])).num_tokens == 0
    assert kv.match_prefix(make_request("c", [256, 0, 0, 65536, 9])).num_tokens == 0
    assert kv.match_prefix(make_request("d", [256, 0, 0, 0, 9])).num_tokens == 4


def test_a_missing_block_ends_the_match() -> None:
    kv = KVCacheManager(4, 4)
    owner = make_request("a", prompt(12))
    compute(kv, owner)
    kv.free(owner)
    other = make_request("b", prompt(8, 300))  # takes the free block and the tail of the cached content
    admit(kv, other)
    assert kv.match_prefix(make_request("c", prompt(13))).num_tokens == 8
    kv.check_integrity()


def test_content_survives_its_request_and_is_found_again() -> None:
    kv = KVCacheManager(8, 4)
    owner = make_request("a", prompt(10))
    compute(kv, owner, 10)
    blocks = tuple(kv.block_table(owner)[:2])
    kv.free(owner)
    assert kv.pool.num_free == 8
    match = admit(kv, make_request("b", prompt(10)))
    assert match == PrefixMatch(blocks, 8, 8)
    assert kv.pool.num_free == 5
    kv.check_integrity()


@pytest.mark.parametrize(
    ("num_draft", "matched"), [(0, 0), (3, 0), (4, 4), (7, 4), (8, 8), (12, 12), (99, 12)]
)
def test_draft_marks_bound_what_the_speculator_has(num_draft: int, matched: int) -> None:
    kv = KVCacheManager(16, 4)
    compute(kv, make_request("a", prompt(12)), num_draft)
    match = kv.match_prefix(make_request("b", prompt(13)))
    assert (match.num_tokens, match.num_draft_tokens) == (12, matched)


def test_the_speculator_catches_up_later() -> None:
    kv = KVCacheManager(16, 4)
    owner = make_request("a", prompt(12))
    compute(kv, owner)
    for num_draft, matched in [(5, 4), (5, 4), (12, 12)]:
        kv.publish(owner, num_draft)
        assert kv.match_prefix(make_request("b", prompt(13))).num_draft_tokens == matched


def test_draft_marks_count_from_the_beginning_without_a_gap() -> None:
    kv = KVCacheManager(16, 4)
    owner = make_request("a", prompt(12))
    compute(kv, owner)
    kv.pool.mark_in_draft_cache(kv.block_table(owner)[1])
    assert kv.match_prefix(make_request("b", prompt(13))) == PrefixMatch(tuple(kv.block_table(owner)), 12, 0)
    kv.pool.mark_in_draft_cache(kv.block_table(owner)[0])
    assert kv.match_prefix(make_request("b", prompt(13))).num_draft_tokens == 8


def test_another_holder_may_complete_the_draft_marks() -> None:
    kv = KVCacheManager(16, 4)
    compute(kv, make_request("a", prompt(8)))
    other = make_request("b", prompt(9))
    assert admit(kv, other).num_draft_tokens == 0
    other.num_computed_tokens = 8
    kv.publish(other, 8)
    assert kv.match_prefix(make_request("c", prompt(9))).num_draft_tokens == 8
    kv.check_integrity()


def test_a_request_that_needs_every_row_takes_nothing_from_the_cache() -> None:
    kv = KVCacheManager(16, 4)
    compute(kv, make_request("a", prompt(12)))
    wants = make_request("b", prompt(13), params=SamplingParams(prompt_logprobs=0))
    assert admit(kv, wants) == NO_MATCH
    kv.free(wants)
    assert kv.match_prefix(make_request("c", prompt(13))).num_tokens == 12


def test_a_request_that_needs_every_row_leaves_its_own_for_others() -> None:
    kv = KVCacheManager(16, 4)
    compute(kv, make_request("a", prompt(12), params=SamplingParams(prompt_logprobs=0)))
    assert kv.match_prefix(make_request("b", prompt(13))).num_tokens == 12


def test_without_prefix_caching_nothing_is_shared() -> None:
    kv = KVCacheManager(16, 4, prefix_caching=False)
    compute(kv, make_request("a", prompt(12)), 12)
    assert admit(kv, make_request("b", prompt(13))) == NO_MATCH
    kv.check_integrity()


def test_equal_prompts_computed_side_by_side_are_kept_apart() -> None:
    kv = KVCacheManager(16, 4)
    twins = [make_request(name, prompt(9)) for name in "ab"]
    for twin in twins:
        admit(kv, twin)
    for twin in twins:
        twin.num_computed_tokens = 8
        kv.publish(twin, 8)
    assert not set(kv.block_table(twins[0])) & set(kv.block_table(twins[1]))
    assert kv.match_prefix(make_request("c", prompt(9))).blocks == tuple(kv.block_table(twins[0])[:2])
    kv.check_integrity()


def test_free_returns_everything() -> None:
    kv = KVCacheManager(8, 4)
    owner = make_request("a", prompt(9))
    compute(kv, owner)
    sharer = make_request("b", prompt(9))
    admit(kv, sharer)
    assert kv.pool.num_free == 4
    kv.free(owner)
    assert kv.pool.num_free == 5  # two blocks are still shared
    kv.free(sharer)
    assert (kv.pool.num_free, kv.usage) == (8, 0.0)
    kv.free(sharer)  # no table, no error
    assert kv.pool.num_free == 8
    kv.check_integrity()


def test_an_admission_takes_new_blocks_and_those_that_nobody_holds() -> None:
    kv = KVCacheManager(8, 4)
    long, short = make_request("a", prompt(8)), make_request("b", prompt(4))
    compute(kv, long)
    compute(kv, short)
    kv.free(long)
    kv.free(short)
    assert kv.num_taken(NO_MATCH, 9) == 3
    other = make_request("c", prompt(9))
    match = kv.match_prefix(other)
    assert (match.num_tokens, kv.num_taken(match, 9)) == (8, 3)
    holder = make_request("d", prompt(5))
    admit(kv, holder)  # holds the first of the two
    assert kv.num_taken(match, 9) == 2
    free = kv.pool.num_free
    assert kv.admit(other, match, 9)
    assert free - kv.pool.num_free == 2


def test_admission_fails_without_a_trace() -> None:
    kv = KVCacheManager(4, 4)
    owner = make_request("a", prompt(8))
    compute(kv, owner)
    large = make_request("b", prompt(20))
    match = kv.match_prefix(large)
    assert match.num_tokens == 8
    assert not kv.admit(large, match, 20)
    kv.check_integrity()
    assert kv.pool.num_free == 2
    assert kv.admit(large, match, 16)
    kv.check_integrity()


def test_admission_that_fails_leaves_free_content_in_the_cache() -> None:
    kv = KVCacheManager(4, 4)
    owner = make_request("a", prompt(8))
    compute(kv, owner)
    kv.free(owner)
    large = make_request("b", prompt(20))
    match = kv.match_prefix(large)
    assert not kv.admit(large, match, 20)
    kv.check_integrity()
    assert kv.match_prefix(large) == match


def test_one_table_per_request() -> None:
    kv = KVCacheManager(8, 4)
    request = make_request("a", prompt(4))
    admit(kv, request)
    with pytest.raises(ValueError, match="request a has a block table already"):
        kv.admit(request, NO_MATCH, 4)
    kv.check_integrity()
    assert kv.pool.num_free == 7


def test_extend_grows_or_changes_nothing() -> None:
    kv = KVCacheManager(4, 4)
    request = make_request("a", prompt(4))
    admit(kv, request)
    before = list(kv.block_table(request))
    assert kv.extend(request, 2)
    assert kv.extend(request, 4)
    assert list(kv.block_table(request)) == before
    assert not kv.extend(request, 17)
    assert list(kv.block_table(request)) == before
    assert kv.pool.num_free == 3
    assert kv.extend(request, 9)
    assert list(kv.block_table(request))[:1] == before
    assert kv.num_slots(request) == 12
    kv.check_integrity()


def test_extend_leaves_blocks_free() -> None:
    kv = KVCacheManager(4, 4)
    request = make_request("a", prompt(4))
    admit(kv, request)
    assert not kv.extend(request, 8, leave_free=3)
    assert kv.extend(request, 4, leave_free=99)  # nothing is taken
    assert kv.pool.num_free == 3
    assert kv.extend(request, 8, leave_free=2)
    assert not kv.extend(request, 12, leave_free=2)
    assert kv.pool.num_free == 2


def following(name: str, length: int) -> Request:
    """A request whose speculator cannot make up for positions that are skipped."""
    request = make_request(name, prompt(length))
    request.needs_draft_cache = True
    return request


def test_who_needs_the_draft_cache_gets_what_is_in_it() -> None:
    kv = KVCacheManager(16, 4)
    owner = make_request("a", prompt(12))
    compute(kv, owner)
    kv.publish(owner, 8)
    table = tuple(kv.block_table(owner))
    assert kv.match_prefix(make_request("b", prompt(13))) == PrefixMatch(table, 12, 8)
    assert kv.match_prefix(following("c", 13)) == PrefixMatch(table[:2], 8, 8)


def test_blocks_without_a_mark_do_not_stand_in_the_way_of_marked_ones() -> None:
    kv = KVCacheManager(16, 4)
    compute(kv, make_request("a", prompt(12)))
    other = following("b", 12)
    assert admit(kv, other) == PrefixMatch((), 0, 0)
    other.num_computed_tokens = 12
    kv.publish(other, 12)
    table = tuple(kv.block_table(other))
    assert kv.match_prefix(following("c", 13)) == PrefixMatch(table, 12, 12)
    assert kv.match_prefix(make_request("d", prompt(13))) == PrefixMatch(table, 12, 12)
    kv.check_integrity()
