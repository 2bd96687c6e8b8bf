"""The motion of the draft model's cache, and greedy proposals against transformers' own forward passes."""

import random
from dataclasses import replace

import pytest
import torch
from transformers import PreTrainedModel

from engine.model.input_batch import SequenceSlice
from engine.token_tree import EMPTY_TREE, Proposal
from tests.speculation.drafting import (
    BLOCK_SIZE,
    Blocks,
    RecordingRunner,
    Text,
    greedy_chain,
    make_drafter,
    propose,
    random_tokens,
)
from tests.tiny import tiny_model


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


def test_the_drafts_context_is_a_limit(runner: RecordingRunner) -> None:
    speculator = make_drafter(runner, max_model_len=12)
    assert speculator.requirements.max_model_len == 12
    lengths = {"a": 8, "b": 10, "c": 11, "d": 12, "e": 30}
    blocks = Blocks()
    texts = [Text(name, random_tokens(length, 13), blocks) for name, length in lengths.items()]
    trees = propose(speculator, *(text.ask(4) for text in texts))
    assert [len(tree) for tree in trees] == [4, 2, 1, 0, 0]
    assert max(int(batch.positions.max()) for batch in runner.passes) < 12


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
        # What stood of the last draft is in the cache before anything is computed; its last token never was.
        assert known == (6 + min(num_accepted, 3) if failing_pass == 1 else len(text.tokens))
        assert cache_equals_a_fresh_run(runner, "llama", text, known)
        # The step that failed had no drafts, so plain decoding adds a token, perhaps the one drafted.
        text.tokens += greedy_chain(plain, text.tokens, 1 + num_accepted // 2)
    for text, tree in zip(texts, propose(speculator, *(text.ask(4) for text in texts)), strict=True):
        assert tree.tokens == greedy_chain(plain, text.tokens, 4)
        assert cache_equals_a_fresh_run(runner, "llama", text, len(text.tokens))
