"""Predicted Outputs: the plain run's text in fewer steps, with every option, method and kind of edit."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from engine.errors import InvalidRequest
from engine.llm import LLM, Completion
from engine.sampling_params import Acceptance, SamplingParams, SpeculationParams
from tests.engine.answers import PROMPT, assert_clean, essence, plain_answer, run, target
from tests.engine.test_lossless import GREEDY, OPTIONS, PROMPTS, SEEDED, plain_answers
from tests.engines import build_llm, load_tiny
from tests.forced import force
from tests.tiny import EOS

METHODS = ("none", "ngram", "suffix", "draft_model", "draft_model 3,2,1,1")
WISHES = SamplingParams(temperature=0.9, seed=3, max_tokens=40, ignore_eos=True)

Edit = Callable[[list[int]], list[int]]
EDITS: dict[str, Edit] = {
    "the answer": lambda ids: ids,
    "a token replaced": lambda ids: [*ids[:9], 1, *ids[10:]],
    "tokens missing": lambda ids: ids[:7] + ids[12:],
    "tokens too many": lambda ids: [*ids[:7], 1, 2, 3, 4, *ids[7:]],
    "passages swapped": lambda ids: ids[15:] + ids[:15],
    "another text": lambda ids: [1] * 30,
    "short": lambda ids: ids[:3],
}


def with_prediction(params: SamplingParams, ids: list[int], **wishes: object) -> SamplingParams:
    speculation = SpeculationParams(prediction=tuple(ids), **wishes)  # type: ignore[arg-type]
    return replace(params, speculation=speculation)


def predicting(answers: list[Completion], option: SamplingParams) -> list[SamplingParams]:
    """The option for each prompt, with its plain answer, edited each in another way, as the prediction."""
    edits = [*EDITS.values(), EDITS["the answer"]]
    return [
        with_prediction(option, edit(answer.token_ids)) for answer, edit in zip(answers, edits, strict=True)
    ]


@pytest.mark.parametrize(
    ("method", "option"),
    [(method, option) for n, option in enumerate(OPTIONS) for method in ("none", METHODS[1 + n % 4])],
)
def test_each_option_with_each_kind_of_edit(method: str, option: str) -> None:
    expected = plain_answers(option)
    llm = build_llm(method)
    answers = llm.generate(PROMPTS, predicting(expected, OPTIONS[option]))
    assert [essence(answer) for answer in answers] == [essence(answer) for answer in expected]
    assert_clean(llm)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("edit", EDITS)
@pytest.mark.parametrize("wishes", [GREEDY, SEEDED], ids=["greedy", "seeded"])
def test_each_edit_alone(method: str, edit: str, wishes: SamplingParams) -> None:
    plain = plain_answer(wishes)
    predicted = EDITS[edit](plain.token_ids)
    llm = build_llm(method, target=target(), draft=load_tiny(noise=0.1))
    answer = run(llm, {"a": (PROMPT, with_prediction(wishes, predicted))})["a"]
    assert essence(answer) == essence(plain)
    stats = answer.speculation
    assert stats.num_predicted_tokens == len(predicted)
    assert stats.num_found_tokens <= len(predicted)
    if edit == "the answer":
        assert stats.num_found_tokens == len(predicted)
        assert stats.num_steps <= 4


def test_a_prediction_helps_where_nothing_else_drafts() -> None:
    plain = plain_answer(WISHES)
    answer = run(
        build_llm("none", target=target()), {"a": (PROMPT, with_prediction(WISHES, plain.token_ids))}
    )
    assert answer["a"].speculation.num_steps < 5
    assert essence(answer["a"]) == essence(plain)


def test_the_method_takes_over_where_the_prediction_has_run_out() -> None:
    plain = plain_answer(WISHES)
    first = with_prediction(WISHES, plain.token_ids[:20])
    same = load_tiny(noise=0.0)
    alone = run(build_llm("none", target=target()), {"a": (PROMPT, first)})["a"]
    both = run(build_llm("draft_model", target=target(), draft=same), {"a": (PROMPT, first)})["a"]
    only_drafted = run(build_llm("draft_model", target=target(), draft=same), {"a": (PROMPT, WISHES)})["a"]
    assert essence(alone) == essence(both) == essence(only_drafted) == essence(plain)
    assert both.speculation.num_steps < min(alone.speculation.num_steps, only_drafted.speculation.num_steps)


def test_a_request_longer_than_the_drafts_context_is_still_drafted_from_its_prediction() -> None:
    plain = plain_answer(WISHES)
    draft = load_tiny(noise=0.1, max_model_len=len(PROMPT) + 3)
    llm = build_llm("draft_model", target=target(), draft=draft)
    answer = run(llm, {"a": (PROMPT, with_prediction(WISHES, plain.token_ids))})["a"]
    assert essence(answer) == essence(plain)
    assert answer.speculation.num_steps < 5


@pytest.mark.parametrize("rule", [Acceptance.REJECTION, Acceptance.BLOCK])
def test_ratio_rules_take_predictions_as_match_does(rule: Acceptance) -> None:
    """Nothing was drawn, so there is no ratio: where nothing else drafts, the text is the plain one."""
    plain = plain_answer(WISHES)
    wishes = with_prediction(WISHES, plain.token_ids, acceptance=rule)
    llm = build_llm("draft_model", target=target(), draft=load_tiny(noise=0.1))
    answer = run(llm, {"a": (PROMPT, wishes)})["a"]
    assert answer.token_ids == plain.token_ids
    assert answer.speculation.num_found_tokens == len(plain.token_ids)


def test_choices_follow_the_prediction_each_for_itself() -> None:
    asked = {f"{n}": (PROMPT, replace(WISHES, choice=n)) for n in range(3)}
    plain = {name: plain_answer(params) for name, (_, params) in asked.items()}
    predicted = plain["1"].token_ids
    answers = run(
        build_llm("ngram", target=target()),
        {name: (PROMPT, with_prediction(params, predicted)) for name, (_, params) in asked.items()},
    )
    assert {name: essence(answer) for name, answer in answers.items()} == {
        name: essence(answer) for name, answer in plain.items()
    }
    found = {name: answer.speculation.num_found_tokens for name, answer in answers.items()}
    assert found["1"] == len(predicted) > max(found["0"], found["2"])


def test_it_survives_preemption_and_chunked_prompts() -> None:
    asked = {
        f"{n}": (tuple(prompt.encode()) * 2, replace(WISHES, seed=n)) for n, prompt in enumerate(PROMPTS)
    }
    plain = {name: plain_answer(params, prompt) for name, (prompt, params) in asked.items()}
    llm = build_llm("ngram", target=target(), num_kv_blocks=44, max_num_batched_tokens=32)
    preempted = 0

    def count(stats: object) -> None:
        nonlocal preempted
        preempted += stats.num_preemptions  # type: ignore[attr-defined]

    answers = run(
        llm,
        {
            name: (prompt, with_prediction(params, plain[name].token_ids))
            for name, (prompt, params) in asked.items()
        },
        count,
    )
    assert preempted
    for name, answer in answers.items():
        assert essence(answer) == essence(plain[name])
        assert answer.speculation.num_found_tokens == 40


def test_a_request_that_is_decoded_plainly_is() -> None:
    plain = plain_answer(WISHES)
    wishes = with_prediction(WISHES, plain.token_ids, enabled=False)
    stats = run(build_llm("none", target=target()), {"a": (PROMPT, wishes)})["a"].speculation
    assert stats.num_steps == 40
    assert (stats.num_draft_tokens, stats.num_predicted_tokens, stats.num_found_tokens) == (0, 0, 0)


def test_the_requests_own_number_of_draft_tokens_bounds_the_chains() -> None:
    plain = plain_answer(WISHES)
    wishes = with_prediction(WISHES, plain.token_ids, num_draft_tokens=4)
    stats = run(build_llm("ngram", target=target()), {"a": (PROMPT, wishes)})["a"].speculation
    assert stats.num_steps == 9, "one for the prompt and eight for chains of four"
    assert stats.num_draft_tokens <= 32


def test_tokens_that_the_model_does_not_have_are_refused() -> None:
    with pytest.raises(InvalidRequest, match="token id 259 in prediction"):
        build_llm("none").generate([PROMPT], with_prediction(WISHES, [1, 259]))


FILE = "".join(
    f"def f{n}(counter):\n  if counter > {n * 37 % 91}:\n    counter -= x{n % 7}\n  # {n}\n  return counter\n"
    for n in range(40)
)


@pytest.mark.parametrize("method", ["none", "ngram"])
def test_a_renamed_variable_in_a_file_of_200_lines(method: str) -> None:
    prompt, answer = FILE.encode(), FILE.replace("counter", "remaining").encode()
    assert FILE.count("\n") == 200
    llm = wide_llm(method, len(prompt) + len(answer) + 8)
    sizes = force(llm, prompt, answer, EOS)
    wishes = replace(GREEDY, max_tokens=None, ignore_eos=False)
    [done] = llm.generate([list(prompt)], with_prediction(wishes, list(FILE.encode())))
    assert done.text == answer.decode()
    assert done.finish_reason == "stop"
    stats = done.speculation
    assert stats.num_committed_tokens / stats.num_steps > 20
    assert max(sizes[len(prompt) // 256 + 1 :]) == 64
    num_kept = len(FILE) - FILE.count("counter") * len("counter")
    assert stats.num_predicted_tokens == len(FILE)
    assert num_kept <= stats.num_found_tokens < num_kept + FILE.count("counter")


def wide_llm(method: str, max_model_len: int) -> LLM:
    model = load_tiny(max_model_len=max_model_len, max_position_embeddings=max_model_len)
    return build_llm(method, target=model, num_kv_blocks=max_model_len // 16 + 8, block_size=16)
