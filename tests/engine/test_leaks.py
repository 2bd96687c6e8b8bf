"""Whatever ends a request, nothing of it stays behind."""

import random
from collections import Counter
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch

from engine.errors import InvalidRequest, Overloaded
from engine.llm import LLM, Completion
from engine.model.input_batch import InputBatch
from engine.outputs import FinishReason
from engine.sampling_params import Acceptance, SamplingParams, SpeculationParams
from engine.speculation.base import DraftRequest
from engine.token_tree import EMPTY_TREE, TokenTree
from tests.engine.answers import LETTERS, assert_clean, build_scripted, essence, plain_answer, target
from tests.engines import build_llm, load_tiny
from tests.scripted import Script

EOS = frozenset({ord("e"), ord("a")})


class Planted(RuntimeError):
    """A failure put in by a test."""


class FlakyForward:
    """Makes the target's next pass fail where it is told to, after the cache has been written."""

    def __init__(self, llm: LLM) -> None:
        self.fails = False
        self._forward = llm.core._runner.forward
        llm.core._runner.forward = self  # type: ignore[method-assign]

    def __call__(self, batch: InputBatch) -> torch.Tensor:
        rows = self._forward(batch)
        if self.fails:
            self.fails = False
            raise Planted
        return rows


def noisy_script(rng: random.Random) -> Script:
    """Trees at random, of letters, sometimes none at all, sometimes an exception."""

    def script(request: DraftRequest) -> TokenTree:
        if rng.random() < 0.05:
            raise Planted
        if rng.random() < 0.2:
            return EMPTY_TREE
        size = rng.randrange(1, request.budget + 1)
        return TokenTree(
            tuple(rng.randrange(97, 123) for _ in range(size)),
            tuple(rng.randrange(node + 1) for node in range(size)),
        )

    return script


def build(method: str, rng: random.Random, **room: Any) -> LLM:
    if method == "scripted":
        return build_scripted(noisy_script(rng), target(eos=EOS), k=5, method="draft_model", **room)[0]
    return build_llm(method, target=target(eos=EOS), draft=load_tiny(noise=0.05), num_draft_tokens=5, **room)


def random_params(rng: random.Random, method: str) -> SamplingParams:
    match = [Acceptance.MATCH, Acceptance.MATCH]
    return SamplingParams(
        temperature=rng.choice([0.0, 1.0, 1.5]),
        seed=rng.randrange(5),
        max_tokens=rng.choice([1, 2, 7, 12]),
        logit_bias=LETTERS,
        ignore_eos=rng.random() < 0.5,
        stop=rng.choice([(), (), ("o",), ("qz", "x")]),
        logprobs=rng.choice([None, 1]),
        prompt_logprobs=rng.choice([None, None, 0]),
        speculation=SpeculationParams(
            enabled=rng.random() < 0.9,
            acceptance=rng.choice(
                [*match, Acceptance.MATCH if method in ("ngram", "suffix") else Acceptance.REJECTION]
            ),
        ),
    )


@pytest.mark.parametrize("method", ["none", "ngram", "suffix", "draft_model", "scripted"])
def test_the_pool_is_whole_after_each_of_many_requests(method: str) -> None:
    rng = random.Random(1)
    llm = build(method, rng, block_size=16, num_kv_blocks=24)
    core, flaky = llm.core, FlakyForward(llm)
    reasons: Counter[str] = Counter()
    for number in range(200):
        request_id = f"r{number}"
        prompt = [rng.randrange(97, 123) for _ in range(rng.choice([1, 5, 15, 16, 17, 40]))]
        core.add_request(request_id, prompt, random_params(rng, method))
        leaves_after = rng.choice([None, None, None, 0, 1, 2])
        fails_after = rng.choice([None] * 6 + [0, 1])
        num_steps = 0
        while core.has_work:
            if num_steps == leaves_after:
                output = core.abort(request_id)
                assert output is not None
                reasons[output.finish_reason or ""] += 1
                break
            flaky.fails = num_steps == fails_after
            try:
                outputs = core.step()
            except Planted:
                assert core.abandon_step() == [request_id]
                reasons["error"] += 1
                break
            reasons.update(output.finish_reason for output in outputs if output.finish_reason is not None)
            core.scheduler.check_integrity()
            num_steps += 1
        flaky.fails = False
        assert_clean(llm)
    assert set(reasons) == {"stop", "length", "abort", "error"}
    assert reasons.total() == 200
    assert min(reasons.values()) > 12


class Trace:
    """One engine under random requests, aborts and failing steps, held against plain answers."""

    def __init__(self, method: str, seed: int) -> None:
        self.method = method
        rng = self.rng = random.Random(seed)
        block_size = rng.choice([2, 4, 8])
        budget = rng.choice([9, 16, 40])
        self.llm = build(
            method,
            rng,
            block_size=block_size,
            num_kv_blocks=128 // block_size + rng.randrange(0, 4),
            max_num_batched_tokens=budget,
            max_num_seqs=min(6, budget),
            prefix_caching=rng.random() < 0.75,
        )
        self.core = self.llm.core
        self.flaky = FlakyForward(self.llm)
        self.asked: dict[str, tuple[tuple[int, ...], SamplingParams]] = {}
        self.answers: dict[str, Completion] = {}
        self.ended: dict[str, FinishReason] = {}
        self.counts: Counter[str] = Counter()

    def run(self, num_requests: int) -> Counter[str]:
        while len(self.asked) < num_requests or self.core.has_work:
            while len(self.asked) < num_requests and self.rng.random() < 0.6:
                self.add()
            if self.rng.random() < 0.04:
                self.abort()
            if self.core.has_work:
                self.step()
            self.core.scheduler.check_integrity()
        assert_clean(self.llm)
        assert self.ended.keys() == self.asked.keys()
        self.compare()
        return self.counts

    def add(self) -> None:
        rng = self.rng
        prompt = tuple(rng.choice(b"ab") for _ in range(rng.choice([1, 6, 23, 60, 100])))
        if self.asked and rng.random() < 0.5:
            prompt = (rng.choice(list(self.asked.values()))[0] + prompt)[:100]
        # The ratio rule's text depends on the draft; the law of what it says has a test of its own.
        params = random_params(rng, self.method)
        if not params.is_greedy:
            params = replace(params, speculation=replace(params.speculation, acceptance=Acceptance.MATCH))
        params = replace(params, max_tokens=rng.choice([3, 12, 20]))
        request_id = f"r{len(self.asked)}"
        self.asked[request_id] = (prompt, params)
        self.answers[request_id] = Completion(list(prompt))
        self.core.add_request(request_id, prompt, params)

    def abort(self) -> None:
        alive = sorted(self.asked.keys() - self.ended.keys())
        if alive:
            request_id = self.rng.choice(alive)
            output = self.core.abort(request_id)
            assert output is not None
            self.answers[request_id].add(output)
            self.end(request_id, FinishReason.ABORT)

    def step(self) -> None:
        self.flaky.fails = self.rng.random() < 0.02
        try:
            outputs = self.core.step()
        except Planted:
            for request_id in self.core.abandon_step():
                self.end(request_id, FinishReason.ERROR)
            return
        for output in outputs:
            self.answers[output.request_id].add(output)
            if output.finish_reason is not None:
                self.end(output.request_id, output.finish_reason)
        self.flaky.fails = False
        stats = self.core.take_stats()
        self.counts["preempted"] += stats.num_preemptions
        self.counts["cached"] += stats.prefix_cache_hits
        self.counts["accepted"] += stats.num_accepted_tokens

    def end(self, request_id: str, reason: FinishReason) -> None:
        assert request_id not in self.ended
        self.ended[request_id] = reason
        self.counts[reason] += 1

    def compare(self) -> None:
        """With the plain answers of the model whose answers end at EOS, all asked for in one batch."""
        prompts, params = zip(*self.asked.values(), strict=True)
        plain = plain_engine().generate(prompts, params)
        for request_id, expected in zip(self.asked, plain, strict=True):
            found, reason = self.answers[request_id], self.ended[request_id]
            if reason in (FinishReason.ABORT, FinishReason.ERROR):
                assert found.token_ids == expected.token_ids[: len(found.token_ids)]
                assert reason is FinishReason.ERROR or expected.text.startswith(found.text)
            else:
                assert essence(found) == essence(expected)


@cache
def plain_engine() -> LLM:
    return build_llm(
        "none",
        target=target(eos=EOS),
        prefix_caching=False,
        num_kv_blocks=1024,
        max_num_seqs=20,
        max_num_batched_tokens=2048,
    )


@pytest.mark.parametrize("method", ["none", "ngram", "suffix", "draft_model", "scripted"])
def test_random_traces(method: str) -> None:
    counts: Counter[str] = Counter()
    for seed in range(5):
        counts += Trace(method, seed).run(num_requests=20)
    for ending in FinishReason:
        assert counts[ending] > 3, counts
    assert counts["preempted"] > 0
    assert counts["cached"] > 0
    assert method == "none" or counts["accepted"] > 0


def test_refused_requests_leave_nothing() -> None:
    llm = build("draft_model", random.Random(0))
    core = llm.core
    ok = SamplingParams(max_tokens=2)
    core.add_request("a", [97], ok)
    for request_id, prompt, params in [
        ("a", [97], ok),
        ("b", [], ok),
        ("c", [259], ok),
        ("d", [-1], ok),
        ("e", [97] * 127, ok),
        ("f", [97], replace(ok, stop_token_ids=(259,))),
        ("g", [97], replace(ok, logit_bias=((-1, 1.0),))),
    ]:
        with pytest.raises(InvalidRequest):
            core.add_request(request_id, prompt, params)
    core.limits = replace(core.limits, max_num_queued=1)
    with pytest.raises(Overloaded):
        core.add_request("h", [97], ok)
    while core.has_work:
        assert {output.request_id for output in core.step()} <= {"a"}
    assert_clean(llm)


def test_a_failed_step_ends_its_own_requests_only() -> None:
    llm = build("draft_model", random.Random(0), max_num_seqs=2)
    core, flaky = llm.core, FlakyForward(llm)
    params = SamplingParams(temperature=0.9, seed=1, max_tokens=9, ignore_eos=True)
    prompts = {name: tuple(name.encode()) for name in ("one", "two", "three")}
    for name, prompt in prompts.items():
        core.add_request(name, prompt, params)
    core.step()
    core.step()
    flaky.fails = True
    with pytest.raises(Planted):
        core.step()
    assert core.abandon_step() == ["one", "two"]
    three = Completion([])
    while core.has_work:
        for output in core.step():
            assert output.request_id == "three"
            three.add(output)
    assert three.token_ids == plain_answer(params, prompts["three"]).token_ids
    assert_clean(llm)
