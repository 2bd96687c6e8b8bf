"""Branching drafts through the whole engine: the right path is found, and its keys and values put in line."""

import random
from dataclasses import replace

import pytest
import torch

from engine.engine_core import EngineCore
from engine.llm import LLM
from engine.sampling_params import Acceptance, SamplingParams, SpeculationParams
from engine.speculation.base import DraftRequest
from engine.token_tree import TokenTree
from tests.engine.answers import PROMPT, build_scripted, essence, plain_answer, run, target
from tests.engines import build_llm, load_tiny
from tests.scripted import Script, fixed, forced, per_prompt
from tests.tiny import VOCAB_SIZE

GREEDY = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
SEEDED = replace(GREEDY, temperature=0.9, seed=8, frequency_penalty=0.5, logprobs=1)
BOTH = pytest.mark.parametrize("wishes", [GREEDY, SEEDED], ids=["greedy", "seeded"])


def random_trees(answer: list[int], seed: int) -> Script:
    """The right path, as deep as chance wills, with wrong branches before, between and below its nodes."""
    rng = random.Random(seed)

    def script(request: DraftRequest) -> TokenTree:
        begin = len(request.token_ids) - request.num_prompt_tokens
        tokens: list[int] = []
        parents: list[int] = []
        last_right = depth = 0
        while len(tokens) < request.budget:
            right = answer[begin + depth] if begin + depth < len(answer) else None
            if right is not None and rng.random() < 0.45:
                tokens.append(right)
                parents.append(last_right)
                last_right = len(tokens)
                depth += 1
            else:
                parents.append(rng.randrange(len(tokens) + 1))
                # Siblings differ: no wrong child says what the right one, or another, says.
                taken = {t for t, p in zip(tokens, parents, strict=False) if p == parents[-1]} | {right}
                tokens.append(rng.choice([token for token in range(VOCAB_SIZE) if token not in taken]))
        return TokenTree(tuple(tokens), tuple(parents))

    return script


@BOTH
@pytest.mark.parametrize("k", [2, 3, 5, 8, 16, 40, 63])
def test_the_right_branch_is_found(k: int, wishes: SamplingParams) -> None:
    expected = plain_answer(wishes)
    llm, _ = build_scripted(forced(expected.token_ids, branching=True), k=k)
    answer = run(llm, {"a": (PROMPT, wishes)})["a"]
    assert essence(answer) == essence(expected)
    assert answer.speculation.num_accepted_tokens > 10


@BOTH
@pytest.mark.parametrize("seed", range(6))
def test_random_trees_alone_and_batched(seed: int, wishes: SamplingParams) -> None:
    prompts = [PROMPT, tuple(b"abcabc"), tuple(b"q"), tuple(b"x = 1\ny = 2\nx")]
    expected = {prompt: plain_answer(wishes, prompt) for prompt in prompts}
    scripts = {prompt: random_trees(answer.token_ids, seed) for prompt, answer in expected.items()}
    llm, _ = build_scripted(per_prompt(scripts), k=random.Random(seed).choice([6, 12, 24]), num_kv_blocks=90)
    answers = run(llm, {f"{i}": (prompt, wishes) for i, prompt in enumerate(prompts)})
    for i, prompt in enumerate(prompts):
        assert essence(answers[f"{i}"]) == essence(expected[prompt])
    assert sum(answer.speculation.num_accepted_tokens for answer in answers.values()) > 20


@BOTH
def test_trees_of_wrong_branches_only(wishes: SamplingParams) -> None:
    expected = plain_answer(wishes)
    said = set(expected.token_ids)
    wrong = [token for token in range(VOCAB_SIZE) if token not in said][:7]
    tree = TokenTree(tuple(wrong), (0, 0, 1, 1, 2, 3, 6))
    llm, _ = build_scripted(fixed(tree), k=7)
    answer = run(llm, {"a": (PROMPT, wishes)})["a"]
    assert essence(answer) == essence(expected)
    assert answer.speculation.num_accepted_tokens == 0
    assert answer.speculation.num_draft_tokens > 100


@BOTH
def test_the_deepest_branch_is_accepted_from_behind_wide_siblings(wishes: SamplingParams) -> None:
    """Level by level three wrong siblings in front: the accepted nodes are 4, 8, 12 and 16."""
    expected = plain_answer(wishes)

    def script(request: DraftRequest) -> TokenTree:
        begin = len(request.token_ids) - request.num_prompt_tokens
        right = expected.token_ids[begin : begin + 4]
        tokens: list[int] = []
        for token in right:
            tokens += [(token + 1) % VOCAB_SIZE, (token + 2) % VOCAB_SIZE, (token + 3) % VOCAB_SIZE, token]
        return TokenTree(tuple(tokens), tuple(4 * level for level in range(len(right)) for _ in range(4)))

    llm, _ = build_scripted(script, k=16)
    answer = run(llm, {"a": (PROMPT, wishes)})["a"]
    assert essence(answer) == essence(expected)
    # Five tokens a step until the room left is below sixteen nodes.
    assert answer.speculation.num_steps < 16


def cached_rows(core: EngineCore, count: int) -> list[torch.Tensor]:
    """Keys and values of the only request's first tokens, layer by layer."""
    [request] = core.scheduler.running
    assert request.num_computed_tokens >= count
    slots = torch.tensor([core.scheduler.kv.slot(request, index) for index in range(count)])
    cache = core._runner.cache
    return [tensor[slots] for tensor in (*cache.keys, *cache.values)]


def stopped_before_the_end(llm: LLM, wishes: SamplingParams, num_output: int) -> EngineCore:
    core = llm.core
    core.add_request("a", PROMPT, wishes)
    while not core.scheduler.running or core.scheduler.running[0].num_output_tokens < num_output:
        core.step()
    return core


@BOTH
@pytest.mark.parametrize("arch", ["llama", "mistral", "gpt2"])
def test_accepted_nodes_move_to_where_their_tokens_belong(arch: str, wishes: SamplingParams) -> None:
    model = target() if arch == "llama" else load_tiny(arch)
    plain = build_llm("none", target=model, prefix_caching=False)
    answer = build_llm("none", target=model, prefix_caching=False).generate([PROMPT], wishes)[0]
    llm, _ = build_scripted(forced(answer.token_ids, branching=True), model, k=9, prefix_caching=False)
    ours = stopped_before_the_end(llm, wishes, 20)
    theirs = stopped_before_the_end(plain, wishes, 20)
    count = len(PROMPT) + 19
    for found, expected in zip(cached_rows(ours, count), cached_rows(theirs, count), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("arch", ["mistral", "gemma3_text", "gpt_oss", "gpt2"])
def test_trees_on_other_architectures(arch: str) -> None:
    model = load_tiny(arch)
    expected = build_llm("none", target=model).generate([PROMPT], GREEDY)[0]
    llm, _ = build_scripted(random_trees(expected.token_ids, 3), model, k=12)
    answer = run(llm, {"a": (PROMPT, GREEDY)})["a"]
    assert essence(answer) == essence(expected)
    assert answer.speculation.num_accepted_tokens > 5


def test_trees_that_were_not_drawn_are_matched_under_either_rule() -> None:
    expected = plain_answer(SEEDED)
    llm, _ = build_scripted(forced(expected.token_ids, branching=True), k=8, method="draft_model")
    wishes = replace(SEEDED, speculation=SpeculationParams(acceptance=Acceptance.REJECTION))
    assert essence(run(llm, {"a": (PROMPT, wishes)})["a"]) == essence(expected)


def test_answers_cached_from_trees_serve_later_requests() -> None:
    """The prefix cache gets what the accepted nodes left behind."""
    expected = plain_answer(GREEDY)
    llm, _ = build_scripted(per_prompt({PROMPT: forced(expected.token_ids, branching=True)}), k=10)
    first = run(llm, {"a": (PROMPT, GREEDY)})["a"]
    longer = (*PROMPT, *first.token_ids)
    later = run(llm, {"b": (longer, GREEDY)})["b"]
    assert later.num_cached_tokens > len(PROMPT) + 30
    assert essence(later) == essence(plain_answer(GREEDY, longer))
