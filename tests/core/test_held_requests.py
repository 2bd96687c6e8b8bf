"""Prompts with an equal beginning that arrive together are read once, and nobody is worse off for it."""

from dataclasses import replace

import pytest

from engine.core.kv_cache_manager import KVCacheManager
from engine.core.request import Request, RequestStatus
from engine.core.scheduler import Scheduler
from engine.sampling_params import SamplingParams
from tests.core.builders import make_request, prompt
from tests.core.test_scheduler import commit, ids, sizes, step

SHARED = prompt(24)


def make_scheduler(
    *,
    num_blocks: int = 1000,
    max_num_seqs: int = 16,
    max_num_batched_tokens: int = 256,
    min_awaited_tokens: int = 8,
    prefix_caching: bool = True,
) -> Scheduler:
    return Scheduler(
        KVCacheManager(num_blocks, 4, prefix_caching=prefix_caching),
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        min_awaited_tokens=min_awaited_tokens,
    )


def add(scheduler: Scheduler, name: str, tokens: list[int], params: SamplingParams | None = None) -> Request:
    request = make_request(name, tokens, params=params)
    scheduler.add(request)
    return request


def held(scheduler: Scheduler) -> list[str]:
    return ids(request for request in scheduler.running if request.is_held)


def test_equal_prompts_are_read_once() -> None:
    scheduler = make_scheduler()
    requests = [add(scheduler, name, SHARED) for name in "abcd"]
    first = step(scheduler)
    assert sizes(first) == [("a", 24, 0)]
    assert (first.prefix_cache_queries, first.prefix_cache_hits) == (24, 0)
    assert (scheduler.num_running, scheduler.num_waiting) == (1, 3)
    # The last token is computed by each, since its row is needed: so is the block that it is in.
    second = step(scheduler)
    assert sizes(second) == [("a", 1, 0), ("b", 4, 0), ("c", 4, 0), ("d", 4, 0)]
    assert (second.prefix_cache_queries, second.prefix_cache_hits) == (72, 60)
    assert [request.num_cached_tokens for request in requests] == [0, 20, 20, 20]
    assert (scheduler.num_running, scheduler.num_waiting) == (4, 0)
    assert [request.num_output_tokens for request in requests] == [2, 1, 1, 1]


def test_a_common_beginning_is_read_once_and_the_rest_by_each() -> None:
    scheduler = make_scheduler()
    for index, name in enumerate("abc"):
        add(scheduler, name, [*SHARED, *prompt(10, 100 * (index + 1))])
    assert sizes(step(scheduler)) == [("a", 34, 0)]
    assert sizes(step(scheduler)) == [("a", 1, 0), ("b", 10, 0), ("c", 10, 0)]


def test_what_is_shared_by_some_of_those_that_wait() -> None:
    """b and c share more with each other than with a: c waits twice, b once."""
    scheduler = make_scheduler()
    middle = prompt(16, 100)
    add(scheduler, "a", SHARED)
    add(scheduler, "b", [*SHARED, *middle, 7])
    add(scheduler, "c", [*SHARED, *middle, 8])
    assert sizes(step(scheduler)) == [("a", 24, 0)]
    assert sizes(step(scheduler)) == [("a", 1, 0), ("b", 17, 0)]
    assert held(scheduler) == ["c"]
    assert sizes(step(scheduler)) == [("a", 1, 0), ("b", 1, 0), ("c", 1, 0)]


def start_reading_in_chunks(num_blocks: int = 1000) -> Scheduler:
    """b has begun to read what c waits for, 8 tokens a step; the first 8 are all of a."""
    scheduler = make_scheduler(max_num_batched_tokens=10, min_awaited_tokens=4, num_blocks=num_blocks)
    add(scheduler, "a", SHARED[:8])
    add(scheduler, "b", SHARED)
    add(scheduler, "c", [*SHARED, 5])
    assert sizes(step(scheduler)) == [("a", 8, 0)]
    assert held(scheduler) == ["b", "c"]
    assert sizes(step(scheduler)) == [("a", 1, 0), ("b", 8, 0)]
    assert held(scheduler) == ["c"]
    return scheduler


def test_a_prompt_read_in_several_steps_is_waited_for_to_its_end() -> None:
    scheduler = start_reading_in_chunks()
    # A token of every step is kept for the younger one, should it go on.
    assert sizes(step(scheduler)) == [("a", 1, 0), ("b", 8, 0)]
    assert sizes(step(scheduler)) == [("a", 1, 0), ("b", 1, 0), ("c", 1, 0)]
    assert [request.num_cached_tokens for request in scheduler.running] == [0, 8, 24]


def test_a_prompt_that_takes_the_whole_step_is_waited_for_in_the_queue() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=10, min_awaited_tokens=4)
    for name in "ab":
        add(scheduler, name, SHARED)
    plans = [sizes(step(scheduler)) for _ in range(4)]
    assert plans == [[("a", 10, 0)], [("a", 10, 0)], [("a", 4, 0), ("b", 4, 0)], [("a", 1, 0), ("b", 1, 0)]]


def test_little_is_not_waited_for() -> None:
    for common, is_held in ((7, False), (8, True), (11, True)):
        scheduler = make_scheduler()
        add(scheduler, "a", [*SHARED[:common], *prompt(9, 100)])
        add(scheduler, "b", [*SHARED[:common], *prompt(9, 200)])
        scheduler.schedule()
        assert held(scheduler) == (["b"] if is_held else []), common


def test_requests_that_share_nothing_pass_by() -> None:
    scheduler = make_scheduler()
    add(scheduler, "a", SHARED)
    add(scheduler, "b", SHARED)
    add(scheduler, "other", prompt(6, 500))
    assert sizes(step(scheduler)) == [("a", 24, 0), ("other", 6, 0)]
    # Who was held comes before it again, in budget and in age.
    assert sizes(step(scheduler)) == [("a", 1, 0), ("b", 4, 0), ("other", 1, 0)]
    assert ids(scheduler.running) == ["a", "b", "other"]


def test_nobody_takes_the_seat_of_a_held_request() -> None:
    scheduler = make_scheduler(max_num_seqs=2)
    for name in "ab":
        add(scheduler, name, SHARED)
    add(scheduler, "other", prompt(6, 500))
    assert sizes(step(scheduler)) == [("a", 24, 0)]
    assert sizes(step(scheduler)) == [("a", 1, 0), ("b", 4, 0)]
    assert ids(scheduler.waiting) == ["other"]


def test_nobody_takes_the_room_of_a_held_request() -> None:
    """17 blocks: a has 6, and b may need as many. A request of 6 blocks has to wait until it is known."""
    scheduler = make_scheduler(num_blocks=17)
    for name in "ab":
        add(scheduler, name, SHARED)
    add(scheduler, "other", prompt(24, 500))
    assert sizes(step(scheduler)) == [("a", 24, 0)]
    assert ids(scheduler.waiting) == ["other"]
    plan = step(scheduler)  # b shares 5 blocks: 17 - 6 - 1 - 1 are left
    assert sizes(plan) == [("a", 1, 0), ("b", 4, 0), ("other", 24, 0)]
    assert not plan.preempted


def test_a_long_prompt_behind_does_not_take_the_held_requests_budget() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=30)
    add(scheduler, "a", SHARED)
    add(scheduler, "b", [*SHARED, *prompt(20, 100)])
    add(scheduler, "long", prompt(500, 1000))
    assert sizes(step(scheduler)) == [("a", 24, 0), ("long", 6, 0)]
    assert sizes(step(scheduler)) == [("a", 1, 0), ("b", 20, 0), ("long", 9, 0)]


def test_when_the_reader_is_aborted_the_next_goes_on_where_it_stopped() -> None:
    scheduler = start_reading_in_chunks()
    add(scheduler, "d", [*SHARED, 5])
    reader = scheduler.running[1]
    assert reader.num_computed_tokens == 16
    scheduler.finish(reader)
    scheduler.check_integrity()
    plan = step(scheduler)
    assert sizes(plan) == [("a", 1, 0), ("c", 9, 0)]
    assert (plan.prefix_cache_queries, plan.prefix_cache_hits) == (25, 16)
    plan = step(scheduler)
    assert sizes(plan) == [("a", 1, 0), ("c", 1, 0), ("d", 1, 0)]
    assert plan.prefix_cache_hits == 24


def test_a_step_that_fails_ends_the_reader_and_those_that_were_held_go_on() -> None:
    scheduler = make_scheduler()
    leader = add(scheduler, "a", SHARED)
    for name in "bc":
        add(scheduler, name, SHARED)
    assert sizes(scheduler.schedule()) == [("a", 24, 0)]
    assert held(scheduler) == ["b", "c"]
    scheduler.finish(leader)  # nothing of the step was committed
    assert sizes(step(scheduler)) == [("b", 24, 0)]
    assert held(scheduler) == ["c"]
    assert sizes(step(scheduler)) == [("b", 1, 0), ("c", 4, 0)]


def test_an_aborted_one_that_is_held_leaves_nothing() -> None:
    scheduler = make_scheduler()
    leader = add(scheduler, "a", SHARED)
    follower = add(scheduler, "b", SHARED)
    step(scheduler)
    scheduler.finish(follower)
    scheduler.check_integrity()
    assert sizes(step(scheduler)) == [("a", 1, 0)]
    scheduler.finish(leader)
    assert scheduler.kv.pool.num_free == scheduler.kv.pool.num_blocks
    assert not scheduler.has_work


def test_a_reader_that_loses_its_blocks_takes_those_that_wait_along_and_comes_back_before_them() -> None:
    scheduler = start_reading_in_chunks(num_blocks=15)
    oldest = scheduler.running[0]
    oldest.token_ids.extend(range(1000, 1040))
    preempted: list[str] = []
    while len(preempted) < 2:
        assert preempted or held(scheduler) == ["c"]
        plan = scheduler.schedule()
        preempted += ids(plan.preempted)
        commit(scheduler, plan)
    assert preempted == ["c", "b"]
    assert ids(scheduler.waiting) == ["b", "c"]
    assert not any(request.is_held for request in scheduler.waiting)
    scheduler.finish(oldest)
    names = [ids(item.request for item in step(scheduler).scheduled) for _ in range(4)]
    assert names[0] == ["b"]
    assert names[-1] == ["b", "c"]


def test_in_a_full_pool_those_that_have_no_room_wait_in_the_queue() -> None:
    scheduler = make_scheduler(num_blocks=8, max_num_batched_tokens=8, min_awaited_tokens=4)
    requests = [add(scheduler, f"r{index}", [*SHARED, index + 1]) for index in range(6)]
    num_computed = 0
    while scheduler.has_work:
        plan = step(scheduler)
        num_computed += sum(item.num_tokens for item in plan.scheduled)
        for item in plan.scheduled:
            if item.request.num_output_tokens == 2:
                scheduler.finish(item.request)
    assert all(request.status is RequestStatus.FINISHED for request in requests)
    assert num_computed == 24 + 2 * 6  # the shared part once; a last prompt token and an answer's for each
    assert scheduler.kv.pool.num_free == 8


def test_requests_that_may_not_use_the_cache_neither_wait_nor_are_kept_from_being_waited_for() -> None:
    whole = replace(SamplingParams(), prompt_logprobs=1)
    scheduler = make_scheduler()
    add(scheduler, "a", SHARED)
    add(scheduler, "whole", SHARED, whole)
    assert sizes(step(scheduler)) == [("a", 24, 0), ("whole", 24, 0)]
    scheduler = make_scheduler()
    add(scheduler, "whole", SHARED, whole)
    add(scheduler, "b", SHARED)
    assert sizes(step(scheduler)) == [("whole", 24, 0)]
    assert sizes(step(scheduler)) == [("whole", 1, 0), ("b", 4, 0)]


def test_without_a_prefix_cache_everyone_reads() -> None:
    scheduler = make_scheduler(prefix_caching=False)
    for name in "ab":
        add(scheduler, name, SHARED)
    assert sizes(step(scheduler)) == [("a", 24, 0), ("b", 24, 0)]


def test_who_is_further_does_not_wait_for_a_reader_that_is_behind() -> None:
    scheduler = make_scheduler()
    before = add(scheduler, "before", SHARED[:16])
    step(scheduler)
    scheduler.finish(before)
    add(scheduler, "whole", SHARED, replace(SamplingParams(), prompt_logprobs=1))
    for name in "bc":
        add(scheduler, name, [*SHARED, 5])
    # b stands at 16 and whole at 0; c waits for b, with whom it goes along.
    assert sizes(step(scheduler)) == [("whole", 24, 0), ("b", 9, 0)]
    assert held(scheduler) == ["c"]


def test_nobody_waits_for_a_younger_one() -> None:
    """Whoever is the oldest computes, even if a younger one happens to stand where it stands."""
    scheduler = make_scheduler()
    leader = add(scheduler, "a", SHARED)
    add(scheduler, "b", SHARED)
    add(scheduler, "whole", SHARED, replace(SamplingParams(), prompt_logprobs=1))
    scheduler.schedule()
    assert held(scheduler) == ["b"]
    scheduler.finish(leader)  # nothing of the step was committed
    assert sizes(step(scheduler)) == [("b", 24, 0), ("whole", 24, 0)]


def test_a_follower_that_needs_the_drafts_cache_waits_only_for_one_that_fills_it() -> None:
    scheduler = make_scheduler()
    add(scheduler, "plain", SHARED)
    first, second = (add(scheduler, name, SHARED) for name in "ab")
    first.needs_draft_cache = second.needs_draft_cache = True
    plain = add(scheduler, "also plain", SHARED)
    plan = scheduler.schedule()
    assert sizes(plan) == [("plain", 24, 0), ("a", 24, 0)]
    assert held(scheduler) == ["b", "also plain"]
    for item in plan.scheduled:
        scheduler.update(item, [7], 0)
    scheduler.kv.publish(plan.scheduled[0].request, 0)
    scheduler.kv.publish(first, 24)
    plan = scheduler.schedule()
    assert sizes(plan) == [("plain", 1, 0), ("a", 1, 0), ("b", 4, 0), ("also plain", 4, 0)]
    assert (second.num_cached_tokens, second.num_draft_cached_tokens) == (20, 20)
    assert plain.num_cached_tokens == 20


@pytest.mark.parametrize(("lag", "num_found"), [(1, 20), (4, 20), (12, 12)])
def test_a_draft_cache_that_lags_behind_is_waited_for_while_the_prompt_is_read(
    lag: int, num_found: int
) -> None:
    """Who needs the head's blocks goes on by itself when the reading is over, and the head still behind."""
    scheduler = start_reading_in_chunks()
    reader, follower = scheduler.running[1:]
    reader.needs_draft_cache = follower.needs_draft_cache = True
    scheduler.kv.publish(reader, reader.num_computed_tokens - lag)
    while follower.is_held:
        plan = scheduler.schedule()
        for item in plan.scheduled:
            scheduler.update(item, [7] if item.reaches_end else [], 0)
        for request in scheduler.running:
            scheduler.kv.publish(request, max(0, request.num_computed_tokens - lag))
    assert follower.num_cached_tokens == follower.num_draft_cached_tokens == num_found
