"""Random requests, verdicts, stops and aborts against small pools, with the caches' contents simulated."""

import random
from dataclasses import asdict, dataclass, field
from itertools import count

import pytest

from engine.core.kv_cache_manager import KVCacheManager
from engine.core.request import Request, RequestStatus
from engine.core.scheduler import ScheduledRequest, Scheduler
from engine.core.stopping import apply_stop_rules
from engine.sampling_params import SamplingParams
from engine.token_tree import EMPTY_TREE, TokenTree
from tests.core.builders import EOS, make_request

VOCABULARY = range(EOS + 1, EOS + 4)  # so few that requests often share a beginning
EMPTY_CONTENT = 0


def content_behind(before: int, token: int) -> int:
    """What a slot holds: keys and values depend on their token and on all before it."""
    return hash((before, token))


@dataclass
class Counts:
    """What a trace went through, to show that it went everywhere."""

    steps: int = 0
    preempted: int = 0
    cache_hits: int = 0
    draft_cache_hits: int = 0
    chunks: int = 0
    trimmed_drafts: int = 0
    accepted: int = 0
    stopped_inside_a_draft: int = 0
    aborted_waiting: int = 0
    aborted_running: int = 0
    finished: int = 0
    held: int = 0


@dataclass
class Trace:
    """One engine without a model: its scheduler, and what would be in the target's and the draft's cache."""

    seed: int
    counts: Counts = field(default_factory=Counts)

    def __post_init__(self) -> None:
        rng = self.rng = random.Random(self.seed)
        self.block_size = rng.choice([1, 2, 4])
        self.num_blocks = rng.randrange(4, 20)
        self.budget = rng.randrange(2, 24)
        self.max_num_seqs = rng.randrange(1, min(self.budget, 6) + 1)
        kv = KVCacheManager(self.num_blocks, self.block_size, prefix_caching=rng.random() < 0.85)
        self.scheduler = Scheduler(
            kv,
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.budget,
            min_awaited_tokens=rng.randrange(1, 8),
        )
        self.target: dict[int, int] = {}
        self.draft: dict[int, int] = {}
        self.draft_computed: dict[str, int] = {}
        self.right: dict[str, list[int]] = {}
        self.requests: list[Request] = []
        self.numbers = count()

    def run(self, num_requests: int) -> Counts:
        """Adds requests now and then, and steps until all have ended."""
        while len(self.requests) < num_requests or self.scheduler.has_work:
            while len(self.requests) < num_requests and self.rng.random() < 0.6:
                self.add()
            if self.rng.random() < 0.05:
                self.abort()
            if self.scheduler.has_work:
                self.step()
        self.check_end()
        return self.counts

    def add(self) -> None:
        """A request that fits the pool alone, and often begins like an earlier one."""
        rng, capacity = self.rng, self.num_blocks * self.block_size
        length = rng.randrange(1, max(2, capacity // rng.choice([1, 2, 4])))
        tokens = [rng.choice(VOCABULARY) for _ in range(length)]
        if self.requests and rng.random() < 0.6:
            model = rng.choice(self.requests).token_ids
            shared = rng.randrange(len(model) + 1)
            tokens = [token or VOCABULARY[0] for token in model[:shared]] + tokens
        if self.requests and rng.random() < 0.4:
            tokens = self.requests[-1].token_ids[: self.requests[-1].num_prompt_tokens]  # n choices
        tokens = tokens[: capacity - 1]
        request = make_request(
            f"r{next(self.numbers)}",
            tokens,
            max_tokens=rng.randrange(1, capacity - len(tokens) + 1),
            params=SamplingParams(prompt_logprobs=0 if rng.random() < 0.1 else None),
        )
        self.requests.append(request)
        self.scheduler.add(request)

    def abort(self) -> None:
        """Ends any request that has not ended."""
        alive = [request for request in self.requests if request.status is not RequestStatus.FINISHED]
        if alive:
            request = self.rng.choice(alive)
            self.counts.aborted_waiting += request.status is RequestStatus.WAITING
            self.counts.aborted_running += request.status is RequestStatus.RUNNING
            self.finish(request)
            self.check()

    def step(self) -> None:
        """What EngineCore.step does, the models left out."""
        scheduler, counts = self.scheduler, self.counts
        before = list(scheduler.running)
        were_held = [request for request in before if request.is_held]
        drafts = {request.request_id: request.draft for request in before}
        plan = scheduler.schedule()
        counts.steps += 1
        counts.preempted += len(plan.preempted)
        counts.cache_hits += plan.prefix_cache_hits
        counts.held += sum(request.is_held for request in scheduler.running)
        for request in plan.preempted:
            self.draft_computed.pop(request.request_id, None)
            assert request.draft == EMPTY_TREE
        for item in plan.scheduled:
            if item.request not in before or item.request in were_held:
                self.note_admission(item.request)
            counts.trimmed_drafts += len(item.tree) < len(drafts.get(item.request.request_id, ()))
            counts.chunks += not item.reaches_end
        self.check_plan(before, plan.scheduled, plan.preempted)
        self.check()
        for item in plan.scheduled:
            self.compute(item)
        for item in plan.scheduled:
            self.commit(item)
        for request in scheduler.running:
            if not request.is_held:
                self.propose(request)
        for request in scheduler.running:
            scheduler.kv.publish(request, self.draft_computed.get(request.request_id, 0))
        self.check()

    def note_admission(self, request: Request) -> None:
        assert request.num_draft_cached_tokens <= request.num_cached_tokens < request.num_tokens
        assert not (request.needs_every_row and request.num_cached_tokens)
        self.draft_computed[request.request_id] = request.num_draft_cached_tokens
        self.counts.draft_cache_hits += request.num_draft_cached_tokens

    def compute(self, item: ScheduledRequest) -> None:
        """Writes committed tokens, and a draft's nodes to scratch slots behind them."""
        request, kv = item.request, self.scheduler.kv
        begin = request.num_computed_tokens
        right = self.right_contents(request)
        for index in range(begin, begin + item.num_tokens):
            self.target[kv.slot(request, index)] = right[index]
        nodes = [right[-1]]
        for node, (token, parent) in enumerate(
            zip(item.tree.tokens, item.tree.parents, strict=True), start=1
        ):
            nodes.append(content_behind(nodes[parent], token))
            self.target[kv.slot(request, request.num_tokens - 1 + node)] = nodes[node]

    def commit(self, item: ScheduledRequest) -> None:
        """A random verdict: some path of the tree and a token behind it, cut where a stop falls."""
        request, kv = item.request, self.scheduler.kv
        if not item.reaches_end:
            self.scheduler.update(item, [], 0)
            return
        path = item.tree.path(self.rng.randrange(len(item.tree) + 1))
        run = [*(item.tree.tokens[node - 1] for node in path), self.next_token()]
        stop = apply_stop_rules(run, request.num_output_tokens, request.stop_rules)
        num_kept = stop.num_kept
        is_cut = self.rng.random() < 0.03  # as by a stop string
        if is_cut:
            num_kept = self.rng.randrange(1, num_kept + 1)
        accepted = path[:num_kept]
        contents = [self.target[kv.slot(request, request.num_tokens - 1 + node)] for node in accepted]
        for index, content in enumerate(contents):
            self.target[kv.slot(request, request.num_tokens + index)] = content
        self.scheduler.update(item, run[:num_kept], len(accepted))
        self.counts.accepted += len(accepted)
        self.counts.stopped_inside_a_draft += num_kept <= len(path)
        if is_cut or stop.reason is not None:
            kv.publish(request, self.draft_computed[request.request_id])
            self.finish(request)
            self.counts.finished += 1
        else:
            assert request.num_uncomputed_tokens == 1

    def propose(self, request: Request) -> None:
        """The speculator follows to anywhere up to the target's progress, then drafts a random tree."""
        rng, kv = self.rng, self.scheduler.kv
        begin = self.draft_computed[request.request_id]
        end = (
            rng.randrange(begin, request.num_computed_tokens + 1)
            if begin < request.num_computed_tokens
            else begin
        )
        right = self.right_contents(request)
        for index in range(begin, end):
            self.draft[kv.slot(request, index)] = right[index]
        self.draft_computed[request.request_id] = end
        if request.num_uncomputed_tokens > 1 or rng.random() < 0.2:
            return
        wanted = rng.randrange(0, 7)
        free = kv.pool.num_free
        granted = self.scheduler.grant_lookahead(request, wanted)
        assert 0 <= granted <= wanted
        assert kv.pool.num_free == free or kv.pool.num_free >= len(self.scheduler.running)
        num_nodes = rng.randrange(granted + 1)
        for node in range(1, num_nodes + 1):
            self.draft[kv.slot(request, request.num_tokens - 1 + node)] = EMPTY_CONTENT
        request.draft = TokenTree(
            tuple(self.next_token() for _ in range(num_nodes)),
            tuple(rng.randrange(max(0, node - 2), node) for node in range(1, num_nodes + 1)),
        )

    def right_contents(self, request: Request) -> list[int]:
        """What the slots of a request's tokens must hold."""
        contents = self.right.setdefault(request.request_id, [])
        for token in request.token_ids[len(contents) :]:
            contents.append(content_behind(contents[-1] if contents else EMPTY_CONTENT, token))
        return contents

    def next_token(self) -> int:
        return EOS if self.rng.random() < 0.02 else self.rng.choice(VOCABULARY)

    def finish(self, request: Request) -> None:
        self.scheduler.finish(request)
        self.draft_computed.pop(request.request_id, None)

    def check_plan(
        self, before: list[Request], scheduled: tuple[ScheduledRequest, ...], preempted: tuple[Request, ...]
    ) -> None:
        scheduler, kv = self.scheduler, self.scheduler.kv
        assert sum(item.num_tokens + len(item.tree) for item in scheduled) <= self.budget
        assert len(scheduler.running) <= self.max_num_seqs
        # Whoever runs and is not held gets a token, whoever was preempted does not come back at once.
        assert [item.request for item in scheduled] == [r for r in scheduler.running if not r.is_held]
        assert not scheduler.running[0].is_held
        assert all(item.num_tokens >= 1 for item in scheduled)
        assert not set(preempted) & set(scheduler.running)
        # The youngest give way, the oldest never does.
        num_kept = len(before) - len(preempted)
        assert list(preempted) == before[: num_kept - 1 : -1] if preempted else True
        assert scheduler.running[:num_kept] == before[:num_kept]
        assert num_kept > 0 or not before
        assert not (preempted and len(scheduler.running) > num_kept)
        for request in scheduler.running:
            assert not request.is_held or self.is_read_by_an_older_one(request, scheduled)
        for item in scheduled:
            request = item.request
            end = request.num_computed_tokens + item.num_tokens
            assert item.reaches_end == (end == request.num_tokens)
            assert end <= request.num_tokens
            assert item.reaches_end or not item.tree
            assert kv.num_slots(request) >= end + len(item.tree)

    def is_read_by_an_older_one(self, request: Request, scheduled: tuple[ScheduledRequest, ...]) -> bool:
        """Whether the step brings on an older request through tokens that a held one begins with."""
        older = self.scheduler.running[: self.scheduler.running.index(request)]
        begin = request.num_computed_tokens
        wanted = request.token_ids[: begin // self.block_size * self.block_size + self.block_size]
        return any(
            item.request in older
            and item.request.num_computed_tokens < len(wanted) < request.num_tokens
            and item.request.token_ids[: len(wanted)] == wanted
            for item in scheduled
        )

    def check(self) -> None:
        """Order of arrival, books, and the contents of both caches."""
        scheduler, kv = self.scheduler, self.scheduler.kv
        scheduler.check_integrity()
        queue = [*scheduler.running, *scheduler.waiting]
        assert queue == [r for r in self.requests if r.status is not RequestStatus.FINISHED]
        for request in scheduler.running:
            self.check_contents(request, self.target, request.num_computed_tokens)
            self.check_contents(request, self.draft, self.draft_computed.get(request.request_id, 0))
        held = {block for request in scheduler.running for block in kv.block_table(request)}
        assert kv.pool.num_free == self.num_blocks - len(held)

    def check_contents(self, request: Request, cache: dict[int, int], num_tokens: int) -> None:
        size = self.block_size
        table = self.scheduler.kv.block_table(request)
        found = [cache[table[index // size] * size + index % size] for index in range(num_tokens)]
        assert found == self.right_contents(request)[:num_tokens], request.request_id

    def check_end(self) -> None:
        assert all(request.status is RequestStatus.FINISHED for request in self.requests)
        assert self.scheduler.kv.pool.num_free == self.num_blocks
        assert self.scheduler.kv.usage == 0.0
        # Whenever something is to be done, the oldest request gets at least one of its tokens computed.
        assert self.counts.steps <= sum(request.num_tokens for request in self.requests)


@pytest.mark.parametrize("seed", range(240))
def test_books_and_contents_stay_right(seed: int) -> None:
    Trace(seed).run(num_requests=12)


def test_traces_go_everywhere() -> None:
    traces = [asdict(Trace(seed).run(num_requests=12)) for seed in range(40)]
    totals = {name: sum(counts[name] for counts in traces) for name in traces[0]}
    assert min(totals.values()) >= 10, totals
