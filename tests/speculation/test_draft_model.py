"""The draft model's proposals against transformers' own forward passes."""

import random
from dataclasses import replace

import pytest
import torch
from transformers import PreTrainedModel

from engine.model.input_batch import SequenceSlice
from engine.sampling.logits import process_logits
from engine.sampling.metadata import RowGroup
from engine.sampling.noise import NoiseKey, Stream, gumbel_noise
from engine.sampling.sampler import Sampler, SamplingTask
from engine.sampling_params import Acceptance, SamplingParams, SpeculationParams
from engine.token_tree import EMPTY_TREE, Proposal
from tests.speculation.drafting import (
    BLOCK_SIZE,
    GREEDY,
    Blocks,
    RecordingRunner,
    Text,
    greedy_chain,
    make_drafter,
    next_logits,
    propose,
    random_tokens,
)
from tests.tiny import VOCAB_SIZE, tiny_model

SAMPLED = SamplingParams(
    temperature=0.9,
    top_p=0.95,
    top_k=80,
    min_p=0.001,
    repetition_penalty=1.3,
    frequency_penalty=0.6,
    presence_penalty=0.4,
    logit_bias=((5, 4.0), (17, -100.0)),
    min_tokens=6,
    stop_token_ids=(40, 41, 42),
    seed=11,
    choice=2,
)


@pytest.fixture(scope="module")
def plain() -> PreTrainedModel:
    return tiny_model("llama", attention="eager")


@pytest.fixture
def runner() -> RecordingRunner:
    return RecordingRunner(tiny_model("llama"))


def cache_equals_a_fresh_run(runner: RecordingRunner, arch: str, text: Text, num_tokens: int) -> bool:
    """Whether the keys and values of the first tokens are those of one pass over them."""
    fresh = RecordingRunner(tiny_model(arch))
    table = list(range(num_tokens // BLOCK_SIZE + 1))
    if num_tokens:
        fresh.forward(fresh.build([SequenceSlice(text.tokens[:num_tokens], 0, table, rows=0)]))
    slots = text.slots(num_tokens)
    return all(
        torch.allclose(ours[slots], theirs[:num_tokens], rtol=1e-4, atol=1e-4)
        for mine, other in ((runner.cache.keys, fresh.cache.keys), (runner.cache.values, fresh.cache.values))
        for ours, theirs in zip(mine, other, strict=True)
    )


@pytest.mark.parametrize("arch", ["llama", "mistral", "gpt2"])
def test_any_history_of_verdicts_leaves_the_drafts_right(arch: str) -> None:
    plain = tiny_model(arch, attention="eager")
    runner = RecordingRunner(tiny_model(arch))
    speculator = make_drafter(runner)
    rng = random.Random(1)
    blocks = Blocks()
    texts = [Text(name, random_tokens(5 + index, index), blocks) for index, name in enumerate("abc")]
    for _ in range(8):
        budgets = [rng.randint(1, 5) for _ in texts]
        asked = [text.ask(budget) for text, budget in zip(texts, budgets, strict=True)]
        trees = propose(speculator, *asked)
        for text, tree, budget in zip(texts, trees, budgets, strict=True):
            assert tree.proposal is Proposal.DETERMINISTIC
            assert tree.tokens == greedy_chain(plain, text.tokens, budget)
            assert speculator.num_computed_tokens(text.request_id) == len(text.tokens)
            assert cache_equals_a_fresh_run(runner, arch, text, len(text.tokens))
            text.commit(tree, rng.randint(0, len(tree)), rng)


@pytest.mark.parametrize("num_accepted", [0, 1, 2, 3, 4])
def test_only_what_is_missing_is_computed(runner: RecordingRunner, num_accepted: int) -> None:
    speculator = make_drafter(runner)
    text = Text("a", random_tokens(9, 3), Blocks())
    [tree] = propose(speculator, text.ask(4))
    assert len(tree) == 4
    text.commit(tree, num_accepted, random.Random(0))
    runner.passes.clear()
    propose(speculator, text.ask(1))
    # The new token; after a full acceptance the last draft token too, which was never computed.
    missing = 2 if num_accepted == 4 else 1
    assert [batch.input_ids.tolist() for batch in runner.passes] == [text.tokens[-missing:]]
    assert runner.passes[0].slots.tolist() == text.slots(len(text.tokens))[-missing:]
    assert cache_equals_a_fresh_run(runner, "llama", text, len(text.tokens))


def test_draft_tokens_lie_behind_the_committed_ones(runner: RecordingRunner) -> None:
    speculator = make_drafter(runner)
    text = Text("a", random_tokens(6, 4), Blocks())
    [tree] = propose(speculator, text.ask(4))
    catch_up, *steps = runner.passes
    assert catch_up.slots.tolist() == text.slots(6)
    assert [batch.input_ids.tolist() for batch in steps] == [[token] for token in tree.tokens[:3]]
    assert [batch.positions.tolist() for batch in steps] == [[6], [7], [8]]
    assert [batch.slots.tolist() for batch in steps] == [[slot] for slot in text.slots(9)[6:]]


def test_drafted_tokens_count_only_once_they_are_committed(runner: RecordingRunner) -> None:
    speculator = make_drafter(runner)
    text = Text("a", random_tokens(6, 4), Blocks())
    [tree] = propose(speculator, text.ask(4))
    assert speculator.num_computed_tokens("a") == 6
    text.commit(tree, 4, random.Random(0))
    assert speculator.num_computed_tokens("a") == 6
    propose(speculator, text.ask(1))
    assert speculator.num_computed_tokens("a") == 11


def test_being_asked_again_without_a_new_token(runner: RecordingRunner) -> None:
    speculator = make_drafter(runner)
    text = Text("a", random_tokens(6, 4), Blocks())
    first = propose(speculator, text.ask(3))
    assert propose(speculator, text.ask(3)) == first


def test_a_prompt_is_followed_while_it_is_read(plain: PreTrainedModel, runner: RecordingRunner) -> None:
    speculator = make_drafter(runner)
    text = Text("a", random_tokens(13, 5), Blocks())
    for num_computed in (4, 4, 9):
        assert propose(speculator, text.ask(0, num_computed=num_computed)) == [EMPTY_TREE]
        assert speculator.num_computed_tokens("a") == num_computed
    assert [len(batch.input_ids) for batch in runner.passes] == [4, 5]
    [tree] = propose(speculator, text.ask(3))
    assert [len(batch.input_ids) for batch in runner.passes] == [4, 5, 4, 1, 1]
    assert tree.tokens == greedy_chain(plain, text.tokens, 3)


def test_catching_up_in_steps_of_the_token_limit(plain: PreTrainedModel, runner: RecordingRunner) -> None:
    speculator = make_drafter(runner, max_num_batched_tokens=5)
    blocks = Blocks()
    late = Text("a", random_tokens(12, 6), blocks)
    ready = Text("b", random_tokens(3, 7), blocks)
    reading = Text("c", random_tokens(20, 8), blocks)
    seen = []
    for _ in range(8):
        asked = (late.ask(2), ready.ask(3), reading.ask(0, num_computed=6))
        for text, request, tree in zip((late, ready), asked, propose(speculator, *asked), strict=False):
            assert tree.tokens in ((), greedy_chain(plain, text.tokens, request.budget))
        seen.append([speculator.num_computed_tokens(name) for name in "abc"])
    assert all(len(batch.input_ids) <= 5 for batch in runner.passes)
    # The ready one first; each of the others gets a token at least.
    assert seen[0] == [1, 3, 1]
    assert seen[-1] == [12, 3, 6]
    assert propose(speculator, late.ask(2), ready.ask(3))[0].tokens == greedy_chain(plain, late.tokens, 2)


def test_more_requests_than_tokens_in_a_pass(runner: RecordingRunner) -> None:
    speculator = make_drafter(runner, max_num_batched_tokens=2)
    blocks = Blocks()
    texts = [Text(name, [index], blocks) for index, name in enumerate("abcd")]
    trees = propose(speculator, *(text.ask(2) for text in texts))
    assert [len(tree) for tree in trees] == [2, 2, 0, 0]
    assert all(len(batch.input_ids) <= 2 for batch in runner.passes)


def test_it_starts_where_the_prefix_cache_ends(plain: PreTrainedModel, runner: RecordingRunner) -> None:
    speculator = make_drafter(runner)
    blocks = Blocks()
    first = Text("a", random_tokens(11, 9), blocks)
    propose(speculator, first.ask(2))
    speculator.release("a")
    tokens = [*first.tokens[:8], *random_tokens(5, 10)]
    second = Text("b", tokens, blocks, table=first.table[:2], num_cached=8)
    runner.passes.clear()
    [tree] = propose(speculator, second.ask(3))
    assert runner.passes[0].input_ids.tolist() == tokens[8:]
    assert tree.tokens == greedy_chain(plain, tokens, 3)


def test_a_request_that_lost_its_blocks_starts_anew(plain: PreTrainedModel, runner: RecordingRunner) -> None:
    speculator = make_drafter(runner)
    blocks = Blocks()
    text = Text("a", random_tokens(7, 11), blocks)
    [tree] = propose(speculator, text.ask(3))
    text.commit(tree, 3, random.Random(0))
    speculator.release("a")
    back = replace(text, table=[])
    [tree] = propose(speculator, back.ask(3))
    assert tree.tokens == greedy_chain(plain, back.tokens, 3)


def test_padded_ids_are_never_drafted() -> None:
    module = tiny_model("llama", vocab_size=272)
    plain = tiny_model("llama", attention="eager", vocab_size=272)
    # Make the padding the favourite everywhere: a cut in the wrong place would choose it.
    for model in (module, plain):
        model.lm_head.weight.data[VOCAB_SIZE:] = 8 * model.lm_head.weight.data[: 272 - VOCAB_SIZE]
    speculator = make_drafter(RecordingRunner(module))
    text = Text("a", random_tokens(8, 12), Blocks())
    [tree] = propose(speculator, text.ask(5))
    assert tree.tokens == greedy_chain(plain, text.tokens, 5)
    rejection = SpeculationParams(acceptance=Acceptance.REJECTION)
    text = Text("b", text.tokens, Blocks(1), SamplingParams(seed=1, ignore_eos=True, speculation=rejection))
    [tree] = propose(speculator, text.ask(5))
    for distribution in tree.distributions:
        assert isinstance(distribution, torch.Tensor)
        assert distribution.shape == (VOCAB_SIZE,)


def test_the_drafts_context_is_a_limit(runner: RecordingRunner) -> None:
    speculator = make_drafter(runner, max_model_len=12)
    assert speculator.requirements.max_model_len == 12
    lengths = {"a": 8, "b": 10, "c": 11, "d": 12, "e": 30}
    blocks = Blocks()
    texts = [Text(name, random_tokens(length, 13), blocks) for name, length in lengths.items()]
    trees = propose(speculator, *(text.ask(4) for text in texts))
    assert [len(tree) for tree in trees] == [4, 2, 1, 0, 0]
    assert max(int(batch.positions.max()) for batch in runner.passes) < 12


@pytest.mark.parametrize(("temperature", "ignore_eos"), [(0.0, False), (0.0, True), (0.7, False)])
def test_a_chain_ends_with_the_end_of_the_answer(
    runner: RecordingRunner, temperature: float, ignore_eos: bool
) -> None:
    params = SamplingParams(temperature=temperature, seed=3, ignore_eos=True)
    prompt = random_tokens(8, 14)
    [free] = propose(make_drafter(runner), Text("a", prompt, Blocks(), params).ask(5))
    eos = free.tokens[2]
    expected = 5 if ignore_eos else free.tokens.index(eos) + 1
    blocks = Blocks(1)
    ending = Text("a", prompt, blocks, replace(params, ignore_eos=ignore_eos))
    other = Text("b", prompt, blocks, params)
    speculator = make_drafter(runner, eos_token_ids=frozenset({eos}))
    trees = propose(speculator, ending.ask(5), other.ask(5))
    assert trees[0].tokens == free.tokens[:expected]
    assert trees[1].tokens == free.tokens


@pytest.mark.parametrize("params", [SAMPLED, replace(SAMPLED, temperature=0.0), SamplingParams(seed=-5)])
def test_coupled_draws_are_the_choices_of_a_target_that_equals_the_draft(
    plain: PreTrainedModel,
    runner: RecordingRunner,
    params: SamplingParams,
) -> None:
    eos = frozenset({1, 2, 3})
    speculator = make_drafter(runner, eos_token_ids=eos)
    texts = [Text(name, random_tokens(6, seed), Blocks(seed), params) for seed, name in enumerate("abcdef")]
    drafted = 0
    for text in texts:
        text.num_prompt = 4
        [tree] = propose(speculator, text.ask(7))
        assert tree.proposal is (Proposal.DETERMINISTIC if params.is_greedy else Proposal.COUPLED)
        emitted = list(text.tokens)
        for token in tree.tokens:
            task = SamplingTask(params, list(emitted), text.num_prompt, EMPTY_TREE, eos)
            [run] = Sampler()(next_logits(plain, emitted), [task])
            assert token == run.token_ids[0]
            emitted.append(token)
        drafted += len(tree)
    assert drafted > 20


def test_sampled_draws_come_with_what_they_were_drawn_from(
    plain: PreTrainedModel, runner: RecordingRunner
) -> None:
    params = replace(SAMPLED, speculation=SpeculationParams(acceptance=Acceptance.REJECTION))
    eos = frozenset({1, 2, 3})
    speculator = make_drafter(runner, eos_token_ids=eos)
    text = Text("a", random_tokens(6, 15), Blocks(), params)
    [tree] = propose(speculator, text.ask(6))
    assert tree.proposal is Proposal.SAMPLED
    assert len(tree) == 6
    emitted = list(text.tokens)
    for token, distribution in zip(tree.tokens, tree.distributions, strict=True):
        assert isinstance(distribution, torch.Tensor)
        assert distribution.dtype is torch.float32
        group = RowGroup(params, list(emitted), text.num_prompt, eos)
        processed = process_logits(next_logits(plain, emitted), [group])[0]
        assert torch.allclose(distribution, processed.softmax(-1), rtol=1e-3, atol=1e-6)
        assert torch.equal(distribution > 0, processed > -torch.inf)
        key = NoiseKey(11, 2, len(emitted), Stream.DRAFT)
        noise = gumbel_noise([key], VOCAB_SIZE, torch.device("cpu"))[0]
        assert token == int((processed.double() + noise).argmax())
        emitted.append(token)


def test_each_request_of_a_batch_is_drawn_its_own_way(runner: RecordingRunner) -> None:
    rejection = replace(SAMPLED, speculation=SpeculationParams(acceptance=Acceptance.REJECTION))
    kinds = {"a": GREEDY, "b": SAMPLED, "c": rejection}
    alone = {}
    for name, params in kinds.items():
        text = Text(name, random_tokens(6, 16), Blocks(), params)
        [alone[name]] = propose(make_drafter(runner), text.ask(4))
    blocks = Blocks()
    texts = [Text(name, random_tokens(6, 16), blocks, params) for name, params in kinds.items()]
    together = propose(make_drafter(runner), *(text.ask(4) for text in texts))
    assert [tree.tokens for tree in together] == [tree.tokens for tree in alone.values()]
    assert [tree.proposal for tree in together] == [
        Proposal.DETERMINISTIC,
        Proposal.COUPLED,
        Proposal.SAMPLED,
    ]


@pytest.mark.parametrize("failing_pass", [1, 2, 3])
@pytest.mark.parametrize("num_accepted", [0, 2, 4])
def test_a_failed_pass_leaves_the_cache_as_it_is_known(
    plain: PreTrainedModel,
    runner: RecordingRunner,
    failing_pass: int,
    num_accepted: int,
) -> None:
    speculator = make_drafter(runner)
    blocks = Blocks()
    rng = random.Random(2)
    texts = [Text(name, random_tokens(6, seed), blocks) for seed, name in enumerate("ab")]
    for text, tree in zip(texts, propose(speculator, *(text.ask(4) for text in texts)), strict=True):
        text.commit(tree, num_accepted, rng)
    fatal = len(runner.passes) + failing_pass
    runner.fails = lambda number: number == fatal
    with pytest.raises(RuntimeError, match="planted"):
        propose(speculator, *(text.ask(4) for text in texts))
    for text in texts:
        known = speculator.num_computed_tokens(text.request_id)
        assert known == (6 if failing_pass == 1 else len(text.tokens))
        assert cache_equals_a_fresh_run(runner, "llama", text, known)
        # The step that failed had no drafts, so plain decoding adds a token, perhaps the one drafted.
        text.tokens += greedy_chain(plain, text.tokens, 1 + num_accepted // 2)
    for text, tree in zip(texts, propose(speculator, *(text.ask(4) for text in texts)), strict=True):
        assert tree.tokens == greedy_chain(plain, text.tokens, 4)
        assert cache_equals_a_fresh_run(runner, "llama", text, len(text.tokens))


def test_an_end_id_that_min_tokens_keeps_away_is_not_drafted(runner: RecordingRunner) -> None:
    prompt = random_tokens(8, 17)
    [free] = propose(make_drafter(runner), Text("a", prompt, Blocks()).ask(5))
    params = SamplingParams(temperature=0.0, min_tokens=5)
    speculator = make_drafter(runner, eos_token_ids=frozenset(free.tokens))
    [tree] = propose(speculator, Text("a", prompt, Blocks(1), params).ask(5))
    assert len(tree) == 5
    assert not set(tree.tokens) & set(free.tokens)
