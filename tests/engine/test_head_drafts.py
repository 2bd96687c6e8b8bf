"""A head's drafts are those of a fresh run, whatever has happened to the request before.

Every draft that is made while requests are served is held against what the head says of the same tokens when
everything is computed anew, without cache and pages, from the hidden states that transformers gives. Drafts
under the rejection rule tell the distributions they were drawn from, so that this is a comparison of numbers.
"""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache

import pytest
import torch
from transformers import PreTrainedModel

from engine.core.request import Request
from engine.drafting import SHOWN_TOGETHER
from engine.engine_core import EngineCore
from engine.llm import LLM
from engine.model.input_batch import SequenceSlice
from engine.model.model_runner import TappedPass
from engine.sampling_params import Acceptance, SamplingParams, SpeculationParams
from engine.speculation.base import DraftRequest, ProposalContext, Requirements, Speculator
from engine.speculation.eagle import EagleSpeculator
from engine.speculation.head_progress import MAX_PENDING
from engine.speculation.head_runner import HeadOutput
from engine.speculation.heads.config import Features
from engine.speculation.heads.eagle import EagleHead
from engine.speculation.heads.medusa import MedusaHeads
from engine.speculation.target_ends import TargetEnds
from engine.token_tree import TokenTree
from tests.engine.answers import assert_clean
from tests.engines import build_llm, drafter_of, load_tiny
from tests.heads import PROMPTS, dense_attention, features_of, trained_eagle, trained_medusa
from tests.tiny import VOCAB_SIZE, tiny_model

TEMPERATURE = 0.2
WISHES = SamplingParams(
    temperature=TEMPERATURE,
    seed=3,
    max_tokens=24,
    ignore_eos=True,
    speculation=SpeculationParams(acceptance=Acceptance.REJECTION),
)
TOLERANCE = 1e-3
METHODS = ("eagle", "eagle3", "eagle3 2,1,1", "medusa", "medusa 2,2")
FOLLOWING = METHODS[:3]
"""Those with a cache."""


@dataclass(frozen=True, slots=True)
class Draft:
    request_id: str
    tokens: tuple[int, ...]
    budget: int
    tree: TokenTree


class Recording:
    """Keeps what a speculator proposes; sees to it that some requests get no budget for a while."""

    def __init__(self, inner: Speculator) -> None:
        self.inner = inner
        self.drafts: list[Draft] = []
        self.release = inner.release
        self.num_computed_tokens = inner.num_computed_tokens

    @property
    def requirements(self) -> Requirements:
        return self.inner.requirements

    def propose(self, context: ProposalContext) -> list[TokenTree]:
        trees = self.inner.propose(context)
        for request, tree in zip(context.requests, trees, strict=True):
            self.drafts.append(Draft(request.request_id, tuple(request.token_ids), request.budget, tree))
        return trees


def record(llm: LLM) -> Recording:
    drafter = drafter_of(llm)
    recording = drafter.speculator = Recording(drafter.speculator)
    return recording


@cache
def head_of(method: str) -> EagleHead | MedusaHeads:
    name = method.partition(" ")[0]
    return trained_medusa() if name == "medusa" else trained_eagle("eagle3" if name == "eagle3" else "eagle")


@cache
def plain() -> PreTrainedModel:
    return tiny_model(attention="eager")


@cache
def ends() -> TargetEnds:
    return TargetEnds(plain(), VOCAB_SIZE)


@cache
def target_features(tokens: tuple[int, ...], features: Features) -> torch.Tensor:
    return features_of(plain(), tokens, features)


def laws(method: str, draft: Draft) -> list[torch.Tensor]:
    """Per node what its parent's row says, computed anew."""
    head, tree = head_of(method), draft.tree
    parents = sorted(set(tree.parents))
    if isinstance(head, MedusaHeads):
        state = target_features(draft.tokens, "last")[len(draft.tokens) - 2]
        levels = ends().spread(head(state, ends().score), head.draft_to_target)
        rows = {parent: levels[tree.depths()[parent]] for parent in parents}
    else:
        rows = {parent: eagle_row(head, draft.tokens, tree.path_tokens(parent)) for parent in parents}
    return [(rows[parent] / TEMPERATURE).softmax(dim=-1) for parent in tree.parents]


def eagle_row(head: EagleHead, tokens: Sequence[int], path: Sequence[int]) -> torch.Tensor:
    """The logits behind a path of draft tokens, [VOCAB_SIZE]."""
    features = target_features(tuple(tokens), head.config.features)
    hidden = head.fuse(features[None, :-1])
    embedded = ends().embed(torch.tensor([[*tokens, *path]]))[:, 1:]
    for length in range(len(tokens) - 1, len(tokens) + len(path)):
        positions = torch.arange(length)[None]
        out = head(embedded[:, :length], hidden, positions, dense_attention(head.config))
        hidden = torch.cat([hidden, head.carried(out)[:, -1:]], dim=1)
    return ends().spread(head.logits(out[0, -1], ends().score), head.draft_to_target)


def check(method: str, drafts: Sequence[Draft], count: int = 12) -> None:
    """Some of the drafts, the same in every run, hold the distributions of a fresh run."""
    asked = [draft for draft in drafts if draft.budget]
    for request_id in {draft.request_id for draft in asked}:
        # Where a pass has no room for all, a draft may have to wait for the next step.
        last = [draft.tree for draft in asked if draft.request_id == request_id][-4:]
        assert any(last), f"request {request_id} was lost"
    wanted = [draft for draft in asked if draft.tree]
    assert len(wanted) >= max(count, len(asked) / 2)
    for draft in random.Random(1).sample(wanted, count):
        for ours, theirs in zip(draft.tree.distributions, laws(method, draft), strict=True):
            assert isinstance(ours, torch.Tensor)
            assert torch.allclose(ours, theirs, rtol=0, atol=TOLERANCE), (ours - theirs).abs().max()


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("budget", [256, 11])
def test_in_a_batch_and_in_chunks(method: str, budget: int) -> None:
    llm = build_llm(method, max_num_batched_tokens=budget)
    seen = record(llm)
    answers = llm.generate(PROMPTS, WISHES)
    assert sum(answer.speculation.num_accepted_tokens for answer in answers) > 5
    check(method, seen.drafts)
    assert_clean(llm)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("block_size", [4, 1])
def test_behind_cached_blocks(method: str, block_size: int) -> None:
    llm = build_llm(method, block_size=block_size, num_kv_blocks=1024)
    first = llm.generate(PROMPTS, WISHES)
    seen = record(llm)
    again = llm.generate(PROMPTS, replace(WISHES, seed=4))
    more = llm.generate([(*answer.prompt_token_ids, *answer.token_ids[:9], 5) for answer in first], WISHES)
    assert sum(answer.num_cached_tokens for answer in again) > 80
    assert sum(answer.num_cached_tokens for answer in more) > 140
    check(method, seen.drafts)
    assert_clean(llm)


@pytest.mark.parametrize("method", METHODS)
def test_after_preemption(method: str) -> None:
    llm = build_llm(method, num_kv_blocks=33)
    seen = record(llm)
    core = llm.core
    taken = []
    core.take_stats, take = lambda: taken.append(take()) or taken[-1], core.take_stats  # type: ignore
    llm.generate(PROMPTS, WISHES)
    assert sum(stats.num_preemptions for stats in taken) > 0
    check(method, seen.drafts)
    assert_clean(llm)


@pytest.mark.parametrize("method", FOLLOWING)
def test_beside_neighbours_that_are_aborted(method: str) -> None:
    llm = build_llm(method, num_kv_blocks=60)
    seen = record(llm)
    core = llm.core
    for index, prompt in enumerate(PROMPTS):
        core.add_request(f"{index}", llm.tokenizer.encode(prompt), WISHES)
    for step in range(12):
        core.step()
        if step in (0, 2, 5):
            core.abort(f"{step}")
            core.add_request(f"again {step}", llm.tokenizer.encode(PROMPTS[step]), WISHES)
    while core.has_work:
        core.step()
    check(method, seen.drafts)
    assert_clean(llm)


def without_budget(llm: LLM, is_without: Iterator[bool]) -> None:
    """Steps of a request that get nothing, as an engine under load has them."""
    room = drafter_of(llm).room
    budget = room.node_budget

    def node_budget(request: Request) -> int:
        return 0 if next(is_without) else budget(request)

    room.node_budget = node_budget  # type: ignore[method-assign]


@pytest.mark.parametrize("method", METHODS)
def test_after_steps_without_a_draft(method: str) -> None:
    rng = random.Random(5)
    llm = build_llm(method)
    refused: list[bool] = []

    def is_without() -> bool:
        refused.append(rng.random() < 0.7)
        return refused[-1]

    without_budget(llm, iter(is_without, None))
    seen = record(llm)
    llm.generate(PROMPTS, replace(WISHES, max_tokens=40))
    assert sum(refused) > 50
    check(method, seen.drafts)
    assert_clean(llm)


def test_a_step_without_a_draft_costs_no_pass_until_much_is_pending() -> None:
    llm = build_llm("eagle3")
    without_budget(llm, iter(lambda: True, False))
    speculator = drafter_of(llm).speculator
    assert isinstance(speculator, EagleSpeculator)
    sizes: list[int] = []
    calls: list[int] = []
    absorb, propose = speculator._runner.absorb, speculator.propose

    def counted(slices: Sequence[SequenceSlice], features: torch.Tensor) -> HeadOutput:
        sizes.append(len(features))
        return absorb(slices, features)

    speculator._runner.absorb = counted  # type: ignore[method-assign]
    speculator.propose = lambda context: calls.append(1) or propose(context)  # type: ignore
    llm.generate(["a", "zz"], replace(WISHES, max_tokens=100))
    assert 2 * MAX_PENDING <= sum(sizes) < 2 * (MAX_PENDING + SHOWN_TOGETHER)
    assert len(sizes) <= 2
    assert len(calls) <= 2 * (100 // SHOWN_TOGETHER), "it is not told of every step"
    assert_clean(llm)


def test_what_only_the_target_has_cached_is_computed_anew() -> None:
    """Requests that do not speculate leave blocks that the head could not go on from."""
    llm = build_llm("eagle3")
    off = replace(WISHES, speculation=SpeculationParams(enabled=False))
    llm.generate(PROMPTS, off)
    assert sum(answer.num_cached_tokens for answer in llm.generate(PROMPTS, off)) > 80
    seen = record(llm)
    first = llm.generate(PROMPTS, WISHES)
    assert [answer.num_cached_tokens for answer in first] == [0] * len(PROMPTS)
    # The blocks with the head's mark have taken their place: from now on both kinds of requests find them.
    again = llm.generate(PROMPTS, replace(WISHES, seed=4))
    assert sum(answer.num_cached_tokens for answer in again) > 80
    assert sum(answer.num_cached_tokens for answer in llm.generate(PROMPTS, off)) > 80
    check("eagle3", seen.drafts)
    assert_clean(llm)


def test_a_pass_of_the_head_that_fails_costs_the_steps_drafts_alone() -> None:
    llm = build_llm("eagle3")
    speculator = drafter_of(llm).speculator
    assert isinstance(speculator, EagleSpeculator)
    seen = record(llm)
    rng = random.Random(2)
    for name in ("absorb", "extend"):
        run = getattr(speculator._runner, name)

        def failing(*args: object, run=run) -> object:  # type: ignore[no-untyped-def]
            if rng.random() < 0.3:
                raise RuntimeError("planted")
            return run(*args)

        setattr(speculator._runner, name, failing)
    llm.generate(PROMPTS, WISHES)
    check("eagle3", seen.drafts)
    assert_clean(llm)


# What must not go unnoticed above.


def shifted(core: EngineCore) -> None:
    """Features of the position after."""
    drafting = core._drafting
    assert drafting is not None
    note = drafting.note_features
    drafting.note_features = lambda plan, rows: note(plan, rows.roll(-1, 0))  # type: ignore


def first_layer_twice(core: EngineCore) -> None:
    """States of another layer."""
    tapped = core._runner.forward_tapped

    def forward_tapped(batch: object, tap: object) -> TappedPass:
        output = tapped(batch, tap)  # type: ignore[arg-type]
        width = output.features.shape[1] // 3
        return replace(output, features=output.features[:, :width].repeat(1, 3))

    core._runner.forward_tapped = forward_tapped  # type: ignore[method-assign]


def not_computed_again(core: EngineCore) -> None:
    """Accepted tokens keep what the head made of its own guesses."""
    speculator = core._drafting._drafters[-1].speculator  # type: ignore[union-attr]
    assert isinstance(speculator, EagleSpeculator)
    propose = speculator.propose

    def without(context: ProposalContext) -> list[TokenTree]:
        for request in context.requests:
            progress = speculator._progress.get(request.request_id)
            if progress is not None and request.budget and progress.num_computed < len(request.token_ids) - 1:
                progress.num_computed = len(request.token_ids) - 1
        return propose(context)

    speculator.propose = without  # type: ignore[method-assign]


def another_boundary(core: EngineCore) -> None:
    """The feature before a request's first token is that of another position."""
    speculator = core._drafting._drafters[-1].speculator  # type: ignore[union-attr]
    assert isinstance(speculator, EagleSpeculator)
    behind = speculator._boundaries.behind

    def other(request: DraftRequest) -> torch.Tensor | None:
        first = replace(request, num_cached_tokens=min(request.num_cached_tokens, 4))
        return behind(first)

    speculator._boundaries.behind = other  # type: ignore[method-assign]


@pytest.mark.parametrize("plant", [shifted, first_layer_twice, not_computed_again, another_boundary])
def test_planted_errors_are_found(plant) -> None:  # type: ignore[no-untyped-def]
    llm = build_llm("eagle3", target=load_tiny())
    plant(llm.core)
    seen = record(llm)
    for seed in range(2):
        llm.generate(PROMPTS, replace(WISHES, seed=seed))
    with pytest.raises(AssertionError, match=r"tensor|request .* was lost"):
        check("eagle3", seen.drafts, 40)
