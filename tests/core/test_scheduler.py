import random
from collections.abc import Iterable
from dataclasses import replace

import pytest

from engine.core.kv_cache_manager import KVCacheManager
from engine.core.request import Request, RequestStatus
from engine.core.scheduler import Scheduler, SchedulerOutput
from engine.sampling_params import SamplingParams
from engine.token_tree import EMPTY_TREE, TokenTree
from tests.core.builders import make_request, prompt

ANSWER = 900_000  # tokens of answers, apart from all prompts


def make_scheduler(
    *,
    num_blocks: int = 1000,
    block_size: int = 4,
    max_num_seqs: int = 32,
    max_num_batched_tokens: int = 64,
    prefix_caching: bool = True,
) -> Scheduler:
    kv = KVCacheManager(num_blocks, block_size, prefix_caching=prefix_caching)
    return Scheduler(kv, max_num_seqs=max_num_seqs, max_num_batched_tokens=max_num_batched_tokens)


def add(scheduler: Scheduler, request_id: str, length: int, start: int) -> Request:
    request = make_request(request_id, prompt(length, start))
    scheduler.add(request)
    return request


def commit(scheduler: Scheduler, plan: SchedulerOutput) -> None:
    """A step in which every draft is refused and every chosen token is an ordinary one."""
    for item in plan.scheduled:
        scheduler.update(item, [ANSWER] if item.reaches_end else [], 0)
        scheduler.kv.publish(item.request, 0)
    scheduler.check_integrity()


def step(scheduler: Scheduler) -> SchedulerOutput:
    plan = scheduler.schedule()
    scheduler.check_integrity()
    commit(scheduler, plan)
    return plan


def draft(scheduler: Scheduler, num_nodes: int) -> None:
    """Gives every request that is being answered a chain, as far as blocks allow."""
    for request in scheduler.running:
        if request.num_uncomputed_tokens == 1:
            granted = scheduler.grant_lookahead(request, num_nodes)
            request.draft = TokenTree.chain(range(granted))


def sizes(plan: SchedulerOutput) -> list[tuple[str, int, int]]:
    return [(item.request.request_id, item.num_tokens, len(item.tree)) for item in plan.scheduled]


def ids(requests: Iterable[Request]) -> list[str]:
    return [request.request_id for request in requests]


def test_a_request_from_prompt_to_end() -> None:
    scheduler = make_scheduler()
    request = add(scheduler, "a", 10, 1)
    assert scheduler.has_work
    assert ids(scheduler.waiting) == ["a"]
    assert sizes(step(scheduler)) == [("a", 10, 0)]
    assert (ids(scheduler.running), ids(scheduler.waiting)) == (["a"], [])
    assert (request.num_tokens, request.num_computed_tokens, request.num_uncomputed_tokens) == (11, 10, 1)
    assert sizes(step(scheduler)) == [("a", 1, 0)]
    assert request.num_output_tokens == 2
    scheduler.finish(request)
    assert request.status is RequestStatus.FINISHED
    assert scheduler.schedule().scheduled == ()
    assert scheduler.kv.usage == 0.0


def test_nothing_to_do() -> None:
    assert not make_scheduler().has_work
    assert make_scheduler().schedule() == SchedulerOutput((), (), 0, 0)


def test_a_long_prompt_is_read_in_chunks() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=16, max_num_seqs=4)
    request = add(scheduler, "a", 40, 1)
    plans = [step(scheduler) for _ in range(4)]
    assert [sizes(plan) for plan in plans] == [[("a", 16, 0)], [("a", 16, 0)], [("a", 8, 0)], [("a", 1, 0)]]
    assert [plan.scheduled[0].reaches_end for plan in plans] == [False, False, True, True]
    assert request.num_output_tokens == 2


def test_first_come_first_served() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=16, max_num_seqs=2)
    requests = [add(scheduler, name, 6, 100 * index) for index, name in enumerate("abc")]
    assert sizes(step(scheduler)) == [("a", 6, 0), ("b", 6, 0)]
    assert sizes(step(scheduler)) == [("a", 1, 0), ("b", 1, 0)]
    assert ids(scheduler.waiting) == ["c"]
    scheduler.finish(requests[0])
    assert sizes(step(scheduler)) == [("b", 1, 0), ("c", 6, 0)]


def test_a_small_request_does_not_overtake_one_that_has_no_room_yet() -> None:
    scheduler = make_scheduler(num_blocks=8, block_size=4)
    add(scheduler, "a", 12, 1)
    step(scheduler)
    add(scheduler, "large", 28, 100)
    add(scheduler, "small", 2, 200)
    assert sizes(step(scheduler)) == [("a", 1, 0)]
    assert ids(scheduler.waiting) == ["large", "small"]


def test_the_last_prompt_chunk_shares_its_step_with_the_next_prompt() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=16, max_num_seqs=4)
    add(scheduler, "a", 20, 1)
    add(scheduler, "b", 20, 100)
    assert sizes(step(scheduler)) == [("a", 16, 0)]
    assert sizes(step(scheduler)) == [("a", 4, 0), ("b", 12, 0)]
    assert sizes(step(scheduler)) == [("a", 1, 0), ("b", 8, 0)]


def test_drafts_and_long_prompts_within_the_token_budget() -> None:
    """Eight requests with four draft nodes each are 40 tokens; a prompt of 200 arrives in their midst."""
    scheduler = make_scheduler(max_num_batched_tokens=64)
    short = [add(scheduler, f"short{index}", 5, 100 * index) for index in range(8)]
    for number in range(30):
        if number == 6:
            add(scheduler, "long", 200, 10_000)
        draft(scheduler, 4)
        running = [request for request in scheduler.running if request.num_output_tokens]
        plan = step(scheduler)
        assert sum(item.num_tokens + len(item.tree) for item in plan.scheduled) <= 64
        served = {item.request.request_id for item in plan.scheduled if item.reaches_end}
        assert {request.request_id for request in running} <= served
        assert not plan.preempted
    assert [request.num_output_tokens for request in short] == [30] * 8
    assert scheduler.running[-1].num_output_tokens == 30 - 6 - 6  # a chunk of 28 tokens, then of 29


def test_a_prompt_being_read_keeps_half_of_what_is_left_from_the_drafts() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=40, max_num_seqs=8)
    for index in range(4):
        add(scheduler, f"short{index}", 5, 100 * index)
    step(scheduler)
    draft(scheduler, 9)
    assert [nodes for _, _, nodes in sizes(step(scheduler))] == [9, 9, 9, 9]
    add(scheduler, "long", 200, 10_000)
    draft(scheduler, 9)
    plan = step(scheduler)  # 40 - 4 running: 18 draft nodes, in the order of arrival
    assert sizes(plan) == [
        ("short0", 1, 9),
        ("short1", 1, 9),
        ("short2", 1, 0),
        ("short3", 1, 0),
        ("long", 18, 0),
    ]
    draft(scheduler, 9)
    assert sizes(step(scheduler)) == [
        ("short0", 1, 9),
        ("short1", 1, 8),
        ("short2", 1, 0),
        ("short3", 1, 0),
        ("long", 19, 0),
    ]


def test_whoever_has_much_to_read_leaves_every_younger_request_a_token() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=8, max_num_seqs=4)
    for index in range(4):
        add(scheduler, f"r{index}", 2, 100 * index)
    step(scheduler)
    scheduler.running[1].token_ids.extend(prompt(20))
    assert sizes(step(scheduler)) == [("r0", 1, 0), ("r1", 5, 0), ("r2", 1, 0), ("r3", 1, 0)]


def test_drafts_are_trimmed_to_the_budget_and_cost_nobody_a_token() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=10, max_num_seqs=4)
    for index in range(4):
        add(scheduler, f"r{index}", 2, 100 * index)
    step(scheduler)
    draft(scheduler, 4)
    trees = [request.draft for request in scheduler.running]
    plan = scheduler.schedule()
    assert sizes(plan) == [("r0", 1, 4), ("r1", 1, 2), ("r2", 1, 0), ("r3", 1, 0)]
    assert [item.tree for item in plan.scheduled] == [
        tree.truncated(count) for tree, count in zip(trees, (4, 2, 0, 0), strict=True)
    ]


def test_no_room_for_drafts_at_all() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=4, max_num_seqs=4)
    for index in range(4):
        add(scheduler, f"r{index}", 1, 100 * index)
    step(scheduler)
    draft(scheduler, 4)
    assert sizes(step(scheduler)) == [(f"r{index}", 1, 0) for index in range(4)]


def test_an_accepted_path_counts_as_computed_and_the_token_behind_it_does_not() -> None:
    scheduler = make_scheduler()
    request = add(scheduler, "a", 6, 1)
    step(scheduler)
    assert scheduler.grant_lookahead(request, 3) == 3
    request.draft = TokenTree((21, 22, 23), (0, 0, 2))
    [item] = scheduler.schedule().scheduled
    assert item.tree == TokenTree((21, 22, 23), (0, 0, 2))
    scheduler.update(item, [22, 23, 50], 2)
    assert request.token_ids == [*prompt(6), ANSWER, 22, 23, 50]
    assert request.num_computed_tokens == 9
    assert request.num_uncomputed_tokens == 1
    assert request.draft == EMPTY_TREE
    scheduler.check_integrity()


def test_a_run_cut_by_a_stop_ends_with_a_computed_token() -> None:
    scheduler = make_scheduler()
    request = add(scheduler, "a", 6, 1)
    step(scheduler)
    draft(scheduler, 4)
    [item] = scheduler.schedule().scheduled
    scheduler.update(item, [0, 1], 2)  # the second of four accepted draft tokens stops
    assert request.num_tokens == request.num_computed_tokens == 9
    scheduler.kv.publish(request, 0)
    scheduler.finish(request)
    assert scheduler.kv.pool.num_free == scheduler.kv.pool.num_blocks
    scheduler.check_integrity()


def test_the_youngest_makes_room_and_comes_back_first() -> None:
    scheduler = make_scheduler(num_blocks=6, block_size=4, prefix_caching=False)
    requests = [add(scheduler, name, 7, 100 * index) for index, name in enumerate("abc")]
    step(scheduler)
    waiting = add(scheduler, "d", 2, 900)
    step(scheduler)
    plan = scheduler.schedule()  # all blocks are full: a needs a third
    assert ids(plan.preempted) == ["c"]
    assert sizes(plan) == [("a", 1, 0), ("b", 1, 0)]
    assert ids(scheduler.waiting) == ["c", "d"]
    c = requests[2]
    assert (c.status, c.num_computed_tokens, c.num_output_tokens) == (RequestStatus.WAITING, 0, 2)
    commit(scheduler, plan)
    assert sizes(step(scheduler)) == [("a", 1, 0), ("b", 1, 0)]  # no room for c, and d does not overtake
    scheduler.finish(requests[0])
    assert sizes(step(scheduler)) == [("b", 1, 0), ("c", 9, 0)]
    assert c.num_output_tokens == 3
    assert waiting.status is RequestStatus.WAITING


def test_several_preempted_in_one_step_keep_their_order() -> None:
    scheduler = make_scheduler(num_blocks=4, block_size=4, prefix_caching=False)
    for index, (name, length) in enumerate([("a", 7), ("b", 3), ("c", 3)]):
        add(scheduler, name, length, 100 * index)
    step(scheduler)
    step(scheduler)
    assert scheduler.kv.pool.num_free == 0
    scheduler.running[0].token_ids.extend(range(1, 8))
    plan = scheduler.schedule()
    assert ids(plan.preempted) == ["c", "b"]
    assert ids(scheduler.waiting) == ["b", "c"]
    assert sizes(plan) == [("a", 8, 0)]
    scheduler.check_integrity()


def test_who_needs_room_and_is_the_youngest_gives_way_itself() -> None:
    scheduler = make_scheduler(num_blocks=4, block_size=4, prefix_caching=False)
    add(scheduler, "a", 5, 1)
    add(scheduler, "b", 7, 100)
    step(scheduler)
    step(scheduler)
    plan = scheduler.schedule()
    assert ids(plan.preempted) == ["b"]
    assert sizes(plan) == [("a", 1, 0)]


def test_nobody_is_admitted_in_a_step_that_preempts() -> None:
    scheduler = make_scheduler(num_blocks=6, block_size=4, prefix_caching=False)
    add(scheduler, "a", 7, 1)
    add(scheduler, "b", 15, 100)
    step(scheduler)
    step(scheduler)
    add(scheduler, "tiny", 1, 200)
    plan = scheduler.schedule()  # b leaves four blocks behind, of which a takes one
    assert ids(plan.preempted) == ["b"]
    assert scheduler.kv.pool.num_free == 3
    assert sizes(plan) == [("a", 1, 0)]
    assert ids(scheduler.waiting) == ["b", "tiny"]


def test_a_preempted_draft_is_forgotten() -> None:
    scheduler = make_scheduler(num_blocks=4, block_size=4, prefix_caching=False)
    add(scheduler, "a", 6, 1)
    victim = add(scheduler, "b", 3, 100)
    step(scheduler)
    draft(scheduler, 1)
    victim.draft = TokenTree.chain([5])
    scheduler.running[0].token_ids.extend(range(1, 9))
    plan = scheduler.schedule()
    assert ids(plan.preempted) == ["b"]
    assert victim.draft == EMPTY_TREE


def test_a_preempted_request_resumes_from_the_prefix_cache() -> None:
    scheduler = make_scheduler(num_blocks=7, block_size=4)
    requests = [add(scheduler, name, 7, 100 * index) for index, name in enumerate("abc")]
    step(scheduler)
    step(scheduler)
    assert ids(step(scheduler).preempted) == ["c"]  # a takes the seventh block, b the tail of c
    scheduler.finish(requests[1])
    plan = scheduler.schedule()
    assert sizes(plan) == [("a", 1, 0), ("c", 5, 0)]  # 9 tokens, the first block found again
    assert (plan.prefix_cache_queries, plan.prefix_cache_hits) == (9, 4)
    assert requests[2].num_cached_tokens == 4


def test_a_draft_that_has_no_blocks_is_dropped_before_anyone_is_preempted() -> None:
    scheduler = make_scheduler(num_blocks=2, block_size=4, prefix_caching=False)
    request = add(scheduler, "a", 3, 1)
    add(scheduler, "b", 3, 100)
    step(scheduler)
    request.draft = TokenTree.chain([1, 2, 3])
    plan = scheduler.schedule()
    assert sizes(plan) == [("a", 1, 0), ("b", 1, 0)]
    assert not plan.preempted


def test_admission_waits_for_room_for_the_whole_prompt() -> None:
    scheduler = make_scheduler(num_blocks=8, block_size=4, max_num_batched_tokens=16, max_num_seqs=4)
    first = add(scheduler, "a", 4, 1)
    step(scheduler)
    add(scheduler, "b", 28, 100)
    assert sizes(step(scheduler)) == [("a", 1, 0)]  # 16 of b's tokens would fit, 28 would not
    scheduler.finish(first)
    assert sizes(step(scheduler)) == [("b", 16, 0)]


def test_blocks_shared_with_a_running_request_need_no_room() -> None:
    scheduler = make_scheduler(num_blocks=12, block_size=4)
    tokens = prompt(33)
    for name in "abc":
        scheduler.add(make_request(name, tokens))
        step(scheduler)
    # a holds 9 of 12 blocks; b and c share 8 of them and need one each.
    assert ids(scheduler.running) == ["a", "b", "c"]
    assert scheduler.kv.pool.num_free == 1


def test_cached_blocks_that_nobody_holds_need_room() -> None:
    scheduler = make_scheduler(num_blocks=11, block_size=4, max_num_batched_tokens=4, max_num_seqs=2)
    first = add(scheduler, "a", 16, 1)
    for _ in range(4):
        step(scheduler)
    scheduler.finish(first)
    add(scheduler, "b", 20, 1000)
    for _ in range(6):
        step(scheduler)
    # Five blocks are free. The next request needs six, and finds four of the free ones in the cache.
    scheduler.add(make_request("c", prompt(24)))
    assert scheduler.kv.match_prefix(scheduler.waiting[0]).num_tokens == 16
    assert sizes(step(scheduler)) == [("b", 1, 0)]
    assert scheduler.kv.pool.num_free == 5


def test_hits_are_counted_at_admission() -> None:
    scheduler = make_scheduler()
    add(scheduler, "a", 10, 1)
    plan = step(scheduler)
    assert (plan.prefix_cache_queries, plan.prefix_cache_hits) == (10, 0)
    second = add(scheduler, "b", 9, 1)
    plan = scheduler.schedule()
    assert (plan.prefix_cache_queries, plan.prefix_cache_hits) == (9, 8)
    assert sizes(plan) == [("a", 1, 0), ("b", 1, 0)]
    assert (second.num_cached_tokens, second.num_computed_tokens, second.num_draft_cached_tokens) == (8, 8, 0)


def test_the_speculators_share_of_a_hit() -> None:
    scheduler = make_scheduler()
    first = add(scheduler, "a", 12, 1)
    step(scheduler)
    scheduler.kv.publish(first, 5)
    second = add(scheduler, "b", 12, 1)
    scheduler.schedule()
    assert (second.num_cached_tokens, second.num_draft_cached_tokens) == (8, 4)


def test_a_request_that_wants_prompt_logprobs_reads_its_whole_prompt() -> None:
    scheduler = make_scheduler()
    add(scheduler, "a", 10, 1)
    step(scheduler)
    scheduler.add(make_request("b", prompt(10), params=SamplingParams(prompt_logprobs=1)))
    plan = scheduler.schedule()
    assert sizes(plan) == [("a", 1, 0), ("b", 10, 0)]
    assert plan.prefix_cache_hits == 0


@pytest.mark.parametrize("where", ["waiting", "reading", "answering", "drafting", "preempted"])
def test_an_abort_leaves_nothing(where: str) -> None:
    scheduler = make_scheduler(num_blocks=9, block_size=4, max_num_batched_tokens=8, max_num_seqs=4)
    other = add(scheduler, "other", 3, 500)
    request = add(scheduler, "a", 11, 1)
    if where != "waiting":
        step(scheduler)
    if where in ("answering", "drafting", "preempted"):
        step(scheduler)
    if where == "drafting":
        draft(scheduler, 3)
        assert len(request.draft)
    if where == "preempted":
        other.token_ids.extend(range(1, 31))
        while request.status is RequestStatus.RUNNING:
            step(scheduler)
    expected = RequestStatus.WAITING if where in ("waiting", "preempted") else RequestStatus.RUNNING
    assert request.status is expected
    scheduler.finish(request)
    scheduler.check_integrity()
    assert request.status is RequestStatus.FINISHED
    assert request not in scheduler.running
    assert request not in scheduler.waiting
    scheduler.finish(other)
    scheduler.check_integrity()
    assert not scheduler.has_work
    assert scheduler.kv.pool.num_free == 9


def test_an_abort_lets_the_next_one_in() -> None:
    scheduler = make_scheduler(max_num_seqs=1)
    first = add(scheduler, "a", 3, 1)
    add(scheduler, "b", 3, 100)
    add(scheduler, "c", 3, 200)
    step(scheduler)
    scheduler.finish(scheduler.waiting[0])
    scheduler.finish(first)
    assert sizes(step(scheduler)) == [("c", 3, 0)]


def test_lookahead_leaves_every_running_request_a_block() -> None:
    scheduler = make_scheduler(num_blocks=6, block_size=4, prefix_caching=False)
    requests = [add(scheduler, name, 3, 100 * index) for index, name in enumerate("abc")]
    step(scheduler)
    assert scheduler.kv.pool.num_free == 3
    for (
        request
    ) in requests:  # 4 tokens fill a block; a draft would need another, and all three are spoken for
        assert scheduler.grant_lookahead(request, 4) == 0
    assert scheduler.kv.pool.num_free == 3
    scheduler.finish(requests[2])
    assert scheduler.kv.pool.num_free == 4
    assert scheduler.grant_lookahead(requests[0], 4) == 4
    assert scheduler.grant_lookahead(requests[0], 9) == 4  # more would take one of the last two
    assert scheduler.kv.pool.num_free == 3
    assert scheduler.grant_lookahead(requests[1], 3) == 3
    assert scheduler.kv.pool.num_free == 2
    assert not step(scheduler).preempted


def test_lookahead_uses_the_slots_a_request_has_anyway() -> None:
    scheduler = make_scheduler(num_blocks=1, block_size=8, prefix_caching=False)
    request = add(scheduler, "a", 4, 1)
    step(scheduler)
    assert scheduler.grant_lookahead(request, 2) == 2
    assert scheduler.grant_lookahead(request, 5) == 3
    assert scheduler.grant_lookahead(request, 0) == 0
    assert scheduler.kv.pool.num_free == 0


@pytest.mark.parametrize("seed", range(10))
def test_all_that_fit_alone_finish(seed: int) -> None:
    """Every request may need the whole pool, and all arrive at once."""
    rng = random.Random(seed)
    scheduler = make_scheduler(num_blocks=8, block_size=4, max_num_batched_tokens=8, max_num_seqs=6)
    ends: dict[str, int] = {}
    for index in range(8):
        length = rng.randrange(1, 31)
        request = add(scheduler, f"r{index}", length, 100 * index)
        ends[request.request_id] = rng.randrange(length + 1, 33)
    num_steps = num_preempted = 0
    finished: list[str] = []
    while scheduler.has_work:
        oldest = scheduler.running[0] if scheduler.running else None
        progress = oldest.num_computed_tokens if oldest else 0
        plan = step(scheduler)
        num_steps += 1
        num_preempted += len(plan.preempted)
        if oldest:
            assert plan.scheduled[0].request is oldest
            assert oldest.num_computed_tokens > progress
        for item in plan.scheduled:
            if item.request.num_tokens >= ends[item.request.request_id]:
                scheduler.finish(item.request)
                finished.append(item.request.request_id)
        assert num_steps <= sum(ends.values())
    assert sorted(finished) == sorted(ends)
    assert scheduler.kv.pool.num_free == 8
    assert num_preempted > 0


def test_integrity_check_finds_books_that_disagree() -> None:
    def running() -> tuple[Scheduler, Request]:
        scheduler = make_scheduler()
        request = add(scheduler, "culprit", 10, 1)
        step(scheduler)
        return scheduler, request

    scheduler, request = running()
    request.status = RequestStatus.WAITING
    with pytest.raises(AssertionError, match="culprit"):
        scheduler.check_integrity()
    for num_computed in (-1, 11, 12):
        scheduler, request = running()
        request.num_computed_tokens = num_computed
        with pytest.raises(AssertionError, match="culprit"):
            scheduler.check_integrity()
    scheduler, request = running()
    request.token_ids.extend(prompt(10))
    request.num_computed_tokens = 15  # three blocks hold 12
    with pytest.raises(AssertionError, match="culprit"):
        scheduler.check_integrity()
    scheduler = make_scheduler()
    add(scheduler, "culprit", 10, 1).num_computed_tokens = 4
    with pytest.raises(AssertionError, match="culprit"):
        scheduler.check_integrity()
    scheduler.waiting[0].num_computed_tokens = 0
    scheduler.waiting[0].status = RequestStatus.RUNNING
    with pytest.raises(AssertionError, match="culprit"):
        scheduler.check_integrity()


def test_lower_priorities_leave_the_queue_first_and_equal_ones_in_their_order() -> None:
    scheduler = make_scheduler(max_num_seqs=1)
    runs = add(scheduler, "runs", 4, 0)
    step(scheduler)
    for place, (name, priority) in enumerate([("a", 0), ("b", 5), ("c", -1), ("d", 0), ("e", -1)]):
        request = make_request(name, prompt(4, 10 * place + 10))
        request.params = replace(request.params, priority=priority)
        scheduler.add(request)
    assert ids(scheduler.waiting) == ["c", "e", "a", "d", "b"]
    assert ids(scheduler.running) == ["runs"], "what runs is not interrupted"
    scheduler.finish(runs)
    assert sizes(step(scheduler)) == [("c", 4, 0)]


def test_prompt_rows_of_who_runs_are_certain_and_those_of_newcomers_are_not() -> None:
    """Of a newcomer's prompt the prefix cache may have a part."""
    scheduler = make_scheduler(max_num_batched_tokens=16)
    add(scheduler, "a", 40, 0)
    assert scheduler.num_prompt_rows() == (0, 16)
    step(scheduler)
    assert scheduler.num_prompt_rows() == (15, 15)
    step(scheduler)
    step(scheduler)
    assert scheduler.num_prompt_rows() == (0, 0)
    add(scheduler, "b", 5, 100)
    assert scheduler.num_prompt_rows() == (0, 5)


def test_who_was_refused_for_want_of_blocks_is_not_expected_to_be_read_next() -> None:
    """Or a full pool would look like prompts that are read in every step."""
    scheduler = make_scheduler(num_blocks=6)
    add(scheduler, "a", 16, 0)
    add(scheduler, "b", 16, 100)
    assert scheduler.num_prompt_rows()[1] > 0
    step(scheduler)
    assert [request.request_id for request in scheduler.waiting] == ["b"]
    assert scheduler.num_prompt_rows() == (0, 0)
    scheduler.finish(scheduler.running[0])
    step(scheduler)
    assert not scheduler.waiting
