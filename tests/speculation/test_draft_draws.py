"""Which tokens the draft model draws from its rows, against transformers' own forward passes."""

from dataclasses import replace

import pytest
import torch
from transformers import PreTrainedModel

from engine.sampling.logits import process_logits
from engine.sampling.noise import NoiseKey, Stream, gumbel_noise
from engine.sampling.row_group import RowGroup
from engine.sampling.sampler import Sampler, SamplingTask
from engine.sampling_params import Acceptance, SamplingParams, SpeculationParams
from engine.token_tree import EMPTY_TREE, Proposal
from tests.speculation.drafting import (
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


def test_an_end_id_that_min_tokens_keeps_away_is_not_drafted(runner: RecordingRunner) -> None:
    prompt = random_tokens(8, 17)
    [free] = propose(make_drafter(runner), Text("a", prompt, Blocks()).ask(5))
    params = SamplingParams(temperature=0.0, min_tokens=5)
    speculator = make_drafter(runner, eos_token_ids=frozenset(free.tokens))
    [tree] = propose(speculator, Text("a", prompt, Blocks(1), params).ask(5))
    assert len(tree) == 5
    assert not set(tree.tokens) & set(free.tokens)
