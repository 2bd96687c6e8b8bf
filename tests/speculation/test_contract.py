"""What every speculator promises, whatever its method."""

import copy
import random
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from engine.sampling_params import Acceptance, SamplingParams, SpeculationParams
from engine.speculation.base import DraftRequest, Speculator
from engine.speculation.continuation import GrowthRules
from engine.speculation.growth import Gardener, SequoiaGardener, StaticGardener
from engine.speculation.head_rates import HeadRates
from engine.speculation.ngram import NgramSpeculator
from engine.speculation.prediction import PredictionSpeculator
from engine.speculation.suffix import SuffixSpeculator
from engine.speculation.text_store import TextStore
from engine.speculation.tree_shape import PRIOR_RATES, likeliest_shape
from engine.token_tree import EMPTY_TREE, TokenTree
from tests.scripted import ScriptedSpeculator, fixed
from tests.speculation.drafting import (
    GREEDY,
    Blocks,
    RecordingRunner,
    Text,
    make_drafter,
    propose,
)
from tests.speculation.feeding import fed_eagle, fed_medusa
from tests.tiny import VOCAB_SIZE, tiny_model

DRAFT_MODEL_LEN = 48


def draft_model(gardener: Gardener | None = None) -> Speculator:
    # A padded vocabulary, a sliding window and a token limit that binds.
    runner = RecordingRunner(tiny_model("mistral", vocab_size=VOCAB_SIZE + 13))
    return make_drafter(
        runner,
        max_model_len=DRAFT_MODEL_LEN,
        max_num_batched_tokens=24,
        eos_token_ids=frozenset({257}),
        gardener=gardener,
    )


def static_tree() -> Gardener:
    return StaticGardener(likeliest_shape(PRIOR_RATES, 15, (3, 2, 1)))


SPECULATORS: dict[str, Callable[[], Speculator]] = {
    "ngram": lambda: NgramSpeculator(1, 3, frozenset({257})),
    "suffix": lambda: SuffixSpeculator(GrowthRules(4.0, 0.1, is_tree=True), 64, frozenset({257}), None),
    "suffix, chains": lambda: SuffixSpeculator(
        GrowthRules(1.0, 0.0, is_tree=False), 5, frozenset({257}), TextStore(10, 1000)
    ),
    "prediction": lambda: PredictionSpeculator(frozenset({257})),
    "draft_model": draft_model,
    "static tree": lambda: draft_model(static_tree()),
    "sequoia tree": lambda: draft_model(SequoiaGardener(6, 4)),
    "eagle": lambda: fed_eagle("eagle"),
    "eagle3": lambda: fed_eagle("eagle3"),
    "eagle3, static tree": lambda: fed_eagle("eagle3", static_tree()),
    "medusa": fed_medusa,
    "medusa, sequoia tree": lambda: fed_medusa(SequoiaGardener(6, 3, lambda: HeadRates(3))),
    "scripted": lambda: ScriptedSpeculator(fixed(TokenTree((1, 2, 3, 4, 5), (0, 0, 1, 3, 4)))),
}


@pytest.fixture(params=SPECULATORS)
def make(request: pytest.FixtureRequest) -> Callable[[], Speculator]:
    return SPECULATORS[request.param]


def texts(lengths: tuple[int, ...] = (3, 17, 17, 30)) -> list[Text]:
    """Requests of all kinds whose prompts repeat themselves; two of them compete for one place."""
    sampled = SamplingParams(seed=4, temperature=1.3, top_p=0.9, repetition_penalty=1.1)
    plain = SpeculationParams(prediction=tuple(n % 6 for n in range(40)))
    kinds = (
        replace(GREEDY, speculation=plain),
        replace(sampled, speculation=plain),
        replace(sampled, speculation=replace(plain, acceptance=Acceptance.REJECTION)),
    )
    blocks = Blocks()
    found = []
    for index, length in enumerate(lengths):
        rng = random.Random(index)
        tokens = [rng.randrange(6) for _ in range(length)]
        found.append(Text(f"r{index}", tokens, blocks, kinds[index % len(kinds)]))
    return found


def state(speculator: Speculator) -> dict[str, object]:
    """The collections that a speculator keeps."""
    kept = vars(speculator).items()
    return {name: copy.copy(value) for name, value in kept if isinstance(value, dict | set | list)}


def deepest(tree: TokenTree) -> int:
    return max(tree.depths())


def same(ours: TokenTree, theirs: TokenTree) -> bool:
    """Bit-equal trees."""
    return (ours.tokens, ours.parents, ours.proposal) == (
        theirs.tokens,
        theirs.parents,
        theirs.proposal,
    ) and all(
        isinstance(mine, torch.Tensor) and isinstance(other, torch.Tensor) and torch.equal(mine, other)
        for mine, other in zip(ours.distributions, theirs.distributions, strict=True)
    )


def run(
    speculator: Speculator, requests: list[Text], num_steps: int, budget: int, *, seed: int = 0
) -> list[tuple[DraftRequest, TokenTree]]:
    """Steps with verdicts that depend on the request and the step alone."""
    proposed = []
    for step in range(num_steps):
        asked = [replace(text.ask(budget), token_ids=tuple(text.tokens)) for text in requests]
        trees = propose(speculator, *asked)
        assert len(trees) == len(asked)
        for text, request, tree in zip(requests, asked, trees, strict=True):
            proposed.append((request, tree))
            rng = random.Random(f"{seed} {text.request_id} {step}")
            path = tree.path_tokens(len(tree))
            text.tokens += path[: rng.randint(0, len(path))]
            text.tokens.append(rng.randrange(6))
    return proposed


@pytest.mark.parametrize("budget", [1, 2, 5])
def test_within_budget_context_and_vocabulary(make: Callable[[], Speculator], budget: int) -> None:
    speculator = make()
    limit = speculator.requirements.max_model_len
    proposed = run(speculator, texts(), 8, budget)
    # Lookups draft as much as pays, which on text as random as this is little.
    assert sum(len(tree) for _, tree in proposed) > 8 * min(budget, 2)
    for request, tree in proposed:
        assert len(tree) <= request.budget
        assert all(0 <= token < VOCAB_SIZE for token in tree.tokens)
        if limit is not None:
            assert not len(tree) or len(request.token_ids) + deepest(tree) <= limit


def test_nothing_outside_the_block_tables_is_written() -> None:
    runner = RecordingRunner(tiny_model("llama"))
    speculator = make_drafter(runner, max_num_batched_tokens=24)
    requests = texts()
    for step in range(6):
        runner.passes.clear()
        asked = [text.ask(3) for text in requests]
        allowed = {slot for text in requests for slot in text.slots(len(text.tokens) + 3)}
        trees = propose(speculator, *asked)
        for batch in runner.passes:
            assert set(batch.slots.tolist()) <= allowed
        for text, tree in zip(requests, trees, strict=True):
            text.commit(tree, min(step, len(tree)), random.Random(step))


def test_an_empty_context(make: Callable[[], Speculator]) -> None:
    assert propose(make()) == []


def test_no_budget_no_draft(make: Callable[[], Speculator]) -> None:
    speculator = make()
    requests = texts()
    for _ in range(3):
        asked = [text.ask(0, num_computed=len(text.tokens) // 2) for text in requests]
        assert propose(speculator, *asked) == [EMPTY_TREE] * len(requests)
        for request in asked:
            assert speculator.num_computed_tokens(request.request_id) <= request.num_computed_tokens


def test_only_committed_tokens_are_reported_as_computed(make: Callable[[], Speculator]) -> None:
    speculator = make()
    requests = texts()
    for _ in range(6):
        for request, _ in run(speculator, requests, 1, 4):
            assert speculator.num_computed_tokens(request.request_id) <= len(request.token_ids)


def test_release_leaves_nothing_behind(make: Callable[[], Speculator]) -> None:
    speculator = make()
    speculator.release("never seen")
    before = state(speculator)
    requests = texts()
    run(speculator, requests, 4, 3)
    assert state(speculator) != before
    for text in requests:
        speculator.release(text.request_id)
        speculator.release(text.request_id)
        assert speculator.num_computed_tokens(text.request_id) == 0
    assert state(speculator) == before


def test_an_id_that_comes_back_is_a_new_request(make: Callable[[], Speculator]) -> None:
    speculator = make()
    requests = texts((20, 25))
    run(speculator, requests, 3, 4)
    for text in requests:
        speculator.release(text.request_id)
    again = run(speculator, texts((7, 6)), 3, 4)
    fresh = run(make(), texts((7, 6)), 3, 4)
    assert all(same(ours, theirs) for (_, ours), (_, theirs) in zip(again, fresh, strict=True))


def test_the_order_of_requests_does_not_matter(make: Callable[[], Speculator]) -> None:
    forwards, backwards, shuffled = texts(), texts(), texts()
    rng = random.Random(0)
    first, second, third = make(), make(), make()
    for step in range(6):
        rng.shuffle(shuffled)
        ours = dict(pairs(run(first, forwards, 1, 4, seed=step)))
        for other in (
            dict(pairs(run(second, backwards[::-1], 1, 4, seed=step))),
            dict(pairs(run(third, shuffled, 1, 4, seed=step))),
        ):
            assert ours.keys() == other.keys()
            assert all(same(tree, other[request_id]) for request_id, tree in ours.items())


def test_neighbours_do_not_matter(make: Callable[[], Speculator]) -> None:
    together = dict(enumerate(run(make(), texts((3, 8, 5)), 6, 3)))
    for index in range(3):
        alone = run(make(), [texts((3, 8, 5))[index]], 6, 3)
        for step, (_, tree) in enumerate(alone):
            _, shared = together[3 * step + index]
            assert (tree.tokens, tree.parents, tree.proposal) == (
                shared.tokens,
                shared.parents,
                shared.proposal,
            )
            for mine, other in zip(tree.distributions, shared.distributions, strict=True):
                assert isinstance(mine, torch.Tensor)
                assert isinstance(other, torch.Tensor)
                assert torch.allclose(mine, other, rtol=1e-3, atol=1e-6)


def test_requests_that_take_turns_do_not_matter(make: Callable[[], Speculator]) -> None:
    """A request that sits steps out gets the drafts that a speculator who never saw it would give."""
    speculator = make()
    requests = texts((3, 8, 5))
    for step in range(9):
        chosen = requests[step % 3]
        chosen.tokens += [step % 6, (2 * step) % 6]
        [tree] = propose(speculator, chosen.ask(3))
        newcomer = Text(chosen.request_id, list(chosen.tokens), Blocks(), chosen.params)
        newcomer.num_prompt = chosen.num_prompt
        [expected] = propose(make(), newcomer.ask(3))
        assert tree.tokens == expected.tokens


def pairs(proposed: list[tuple[DraftRequest, TokenTree]]) -> list[tuple[str, TokenTree]]:
    return [(request.request_id, tree) for request, tree in proposed]
