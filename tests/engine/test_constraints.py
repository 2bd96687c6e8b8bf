"""Answers of a prescribed format: always valid, and the same with speculation on and off."""

import json
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import jsonschema
import pytest

from engine.errors import InvalidRequest
from engine.grammar import Matcher
from engine.llm import LLM, Completion
from engine.model.loaded_model import LoadedModel
from engine.outputs import FinishReason
from engine.sampling_params import Acceptance, Constraint, ConstraintKind, SamplingParams, SpeculationParams
from engine.token_tree import TokenTree
from tests.engine.answers import PROMPT, assert_clean, build_scripted, essence
from tests.engines import METHODS, TREES, build_llm, load_tiny
from tests.formats import OPTIONS
from tests.schemas import random_schema
from tests.scripted import fixed
from tests.tiny import EOS, IM_END

NUM_SCHEMAS = 100
PER_METHOD = 16
# Options that may cut an answer, unlike those of tests.formats.
CUTS = (
    SamplingParams(seed=1, max_tokens=9),
    SamplingParams(seed=2, stop=('":', "e"), include_stop_str_in_output=True),
    SamplingParams(temperature=0, stop=("2", ","), min_tokens=6),
    SamplingParams(seed=3, stop_token_ids=(ord("e"),)),
)


def json_constraint(schema: object) -> Constraint:
    return Constraint(ConstraintKind.JSON, json.dumps(schema), "response_format")


def wanted(number: int) -> SamplingParams:
    return replace(OPTIONS[number % len(OPTIONS)], constraint=json_constraint(random_schema(number)))


@cache
def target() -> LoadedModel:
    return load_tiny(max_model_len=512)


def engine(method: str = "none", **room: Any) -> LLM:
    return build_llm(method, target=target(), num_kv_blocks=2048, max_num_seqs=24, **room)


@cache
def plain_answers() -> tuple[Completion, ...]:
    """What the target alone says to every schema."""
    return tuple(engine().generate([PROMPT] * NUM_SCHEMAS, [wanted(n) for n in range(NUM_SCHEMAS)]))


def faults(answers: Sequence[Completion], numbers: Sequence[int]) -> list[str]:
    """Answers that do not fit their schemas."""
    found = []
    for number, answer in zip(numbers, answers, strict=True):
        try:
            assert answer.finish_reason is FinishReason.STOP
            assert answer.token_ids[-1] in target().eos_token_ids
            jsonschema.validate(json.loads(answer.text), random_schema(number))
        except (AssertionError, ValueError, jsonschema.ValidationError):
            found.append(f"{number}: {answer.text!r}")
    return found


def test_plain_answers_fit_their_schemas() -> None:
    assert faults(plain_answers(), range(NUM_SCHEMAS)) == []
    assert len({answer.text for answer in plain_answers()}) > NUM_SCHEMAS / 2


@pytest.mark.parametrize("method", [*METHODS, *TREES])
def test_speculation_changes_nothing(method: str) -> None:
    place = [*METHODS, *TREES].index(method)
    numbers = [(place * 29 + n) % NUM_SCHEMAS for n in range(PER_METHOD)]
    llm = engine(method)
    answers = llm.generate([PROMPT] * PER_METHOD, [wanted(n) for n in numbers])
    assert [essence(answer) for answer in answers] == [essence(plain_answers()[n]) for n in numbers]
    accepted = sum(answer.speculation.num_accepted_tokens for answer in answers)
    assert accepted > sum(len(answer.token_ids) for answer in answers) / 4
    assert_clean(llm)


@pytest.mark.parametrize("method", ["none", "suffix", "draft_model 3,2,1,1"])
def test_what_cuts_an_answer_cuts_it_at_the_same_place(method: str) -> None:
    numbers = range(0, NUM_SCHEMAS, 10)
    asked = [replace(wanted(n), **cuts(CUTS[n // 10 % len(CUTS)])) for n in numbers]
    plain = engine().generate([PROMPT] * len(asked), asked)
    answers = engine(method, max_num_batched_tokens=64).generate([PROMPT] * len(asked), asked)
    assert list(map(essence, answers)) == list(map(essence, plain))
    assert {answer.finish_reason for answer in answers} == {FinishReason.STOP, FinishReason.LENGTH}


def cuts(params: SamplingParams) -> dict[str, Any]:
    names = ("max_tokens", "stop", "include_stop_str_in_output", "stop_token_ids", "min_tokens")
    return {name: getattr(params, name) for name in names}


@pytest.mark.parametrize("tree", [None, "3,2,1,1"])
@pytest.mark.parametrize("acceptance", [Acceptance.REJECTION, Acceptance.BLOCK, Acceptance.TYPICAL])
def test_other_rules_keep_the_format(tree: str | None, acceptance: Acceptance) -> None:
    if tree and acceptance is Acceptance.BLOCK:
        pytest.skip("block judges chains")
    llm = engine("draft_model" if tree is None else f"draft_model {tree}", allow_lossy=True)
    speculation = SpeculationParams(acceptance=acceptance)
    numbers = range(0, NUM_SCHEMAS, 10)
    asked = [replace(wanted(n), speculation=speculation) for n in numbers]
    assert faults(llm.generate([PROMPT] * len(asked), asked), numbers) == []


def test_preemption_and_a_small_pool_change_nothing() -> None:
    numbers = range(12)
    short = replace(target(), max_model_len=280)
    llm = build_llm("suffix", target=short, num_kv_blocks=80, max_num_seqs=8, max_num_batched_tokens=40)
    answers = llm.generate([PROMPT] * 12, [wanted(n) for n in numbers])
    assert [essence(answer) for answer in answers] == [essence(plain_answers()[n]) for n in numbers]
    assert llm.stats.num_preemptions


POINT = {
    "type": "object",
    "properties": {"first": {"const": "certain"}, "second": {"type": "boolean"}},
    "required": ["first", "second"],
    "additionalProperties": False,
}
CERTAIN = SamplingParams(temperature=0, constraint=json_constraint(POINT))


def test_forced_text_takes_one_step() -> None:
    [answer] = engine("ngram").generate([PROMPT], CERTAIN)
    assert answer.text in ('{"first": "certain", "second": true}', '{"first": "certain", "second": false}')
    # The prompt and the first token, what is forced behind it, the boolean's rest, EOS.
    assert answer.speculation.num_steps <= 5
    [plain] = engine("ngram").generate(
        [PROMPT], replace(CERTAIN, speculation=SpeculationParams(enabled=False))
    )
    assert plain.speculation.num_steps == len(plain.token_ids) == len(answer.token_ids)


@pytest.mark.parametrize(
    "tree",
    [
        TokenTree.chain(b"```j"),
        TokenTree.chain(b'{"a'),
        TokenTree.chain(b'{"first": "certain", "second": x'),
        TokenTree((ord("{"), ord("["), ord('"'), EOS, ord("x")), (0, 0, 1, 1, 2)),
        TokenTree.chain((EOS, ord("{"))),
        TokenTree.chain((ord("{"), IM_END)),
    ],
)
def test_forbidden_drafts_are_no_more_than_wrong(tree: TokenTree) -> None:
    llm, _ = build_scripted(fixed(tree), target(), k=8, num_kv_blocks=1024)
    answers = llm.generate([PROMPT] * len(DRAFTED), DRAFTED)
    assert list(map(essence, answers)) == list(map(essence, undrafted()))
    assert_clean(llm)


_FREE = {"type": "object", "properties": {"first": {"type": "string", "maxLength": 3}}}
DRAFTED = [
    replace(CERTAIN, constraint=json_constraint(schema), seed=seed, temperature=temperature)
    for schema in (POINT, {"anyOf": [POINT, _FREE]}, {"enum": ["{", "```", "[x"]})
    for seed, temperature in ((1, 0.0), (2, 1.0))
]


@cache
def undrafted() -> tuple[Completion, ...]:
    return tuple(engine().generate([PROMPT] * len(DRAFTED), DRAFTED))


def test_logprobs_are_the_models_own() -> None:
    params = replace(CERTAIN, logprobs=3)
    [answer] = engine("suffix").generate([PROMPT], params)
    [free] = engine().generate([PROMPT], SamplingParams(temperature=0, logprobs=3, max_tokens=1))
    # The first row has seen the prompt and nothing else: what it says does not depend on the format.
    assert answer.logprobs[0].top == free.logprobs[0].top
    assert answer.logprobs[0].token == "{" != free.logprobs[0].token


@pytest.mark.parametrize("method", ["none", "suffix"])
def test_min_tokens_yields_where_the_format_leaves_nothing_to_say(method: str) -> None:
    choice = Constraint(ConstraintKind.CHOICE, json.dumps(["ab", "ab and more of it"]))
    short, long = engine(method).generate(
        [PROMPT] * 2,
        [
            SamplingParams(temperature=0, min_tokens=40, constraint=replace(choice, source='["ab"]')),
            SamplingParams(temperature=0, min_tokens=4, constraint=choice),
        ],
    )
    assert (short.text, short.finish_reason) == ("ab", FinishReason.STOP)
    assert (long.text, long.finish_reason) == ("ab and more of it", FinishReason.STOP)


@pytest.mark.parametrize("method", ["none", "ngram"])
def test_a_dead_end_fails_its_request_and_no_other(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    truth = Matcher.masks

    def nothing_behind_the_first(self: Matcher, paths: Sequence[tuple[int, ...]]) -> list[bytes | None]:
        return [mask and bytes(len(mask)) for mask in truth(self, paths)]

    llm = engine(method)
    core = llm.core
    core.add_request("doomed", PROMPT, replace(CERTAIN, max_tokens=40))
    core.add_request("free", PROMPT, SamplingParams(temperature=0, max_tokens=12))
    monkeypatch.setattr(Matcher, "masks", nothing_behind_the_first)
    ends: dict[str, FinishReason] = {}
    while core.has_work:
        ends |= {output.request_id: output.finish_reason for output in core.step() if output.finish_reason}
    assert ends == {"doomed": FinishReason.ERROR, "free": FinishReason.LENGTH}
    assert_clean(llm)


def test_a_model_without_an_end_of_text_serves_no_formats() -> None:
    llm = build_llm(target=replace(load_tiny(), eos_token_ids=frozenset()))
    with pytest.raises(InvalidRequest, match="end-of-text") as error:
        llm.generate([PROMPT], CERTAIN)
    assert error.value.param == "response_format"


# Errors planted, to see that the tests above would find them.


def test_a_mask_that_ignores_the_path_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    truth = Matcher.masks

    def at_the_root_only(self: Matcher, paths: Sequence[tuple[int, ...]]) -> list[bytes | None]:
        return [truth(self, [()])[0] if not path else None for path in paths]

    monkeypatch.setattr(Matcher, "masks", at_the_root_only)
    answers = engine("draft_model 3,2,1,1").generate([PROMPT] * 12, [wanted(n) for n in range(12)])
    assert [answer.text for answer in answers] != [answer.text for answer in plain_answers()[:12]]


def test_a_matcher_that_follows_rejected_tokens_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def keep_what_was_walked(self: Matcher, run: Sequence[int]) -> bool:
        self._masks.clear()
        self._committed, self._ahead = self._walker, ()
        return True

    monkeypatch.setattr(Matcher, "advance", keep_what_was_walked)
    answers = engine("draft_model 3,2,1,1").generate([PROMPT] * 12, [wanted(n) for n in range(12)])
    assert [answer.text for answer in answers] != [answer.text for answer in plain_answers()[:12]]
