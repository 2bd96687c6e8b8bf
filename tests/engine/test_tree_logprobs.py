"""Log probabilities are the plain run's, entry by entry, with trees too, whole and in streamed pieces."""

from collections.abc import Sequence
from dataclasses import replace

import pytest

from engine.llm import Completion
from engine.outputs import TokenLogprob
from engine.sampling_params import SamplingParams
from tests.engines import METHODS, TREES, build_llm, load_tiny

PROMPTS = ["one two one two one two", "x = 1\ny = 2\nx = 1", "q"]
GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True, logprobs=4)
WISHES = {
    "greedy": GREEDY,
    "seeded": replace(
        GREEDY, temperature=1.1, seed=6, frequency_penalty=0.5, repetition_penalty=1.2, top_p=0.95
    ),
    "echo": replace(GREEDY, prompt_logprobs=2),
}


def assert_equal(ours: Sequence[TokenLogprob | None], theirs: Sequence[TokenLogprob | None]) -> None:
    assert len(ours) == len(theirs)
    for mine, other in zip(ours, theirs, strict=True):
        if mine is None or other is None:
            assert mine is other
            continue
        assert mine.token_id == other.token_id
        assert mine.logprob == pytest.approx(other.logprob, abs=1e-5)
        assert [top.token_id for top in mine.top] == [top.token_id for top in other.top]
        for top, expected in zip(mine.top, other.top, strict=True):
            assert top.logprob == pytest.approx(expected.logprob, abs=1e-5)


@pytest.mark.parametrize("wishes", WISHES.values(), ids=WISHES.keys())
@pytest.mark.parametrize("method", [*METHODS, *TREES])
def test_logprobs_equal_the_plain_runs(method: str, wishes: SamplingParams) -> None:
    # Moderate weights: with the tests' usual ones float32 alone is off by 1e-5 from one batch to another.
    target, draft = load_tiny(initializer_range=0.2), load_tiny(initializer_range=0.2, noise=0.1)
    plain = build_llm("none", target=target, prefix_caching=False)
    expected = {prompt: plain.generate([prompt], wishes)[0] for prompt in PROMPTS}
    core = build_llm(method, target=target, draft=draft).core
    answers = {prompt: Completion([]) for prompt in PROMPTS}
    for prompt in PROMPTS:
        core.add_request(prompt, plain.tokenizer.encode(prompt), wishes)
    most = 0
    while core.has_work:
        for piece in core.step():
            # What is streamed is as complete as the whole: an entry for every token of the piece.
            assert len(piece.logprobs or ()) == len(piece.token_ids)
            most = max(most, len(piece.token_ids))
            answers[piece.request_id].add(piece)
    if method in TREES:
        assert most > 1
    for prompt, answer in answers.items():
        assert_equal(answer.logprobs, expected[prompt].logprobs)
        assert_equal(answer.prompt_logprobs or (), expected[prompt].prompt_logprobs or ())
