"""With the target as its own draft every draft token stands: a standing test against shifts by one."""

from dataclasses import replace

import pytest

from engine.sampling_params import Acceptance, SamplingParams, SpeculationParams
from tests.engine.answers import PROMPT, essence, plain_answer, run, target
from tests.engines import build_llm, load_tiny

GREEDY = SamplingParams(temperature=0.0, max_tokens=32, ignore_eos=True)
WISHES = {
    "greedy": GREEDY,
    "coupled": replace(GREEDY, temperature=0.9, seed=4),
    "coupled, every option": replace(
        GREEDY,
        temperature=1.3,
        seed=5,
        top_p=0.95,
        top_k=60,
        min_p=0.01,
        frequency_penalty=0.7,
        repetition_penalty=1.3,
        logit_bias=((97, 3.0),),
        min_tokens=9,
    ),
    "ratio rule": replace(
        GREEDY, temperature=0.9, seed=6, speculation=SpeculationParams(acceptance=Acceptance.REJECTION)
    ),
}


@pytest.mark.parametrize("wishes", WISHES.values(), ids=WISHES.keys())
@pytest.mark.parametrize("k", [1, 3, 5])
@pytest.mark.parametrize("arch", ["llama", "mistral", "gpt2"])
def test_every_draft_token_is_accepted(arch: str, k: int, wishes: SamplingParams) -> None:
    model = target() if arch == "llama" else load_tiny(arch)
    llm = build_llm("draft_model", target=model, draft=model, num_draft_tokens=k)
    answer = run(llm, {"a": (PROMPT, wishes)})["a"]
    stats = answer.speculation
    assert stats.num_committed_tokens == len(answer.token_ids) == 32
    assert stats.num_accepted_tokens == stats.num_draft_tokens
    # The prompt's step gives the first token, each further one k drafted and one more.
    assert stats.num_steps == 1 + -(-31 // (k + 1))
    assert stats.num_accepted_tokens == 32 - stats.num_steps
    if wishes.speculation.acceptance is Acceptance.MATCH and arch == "llama":
        assert essence(answer) == essence(plain_answer(wishes))


TREES = {
    # Each with the levels of its likeliest path.
    "2,2": 2,
    "3,2,1,1": 4,
    "2,1,1,1,1,1": 6,
    "{shape: sequoia, max_nodes: 20, max_depth: 3}": 3,
    "{shape: dynamic, max_nodes: 40, max_depth: 3, top_k: 3}": 3,
}


@pytest.mark.parametrize("wishes", WISHES.values(), ids=WISHES.keys())
@pytest.mark.parametrize(("tree", "depth"), TREES.items())
@pytest.mark.parametrize("arch", ["llama", "mistral"])
def test_a_trees_likeliest_path_is_accepted(arch: str, tree: str, depth: int, wishes: SamplingParams) -> None:
    """Down to its last level in every step: where siblings are drawn, the first of them stands."""
    is_ratio = wishes.speculation.acceptance is Acceptance.REJECTION
    if is_ratio and "dynamic" in tree:
        pytest.skip("ratio rules are refused for dynamic trees")
    model = target() if arch == "llama" else load_tiny(arch)
    llm = build_llm(f"draft_model {tree}", target=model, draft=model)
    answer = run(llm, {"a": (PROMPT, wishes)})["a"]
    stats = answer.speculation
    assert stats.num_steps == 1 + -(-31 // (depth + 1))
    assert stats.num_accepted_tokens == 32 - stats.num_steps
    if not is_ratio and arch == "llama":
        assert essence(answer) == essence(plain_answer(wishes))


@pytest.mark.parametrize("k", [1, 3, 5])
def test_batched_chunked_and_from_the_prefix_cache(k: int) -> None:
    model = target()
    llm = build_llm(
        "draft_model", target=model, draft=model, num_draft_tokens=k, max_num_batched_tokens=64, block_size=8
    )
    prompts = {name: tuple(name.encode() * 6) for name in ("abc ", "one two ", "x = 1\n", "zz")}
    for _ in range(2):
        answers = run(llm, {name: (prompt, WISHES["coupled"]) for name, prompt in prompts.items()})
        for name, answer in answers.items():
            assert essence(answer) == essence(plain_answer(WISHES["coupled"], prompts[name])), name
            assert answer.speculation.num_accepted_tokens == answer.speculation.num_draft_tokens > 12


def test_a_beginning_that_only_the_target_has_cached_is_computed_anew() -> None:
    """Undrafted requests leave blocks unknown to the draft's cache: a hit there is the target's alone."""
    model = target()
    llm = build_llm("draft_model", target=model, draft=model, num_draft_tokens=3)
    undrafted = replace(GREEDY, speculation=SpeculationParams(enabled=False))
    first = run(llm, {"a": (PROMPT, undrafted)})["a"]
    assert first.speculation.num_draft_tokens == 0
    longer = (*PROMPT, *first.token_ids[:20])
    for _ in range(2):
        again = run(llm, {"b": (longer, GREEDY)})["b"]
        assert again.num_cached_tokens > 35
        assert again.speculation.num_accepted_tokens == again.speculation.num_draft_tokens > 20
