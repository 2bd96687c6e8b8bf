"""The same tokens with speculation on and off: every method, option, batch, chunking and preemption.

Most tests run on float32 weights; what every type of weights has to hold by itself is run on all of them.
"""

from dataclasses import replace
from functools import cache

import pytest

from engine.config import DType
from engine.llm import LLM, Completion
from engine.sampling_params import Acceptance, SamplingParams, SpeculationParams
from tests.engine.answers import assert_clean, essence
from tests.engines import HEADS, METHODS, TREES, build_llm, load_tiny
from tests.operators import need_operators
from tests.tiny import EOS

PROMPTS = [
    "one two one two one two",
    "the cat sat on the mat, the cat sat on",
    "abcabcabcabc",
    "a",
    "hello hello hello hello",
    "x = 1\ny = 2\nx = 1\ny = 2\n",
    "0101010101010101",
    "zzzzzzzzzz",
]
GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
SEEDED = SamplingParams(temperature=0.8, seed=7, max_tokens=24, ignore_eos=True)
OPTIONS = {
    "greedy": GREEDY,
    "greedy, both kinds of penalty": replace(GREEDY, frequency_penalty=2.0, presence_penalty=-1.0),
    "greedy, negative frequency penalty": replace(GREEDY, frequency_penalty=-2.0),
    "greedy, repetition penalty": replace(GREEDY, repetition_penalty=1.7),
    "greedy, logit bias": replace(GREEDY, logit_bias=((65, 100.0), (66, -100.0), (67, 3.5))),
    "greedy, min_tokens with EOS likely": replace(
        GREEDY, ignore_eos=False, min_tokens=6, logit_bias=((EOS, 30.0),)
    ),
    "greedy, stop ids": replace(GREEDY, stop_token_ids=tuple(range(32, 90))),
    "greedy, logprobs": replace(GREEDY, logprobs=3, prompt_logprobs=2),
    "seeded": SEEDED,
    "seeded, hot": replace(SEEDED, temperature=2.0, seed=-7),
    "seeded, top_p": replace(SEEDED, top_p=0.7, seed=2**63 - 1),
    "seeded, top_k": replace(SEEDED, top_k=5, seed=-(2**63)),
    "seeded, min_p": replace(SEEDED, min_p=0.1, choice=3),
    "seeded, everything": replace(
        SEEDED,
        top_p=0.9,
        top_k=50,
        min_p=0.01,
        frequency_penalty=0.5,
        presence_penalty=0.5,
        repetition_penalty=1.2,
        logit_bias=((97, 5.0), (98, -5.0)),
        min_tokens=3,
        ignore_eos=False,
        logprobs=2,
    ),
    "seeded, one token": replace(SEEDED, max_tokens=1),
    "seeded, negative penalties": replace(
        SEEDED, frequency_penalty=-1.5, presence_penalty=-2.0, repetition_penalty=0.7
    ),
    "seeded, stop strings": replace(
        SEEDED, temperature=1.5, top_k=3, stop=("o", "aa", " t"), include_stop_str_in_output=True
    ),
}
# Each tree with some of the options alone; all of them meet in the mixed batches below.
SOME_TREES = [
    (some[place % len(some)], option) for some in (TREES, HEADS) for place, option in enumerate(OPTIONS)
]


PACKED: tuple[DType, ...] = ("float16", "int8", "int4")


def plain_answers(option: str, dtype: DType = "float32") -> list[Completion]:
    """Each prompt alone in a plain engine: what every other run is held against."""
    return [plain_answer(prompt, option, dtype) for prompt in PROMPTS]


@cache
def plain_answer(prompt: str, option: str, dtype: DType = "float32") -> Completion:
    return plain_engine(dtype).generate([prompt], OPTIONS[option])[0]


@cache
def plain_engine(dtype: DType) -> LLM:
    return build_llm("none", target=load_tiny(dtype=dtype), prefix_caching=False)


@cache
def plain_batch(arch: str) -> list[Completion]:
    """What a model of another architecture says to all prompts together."""
    return build_llm("none", target=load_tiny(arch)).generate(PROMPTS, GREEDY)


def accepted(answers: list[Completion]) -> int:
    return sum(answer.speculation.num_accepted_tokens for answer in answers)


@pytest.mark.parametrize(
    ("method", "option"), [*((method, option) for option in OPTIONS for method in METHODS), *SOME_TREES]
)
def test_each_option_alone_and_batched(method: str, option: str) -> None:
    """With each option two other prompts are answered alone first; the batch has all of them."""
    expected = [essence(answer) for answer in plain_answers(option)]
    llm = build_llm(method)
    first = list(OPTIONS).index(option) % len(PROMPTS)
    for place in (first, first - 3):
        [alone] = llm.generate([PROMPTS[place]], OPTIONS[option])
        assert essence(alone) == expected[place]
    batched = llm.generate(PROMPTS, OPTIONS[option])
    assert [essence(answer) for answer in batched] == expected
    assert_clean(llm)


@pytest.mark.parametrize("method", [*METHODS, *TREES, *HEADS])
def test_drafts_are_accepted_at_all(method: str) -> None:
    """Equality alone would also hold for a drafter that never proposes anything."""
    answers = build_llm(method).generate(PROMPTS, GREEDY)
    assert accepted(answers) > 20
    steps = sum(answer.speculation.num_steps for answer in answers)
    assert steps < sum(len(answer.token_ids) for answer in answers)


@pytest.mark.parametrize("method", ["none", *METHODS, *TREES, *HEADS])
def test_mixed_options_in_one_batch(method: str) -> None:
    mixed = list(zip(PROMPTS * 2, OPTIONS, strict=False))
    expected = [essence(plain_answer(prompt, option)) for prompt, option in mixed]
    llm = build_llm(method)
    answers = llm.generate([prompt for prompt, _ in mixed], [OPTIONS[option] for _, option in mixed])
    assert [essence(answer) for answer in answers] == expected
    assert_clean(llm)


@pytest.mark.parametrize(
    ("method", "budget"),
    [
        *((method, budget) for budget in (8, 11, 17) for method in ("none", *METHODS)),
        *zip(TREES, (8, 31, 11, 17), strict=True),
        *zip(HEADS, (8, 11, 17, 31, 8, 11, 17), strict=True),
    ],
)
def test_chunked_prompts_and_tight_budgets(method: str, budget: int) -> None:
    expected = [essence(answer) for answer in plain_answers("seeded, top_p")]
    llm = build_llm(method, max_num_batched_tokens=budget)
    answers = llm.generate(PROMPTS, OPTIONS["seeded, top_p"])
    assert [essence(answer) for answer in answers] == expected
    assert_clean(llm)


@pytest.mark.parametrize(
    ("method", "option"),
    [
        *(
            (method, option)
            for option in ("greedy", "seeded, everything", "greedy, logprobs")
            for method in ("none", *METHODS)
        ),
        *((tree, "seeded, everything") for tree in (*TREES, *HEADS)),
    ],
)
def test_preemption_changes_nothing(method: str, option: str) -> None:
    expected = [essence(answer) for answer in plain_answers(option)]
    llm = build_llm(method, num_kv_blocks=33)
    core = llm.core
    taken = []
    core.take_stats, take = lambda: taken.append(take()) or taken[-1], core.take_stats  # type: ignore
    answers = llm.generate(PROMPTS, OPTIONS[option])
    assert [essence(answer) for answer in answers] == expected
    assert sum(stats.num_preemptions for stats in taken) > 0
    assert_clean(llm)


@pytest.mark.parametrize("method", ["none", *METHODS, *TREES, *HEADS])
def test_prefix_cache_hits_change_nothing(method: str) -> None:
    expected = [essence(answer) for answer in plain_answers("seeded, min_p")]
    llm = build_llm(method)
    llm.generate(PROMPTS, OPTIONS["seeded, min_p"])
    again = llm.generate(PROMPTS, OPTIONS["seeded, min_p"])
    assert [essence(answer) for answer in again] == expected
    assert sum(answer.num_cached_tokens for answer in again) > 100
    # A longer conversation over the same beginning finds the answer in the cache, too.
    longer = PROMPTS[1] + again[1].text + " and then"
    [from_cache] = llm.generate([longer], GREEDY)
    [fresh] = build_llm("none", prefix_caching=False).generate([longer], GREEDY)
    assert essence(from_cache) == essence(fresh)
    assert_clean(llm)


@pytest.mark.parametrize("rule", Acceptance)
def test_every_rule_is_the_match_rule_where_greedy(rule: Acceptance) -> None:
    wishes = replace(GREEDY, speculation=SpeculationParams(acceptance=rule))
    answers = build_llm("draft_model", allow_lossy=True).generate(PROMPTS, wishes)
    assert [essence(answer) for answer in answers] == [essence(a) for a in plain_answers("greedy")]


@pytest.mark.parametrize("method", [*METHODS, *TREES, *HEADS[2:5]])
@pytest.mark.parametrize("num_draft_tokens", [1, 2, 7, 16])
def test_any_number_of_draft_tokens(method: str, num_draft_tokens: int) -> None:
    wishes = replace(SEEDED, speculation=SpeculationParams(num_draft_tokens=num_draft_tokens))
    answers = build_llm(method).generate(PROMPTS, wishes)
    assert [essence(answer) for answer in answers] == [essence(a) for a in plain_answers("seeded")]


@pytest.mark.parametrize("method", [*METHODS, *HEADS[:3]])
def test_speculation_switched_off_per_request(method: str) -> None:
    off = replace(SEEDED, speculation=SpeculationParams(enabled=False))
    answers = build_llm(method).generate(PROMPTS * 2, [off] * len(PROMPTS) + [SEEDED] * len(PROMPTS))
    expected = [essence(answer) for answer in plain_answers("seeded")]
    assert [essence(answer) for answer in answers] == expected * 2
    assert all(answer.speculation.num_draft_tokens == 0 for answer in answers[: len(PROMPTS)])
    assert sum(answer.speculation.num_draft_tokens for answer in answers[len(PROMPTS) :]) > 0


@pytest.mark.parametrize("arch", ["mistral", "gemma2", "gemma3_text", "gpt2", "gpt_oss", "mixtral"])
@pytest.mark.parametrize("method", [*METHODS, "draft_model 3,2,1,1"])
def test_other_architectures(method: str, arch: str) -> None:
    target, draft = load_tiny(arch), load_tiny(arch, noise=0.05)
    answers = build_llm(method, target=target, draft=draft).generate(PROMPTS, GREEDY)
    assert [essence(answer) for answer in answers] == [essence(answer) for answer in plain_batch(arch)]
    assert accepted(answers) > 0


@pytest.mark.parametrize("arch", ["gemma2", "gemma3_text", "gpt2", "gpt_oss"])
@pytest.mark.parametrize("method", ["eagle 2,2,1", "eagle3", "medusa 3,2"])
def test_heads_of_other_architectures(method: str, arch: str) -> None:
    """They guess at random here, so that hardly anything is accepted."""
    answers = build_llm(method, target=load_tiny(arch)).generate(PROMPTS, GREEDY)
    assert [essence(answer) for answer in answers] == [essence(answer) for answer in plain_batch(arch)]
    assert sum(answer.speculation.num_draft_tokens for answer in answers) > 200


@pytest.mark.parametrize("method", [*TREES, "eagle3 3,2,1,1"])
def test_several_choices_of_one_prompt(method: str) -> None:
    """Three answers to each prompt, n=3, meet in the prefix cache."""
    llm = build_llm(method)
    for prompt in PROMPTS[:4]:
        answers = llm.generate([prompt] * 3, CHOICES)
        assert [essence(answer) for answer in answers] == [essence(choice) for choice in choices_of(prompt)]
    assert_clean(llm)


CHOICES = [replace(SEEDED, choice=choice) for choice in range(3)]


@cache
def choices_of(prompt: str) -> list[Completion]:
    """Each alone."""
    return [plain_engine("float32").generate([prompt], wishes)[0] for wishes in CHOICES]


@pytest.mark.parametrize("dtype", PACKED)
@pytest.mark.parametrize(
    "method", [*METHODS, "draft_model 3,2,1,1", "eagle", "eagle3 3,2,1,1", "medusa sequoia"]
)
def test_packed_weights(method: str, dtype: DType) -> None:
    """Alone, batched, in chunks, preempted, behind cached prefixes: all in one run for each method."""
    need_operators()
    options = ["greedy", "seeded, everything", "greedy, logprobs"]
    target, draft = load_tiny(dtype=dtype), load_tiny(noise=0.1, dtype=dtype)
    mixed = [(prompt, options[index % 3]) for index, prompt in enumerate(PROMPTS)]
    expected = [essence(plain_answer(prompt, option, dtype)) for prompt, option in mixed]
    tight = build_llm(method, target=target, draft=draft, num_kv_blocks=33, max_num_batched_tokens=17)
    core = tight.core
    taken = []
    core.take_stats, take = lambda: taken.append(take()) or taken[-1], core.take_stats  # type: ignore
    prompts, wishes = [prompt for prompt, _ in mixed], [OPTIONS[option] for _, option in mixed]
    assert [essence(answer) for answer in tight.generate(prompts, wishes)] == expected
    assert sum(stats.num_preemptions for stats in taken) > 0
    roomy = build_llm(method, target=target, draft=draft)
    batched = roomy.generate(prompts, wishes)
    assert [essence(answer) for answer in batched] == expected
    assert accepted(batched) > 10
    # The first three have an option each; one at a time, what else is asked makes no difference.
    alone = [roomy.generate([prompt], OPTIONS[option])[0] for prompt, option in mixed[:3]]
    assert [essence(answer) for answer in alone] == expected[:3]
    assert sum(answer.num_cached_tokens for answer in alone) > 0
    assert_clean(tight)
    assert_clean(roomy)


def test_weights_of_another_type_are_another_model() -> None:
    """The runs above would also agree if all of them ran on float32."""
    need_operators()
    floats = [plain_answer(PROMPTS[0], "greedy, logprobs", dtype).logprobs for dtype in ("float32", *PACKED)]
    assert floats[0] != floats[1]
    assert floats[1] != floats[2]


@pytest.mark.parametrize("method", ["draft_model", "eagle3 2,1,1", "medusa"])
def test_aborted_neighbours_change_nothing(method: str) -> None:
    expected = [essence(answer) for answer in plain_answers("seeded")]
    llm = build_llm(method, num_kv_blocks=40)
    core = llm.core
    answers = {f"kept-{i}": Completion([]) for i in range(4)}
    for i in range(4):
        core.add_request(f"kept-{i}", llm.tokenizer.encode(PROMPTS[i]), SEEDED)
        core.add_request(f"gone-{i}", llm.tokenizer.encode(PROMPTS[7 - i]), SEEDED)
    step = 0
    while core.has_work:
        for output in core.step():
            if output.request_id in answers:
                answers[output.request_id].add(output)
        core.scheduler.check_integrity()
        if step % 2 == 0 and step // 2 < 4:
            core.abort(f"gone-{step // 2}")
        step += 1
    assert [essence(answer) for answer in answers.values()] == expected[:4]
    assert_clean(llm)
