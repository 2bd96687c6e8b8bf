"""A draft model's trees: their tokens against transformers' own forward passes, the motion of its cache."""

import random
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from transformers import PreTrainedModel

from engine.sampling.logits import process_logits
from engine.sampling.noise import Stream, gumbel_noise
from engine.sampling.row_group import RowGroup
from engine.sampling_params import Acceptance, SamplingParams, SpeculationParams
from engine.speculation.drawing import DrawingStyle
from engine.speculation.growth import DynamicGardener, Gardener, SequoiaGardener, StaticGardener
from engine.speculation.tree_shape import PRIOR_RATES, TreeShape, likeliest_shape
from engine.token_tree import Proposal, TokenTree
from tests.speculation.drafting import (
    GREEDY,
    Blocks,
    RecordingRunner,
    Text,
    make_drafter,
    next_logits,
    propose,
    random_tokens,
)
from tests.speculation.test_draft_model import cache_equals_a_fresh_run
from tests.tiny import VOCAB_SIZE, tiny_model


def static(*widths: int) -> Gardener:
    return StaticGardener(likeliest_shape(PRIOR_RATES, 63, widths))


GARDENERS: dict[str, Callable[[], Gardener]] = {
    "static": lambda: static(3, 2, 1, 1),
    "wide": lambda: static(5, 3),
    "deep": lambda: static(2, 1, 1, 1, 1, 1, 1, 1),
    "sequoia": lambda: SequoiaGardener(12, 5),
    "dynamic": lambda: DynamicGardener(14, 4, 3),
}
SAMPLED = SamplingParams(seed=11, temperature=0.8, top_k=20, choice=1, frequency_penalty=0.4, ignore_eos=True)
RATIO = replace(SAMPLED, speculation=SpeculationParams(acceptance=Acceptance.REJECTION))


def commit(text: Text, tree: TokenTree, rng: random.Random) -> None:
    """A verdict: the tokens along a path of the tree, and one that is no child of its last node."""
    node = rng.randint(0, len(tree))
    children = {tree.tokens[child - 1] for child in tree.children(node)}
    text.tokens += tree.path_tokens(node)
    text.tokens.append(rng.choice([token for token in range(VOCAB_SIZE) if token not in children]))


def expected_children(plain: PreTrainedModel, text: Text, path: tuple[int, ...], count: int) -> list[int]:
    """The first `count` of log q plus the noise of the depth, from a full forward pass."""
    group = RowGroup(text.params, text.tokens, text.num_prompt, frozenset(), (path,))
    scores = process_logits(next_logits(plain, [*text.tokens, *path]), [group]).double()
    if not text.params.is_greedy:
        ratio = text.params.speculation.acceptance is Acceptance.REJECTION
        key = group.noise_key(len(path), Stream.DRAFT if ratio else Stream.TARGET)
        scores += gumbel_noise([key], VOCAB_SIZE, scores.device)
    best: list[int] = scores[0].topk(count).indices.tolist()
    return best


@pytest.mark.parametrize("params", [GREEDY, SAMPLED, RATIO], ids=["greedy", "coupled", "ratio rule"])
@pytest.mark.parametrize(
    ("arch", "gardener"),
    [
        *((arch, gardener) for arch in ("llama", "mistral", "gpt2") for gardener in ("static", "sequoia")),
        ("llama", "wide"),
        # Deeper than the window: a node's first ancestors lie outside of it, by positions and not by slots.
        ("mistral", "deep"),
    ],
)
def test_any_history_of_verdicts_leaves_the_trees_right(
    arch: str, gardener: str, params: SamplingParams
) -> None:
    plain = tiny_model(arch, attention="eager")
    runner = RecordingRunner(tiny_model(arch))
    speculator = make_drafter(runner, gardener=GARDENERS[gardener]())
    rng = random.Random(3)
    blocks = Blocks()
    texts = [Text(name, random_tokens(5 + index, index), blocks, params) for index, name in enumerate("ab")]
    for _ in range(5):
        for text, tree in zip(texts, propose(speculator, *(text.ask(21) for text in texts)), strict=True):
            assert len(tree) > 8
            for node in sorted(set(tree.parents)):
                found = [tree.tokens[child - 1] for child in tree.children(node)]
                assert found == expected_children(plain, text, tree.path_tokens(node), len(found))
            assert cache_equals_a_fresh_run(runner, arch, text, len(text.tokens))
            commit(text, tree, rng)


@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "coupled"])
def test_a_dynamic_tree_holds_the_likeliest_nodes(params: SamplingParams) -> None:
    """Against a search that looks at every node within the levels and the children per node."""
    plain = tiny_model("llama", attention="eager")
    text = Text("a", random_tokens(6, 8), Blocks(), params)
    [tree] = propose(
        make_drafter(RecordingRunner(tiny_model("llama")), gardener=DynamicGardener(9, 3, 2)), text.ask(9)
    )
    found: dict[tuple[int, ...], float] = {(): 0.0}
    for depth in range(3):
        for path in [path for path in found if len(path) == depth]:
            group = RowGroup(params, text.tokens, text.num_prompt, frozenset(), (path,))
            scores = process_logits(next_logits(plain, [*text.tokens, *path]), [group]).double()
            if not params.is_greedy:
                key = group.noise_key(depth, Stream.TARGET)
                scores += gumbel_noise([key], VOCAB_SIZE, scores.device)
            shares = scores.log_softmax(-1)[0]
            for token in shares.topk(2).indices.tolist():
                found[*path, token] = found[path] + float(shares[token])
    best = sorted(found, key=lambda path: -found[path])[1:10]
    assert [tree.path_tokens(node) for node in range(1, len(tree) + 1)] == best


@pytest.mark.parametrize("gardener", GARDENERS)
@pytest.mark.parametrize("seed", range(3))
def test_accepted_nodes_are_not_computed_again(gardener: str, seed: int) -> None:
    runner = RecordingRunner(tiny_model("mistral"))
    speculator = make_drafter(runner, gardener=GARDENERS[gardener]())
    rng = random.Random(seed)
    text = Text("a", random_tokens(9, seed), Blocks())
    moved = 0
    for _ in range(6):
        [tree] = propose(speculator, text.ask(21))
        num_computed = len(text.tokens)
        placed = speculator._progress["a"].placed
        commit(text, tree, rng)
        runner.passes.clear()
        propose(speculator, text.ask(21))
        # The new token, and before it the last accepted one if it was a leaf: drawn but not computed.
        new = text.tokens[num_computed:]
        known = max(
            len(path)
            for node in range(len(placed) + 1)
            if (path := placed.path_tokens(node)) == tuple(new[: len(path)])
        )
        assert runner.passes[0].input_ids.tolist() == new[known:]
        assert len(new) - known <= 2
        moved += known > 0
        assert cache_equals_a_fresh_run(runner, "mistral", text, len(text.tokens))
    assert moved


def test_a_pass_per_level_for_all_requests(plain: PreTrainedModel, runner: RecordingRunner) -> None:
    speculator = make_drafter(runner, gardener=static(3, 2, 1, 1))
    blocks = Blocks()
    texts = [Text(name, random_tokens(6, index), blocks) for index, name in enumerate("ab")]
    trees = propose(speculator, *(text.ask(21) for text in texts))
    # The last level's tokens are drawn from the rows of the one before it and need no pass.
    assert [len(batch.input_ids) for batch in runner.passes] == [12, 6, 12, 12]
    assert [set(batch.positions.tolist()) for batch in runner.passes[1:]] == [{6}, {7}, {8}]
    for text, tree in zip(texts, trees, strict=True):
        assert len(tree) == 21
        slots = set(text.slots(6 + 21)[6:])
        own = [slot for batch in runner.passes[1:] for slot in batch.slots.tolist() if slot in slots]
        assert len(own) == len(set(own)) == 15


@pytest.mark.parametrize("limit", [1, 2, 5, 7])
def test_levels_larger_than_a_pass_are_split(limit: int) -> None:
    blocks = Blocks()
    texts = [Text(name, [index, 5], blocks) for index, name in enumerate("ab")]
    whole = propose(
        make_drafter(RecordingRunner(tiny_model("mistral")), gardener=static(3, 2, 2)),
        *(text.ask(21) for text in texts),
    )
    runner = RecordingRunner(tiny_model("mistral"))
    speculator = make_drafter(runner, gardener=static(3, 2, 2), max_num_batched_tokens=limit)
    for _ in range(4):
        split = propose(speculator, *(text.ask(21) for text in texts))
    assert all(len(batch.input_ids) <= limit for batch in runner.passes)
    for ours, theirs in zip(split, whole, strict=True):
        assert (ours.tokens, ours.parents) in ((theirs.tokens, theirs.parents), ((), ()))
    assert any(len(tree) for tree in split)


def test_nothing_hangs_off_the_end_of_an_answer(runner: RecordingRunner) -> None:
    prompt = random_tokens(8, 14)
    params = replace(GREEDY, ignore_eos=False)
    [free] = propose(
        make_drafter(runner, gardener=static(3, 2, 1)), Text("a", prompt, Blocks(), params).ask(15)
    )
    eos = free.tokens[0]
    speculator = make_drafter(runner, gardener=static(3, 2, 1), eos_token_ids=frozenset({eos}))
    [tree] = propose(speculator, Text("a", prompt, Blocks(1), params).ask(15))
    ends = [node for node, token in enumerate(tree.tokens, start=1) if token == eos]
    assert ends
    assert not any(tree.children(node) for node in ends)
    assert {tree.path_tokens(node) for node in range(len(tree) + 1)} == {
        path for node in range(len(free) + 1) if eos not in (path := free.path_tokens(node))[:-1]
    }


@pytest.mark.parametrize("max_depth", [1, 2, 3, 9])
@pytest.mark.parametrize("gardener", GARDENERS)
def test_short_room_costs_levels(runner: RecordingRunner, gardener: str, max_depth: int) -> None:
    text = Text("a", random_tokens(6, 1), Blocks())
    request = replace(text.ask(14), max_depth=max_depth)
    [tree] = propose(make_drafter(runner, gardener=GARDENERS[gardener]()), request)
    assert max(tree.depths()) <= max_depth
    assert len(tree.children(0)) > 1


@pytest.mark.parametrize("gardener", GARDENERS)
@pytest.mark.parametrize("budget", [1, 2, 5, 14, 40])
def test_no_slot_behind_the_budget_is_written(gardener: str, budget: int) -> None:
    runner = RecordingRunner(tiny_model("llama"))
    speculator = make_drafter(runner, gardener=GARDENERS[gardener]())
    text = Text("a", random_tokens(6, 1), Blocks())
    rng = random.Random(0)
    for _ in range(4):
        request = text.ask(budget)
        allowed = set(text.slots(len(text.tokens) + budget))
        [tree] = propose(speculator, request)
        assert 0 < len(tree) <= budget
        assert all(set(batch.slots.tolist()) <= allowed for batch in runner.passes)
        commit(text, tree, rng)


def test_scratch_slots_that_others_may_have_written_over_are_not_trusted() -> None:
    """Whoever sits a step out may share its new blocks with a request that computes them anew."""
    runner = RecordingRunner(tiny_model("llama"))
    speculator = make_drafter(runner, gardener=static(2, 2, 2))
    blocks = Blocks()
    text = Text("a", random_tokens(7, 1), blocks)
    [tree] = propose(speculator, text.ask(14))
    begin = len(text.tokens)
    node = next(n for n, depth in enumerate(tree.depths()) if depth == 2 and tree.path(n)[0] != 1)
    text.tokens += [*tree.path_tokens(node), *random_tokens(6, 2)]
    # Another request with the same beginning holds the same blocks, and its cache starts further back.
    num_shared = len(text.tokens) // 4 * 4
    other = Text("b", [*text.tokens[:num_shared], 3], blocks, table=text.table[: num_shared // 4])
    blocks.extend(text.table, len(text.tokens))
    other.table = text.table[: num_shared // 4]
    propose(speculator, other.ask(14))
    runner.passes.clear()
    propose(speculator, text.ask(14))
    assert runner.passes[0].input_ids.tolist() == text.tokens[begin:]
    assert cache_equals_a_fresh_run(runner, "llama", text, len(text.tokens))


@pytest.mark.parametrize("failing_pass", [1, 2, 3])
def test_a_failed_pass_leaves_the_cache_as_it_is_known(runner: RecordingRunner, failing_pass: int) -> None:
    speculator = make_drafter(runner, gardener=static(2, 2, 2))
    rng = random.Random(2)
    text = Text("a", random_tokens(6, 0), Blocks())
    for _ in range(4):
        [tree] = propose(speculator, text.ask(14))
        commit(text, tree, rng)
        fatal = len(runner.passes) + failing_pass
        runner.fails = lambda number, fatal=fatal: number == fatal  # type: ignore[misc]
        with pytest.raises(RuntimeError, match="planted"):
            propose(speculator, text.ask(14))
        known = speculator.num_computed_tokens("a")
        assert cache_equals_a_fresh_run(runner, "llama", text, known)
        # The step that failed had no drafts, so plain decoding adds a token, perhaps one that was drafted.
        placed = speculator._progress["a"].placed
        text.tokens.append(placed.tokens[1] if len(placed) > 1 else 7)
        propose(speculator, text.ask(14))
        assert cache_equals_a_fresh_run(runner, "llama", text, len(text.tokens))


@pytest.mark.parametrize(
    ("acceptance", "style", "proposal"),
    [
        (Acceptance.MATCH, DrawingStyle(branches=True), Proposal.COUPLED),
        (Acceptance.MATCH, DrawingStyle(couples=False, branches=True), Proposal.DETERMINISTIC),
        (Acceptance.REJECTION, DrawingStyle(branches=True), Proposal.SAMPLED_DISTINCT),
        (Acceptance.REJECTION, DrawingStyle(with_replacement=True, branches=True), Proposal.SAMPLED),
        (Acceptance.REJECTION, DrawingStyle(couples=False, branches=True), Proposal.SAMPLED_DISTINCT),
        (Acceptance.REJECTION, DrawingStyle(), Proposal.SAMPLED),
    ],
)
def test_the_rule_and_the_settings_say_how_tokens_are_drawn(
    runner: RecordingRunner, acceptance: Acceptance, style: DrawingStyle, proposal: Proposal
) -> None:
    params = replace(SAMPLED, speculation=SpeculationParams(acceptance=acceptance))
    speculator = make_drafter(runner, gardener=static(3, 2), style=style)
    [tree] = propose(speculator, Text("a", random_tokens(6, 3), Blocks(), params).ask(9))
    assert tree.proposal is proposal
    assert len(tree.distributions) == (len(tree) if proposal.is_drawn else 0)
    for node in range(len(tree) + 1):
        children = tree.children(node)
        if proposal.is_drawn:
            assert len({id(tree.distributions[child - 1]) for child in children}) <= 1
        if proposal is not Proposal.SAMPLED:
            assert len({tree.tokens[child - 1] for child in children}) == len(children)
    [cold] = propose(
        speculator, Text("b", random_tokens(6, 3), Blocks(1), replace(params, temperature=0.0)).ask(9)
    )
    assert cold.proposal is Proposal.DETERMINISTIC


def test_recorded_distributions_are_the_parents_own(plain: PreTrainedModel, runner: RecordingRunner) -> None:
    text = Text("a", random_tokens(6, 3), Blocks(), RATIO)
    [tree] = propose(make_drafter(runner, gardener=static(3, 2)), text.ask(9))
    for node, parent in enumerate(tree.parents, start=1):
        path = tree.path_tokens(parent)
        group = RowGroup(RATIO, text.tokens, text.num_prompt, frozenset(), (path,))
        q = process_logits(next_logits(plain, [*text.tokens, *path]), [group])[0].softmax(-1)
        recorded = tree.distributions[node - 1]
        assert isinstance(recorded, torch.Tensor)
        torch.testing.assert_close(recorded, q, rtol=1e-3, atol=1e-6)


def test_a_dynamic_tree_is_never_drawn_for_a_ratio_rule(runner: RecordingRunner) -> None:
    speculator = make_drafter(runner, gardener=GARDENERS["dynamic"]())
    with pytest.raises(ValueError, match="no ratio rule holds"):
        propose(speculator, Text("a", [1, 2, 3], Blocks(), RATIO).ask(9))


def test_sequoias_shape_follows_the_verdicts(runner: RecordingRunner) -> None:
    speculator = make_drafter(runner, gardener=SequoiaGardener(8, 8))
    text = Text("a", random_tokens(6, 1), Blocks())
    shapes = []
    for _ in range(40):
        [tree] = propose(speculator, text.ask(8))
        shapes.append(tree.parents)
        # Always the likeliest path, to its end.
        text.tokens += [*tree.path_tokens(max(range(len(tree) + 1), key=lambda n: (tree.depths()[n], -n))), 7]
        if len(text.tokens) > 150:
            speculator.release("a")
            text = Text("a", random_tokens(6, 1), Blocks())
    assert shapes[0] != TreeShape.chain(8).parents
    assert shapes[-1] == TreeShape.chain(8).parents
