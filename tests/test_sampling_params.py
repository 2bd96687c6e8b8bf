import dataclasses
import math
from typing import Any

import pytest

from engine.errors import InvalidRequest
from engine.sampling_params import (
    MAX_DRAFT_TOKENS,
    MAX_LOGPROBS,
    MAX_STOP_STRINGS,
    SEED_MAX,
    SEED_MIN,
    SamplingParams,
    SpeculationParams,
)

NOT_FINITE = [math.nan, math.inf, -math.inf]


def after(value: float) -> float:
    return math.nextafter(value, math.inf)


def before(value: float) -> float:
    return math.nextafter(value, -math.inf)


GOOD: list[tuple[str, list[Any]]] = [
    ("max_tokens", [None, 0, 1, 10**9]),
    ("min_tokens", [0, 1, 10**9]),
    ("temperature", [0.0, -0.0, before(1.0), 2.0, 0, 1, 5e-324]),
    ("top_p", [5e-324, 0.5, 1.0, 1]),
    ("top_k", [0, 1, 10**9]),
    ("min_p", [0.0, 0.5, 1.0]),
    ("presence_penalty", [-2.0, 0.0, 2.0]),
    ("frequency_penalty", [-2.0, 0.0, 2.0]),
    ("repetition_penalty", [5e-324, 0.5, 1.0, 1e30]),
    ("logit_bias", [(), ((5, -100.0),), ((5, 100.0), (6, 0.0))]),
    ("seed", [None, 0, -1, SEED_MIN, SEED_MAX]),
    ("stop", [(), ("a",), ("a", " ", "\n", "long stop string")]),
    ("logprobs", [None, 0, 1, MAX_LOGPROBS]),
    ("prompt_logprobs", [None, 0, 1, MAX_LOGPROBS]),
]
BAD: list[tuple[str, list[Any]]] = [
    ("max_tokens", [-1]),
    ("min_tokens", [-1]),
    ("temperature", [before(0.0), after(2.0), -1, 100, *NOT_FINITE]),
    ("top_p", [0.0, -0.1, after(1.0), *NOT_FINITE]),
    ("top_k", [-1]),
    ("min_p", [before(0.0), after(1.0), *NOT_FINITE]),
    ("presence_penalty", [before(-2.0), after(2.0), *NOT_FINITE]),
    ("frequency_penalty", [before(-2.0), after(2.0), *NOT_FINITE]),
    ("repetition_penalty", [0.0, -1.0, *NOT_FINITE]),
    ("logit_bias", [((5, value),) for value in (before(-100.0), after(100.0), *NOT_FINITE)]),
    ("logit_bias", [((5, 1.0), (6, math.nan))]),
    ("seed", [SEED_MIN - 1, SEED_MAX + 1, 10**40, *NOT_FINITE]),
    ("stop", [("",), ("a", ""), tuple("abcde")]),
    ("logprobs", [-1, MAX_LOGPROBS + 1]),
    ("prompt_logprobs", [-1, MAX_LOGPROBS + 1]),
]


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in GOOD for value in values])
def test_accepted(name: str, value: Any) -> None:
    assert getattr(SamplingParams(**{name: value}), name) == value


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in BAD for value in values])
def test_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(InvalidRequest, match=name) as caught:
        SamplingParams(**{name: value})
    assert caught.value.param == name


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"max_tokens": -3}, "max_tokens must be at least 0, got -3"),
        ({"temperature": 2.5}, "temperature must be between 0.0 and 2.0, got 2.5"),
        ({"temperature": math.nan}, "temperature must be between 0.0 and 2.0, got nan"),
        ({"top_p": 0.0}, "top_p must be above 0 and at most 1, got 0.0"),
        ({"top_k": -1}, "top_k must be at least 0 (0 is off), got -1"),
        ({"repetition_penalty": math.inf}, "repetition_penalty must be a finite number above 0, got inf"),
        ({"logit_bias": ((7, 101.0),)}, "logit_bias of token 7 must be between -100.0 and 100.0, got 101.0"),
        ({"seed": 2**63}, f"seed must be between {-(2**63)} and {2**63 - 1}, got {2**63}"),
        ({"stop": tuple("abcde")}, "stop takes at most 4 strings, got 5"),
        ({"stop": ("",)}, "stop must not contain an empty string: it would match at once"),
        ({"logprobs": 21}, "logprobs must be between 0 and 20, got 21"),
        (
            {"min_tokens": 3, "max_tokens": 2},
            "min_tokens (3) must not exceed max_tokens (2): lower the first or raise the second",
        ),
    ],
)
def test_message_says_what_is_wrong_with_value_and_limit(params: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        SamplingParams(**params)
    assert str(caught.value) == message


def test_min_tokens_may_reach_max_tokens_but_not_pass_it() -> None:
    assert SamplingParams(min_tokens=5, max_tokens=5).min_tokens == 5
    assert SamplingParams(min_tokens=0, max_tokens=0).max_tokens == 0
    with pytest.raises(InvalidRequest) as caught:
        SamplingParams(min_tokens=1, max_tokens=0)
    assert caught.value.param == "min_tokens"


def test_as_many_stop_strings_as_allowed() -> None:
    assert MAX_STOP_STRINGS == 4
    SamplingParams(stop=("a",) * MAX_STOP_STRINGS)


def test_only_temperature_zero_is_greedy() -> None:
    assert SamplingParams(temperature=0.0).is_greedy
    assert SamplingParams(temperature=-0.0).is_greedy
    assert not SamplingParams(temperature=5e-324).is_greedy
    assert not SamplingParams().is_greedy


@pytest.mark.parametrize("count", [1, MAX_DRAFT_TOKENS, None])
def test_draft_tokens_accepted(count: int | None) -> None:
    assert SpeculationParams(num_draft_tokens=count).num_draft_tokens == count


@pytest.mark.parametrize("count", [0, -1, MAX_DRAFT_TOKENS + 1, 10**20])
def test_draft_tokens_refused(count: int) -> None:
    with pytest.raises(InvalidRequest) as caught:
        SpeculationParams(num_draft_tokens=count)
    assert caught.value.param == "speculation.num_draft_tokens"
    assert str(caught.value) == f"speculation.num_draft_tokens must be between 1 and 63, got {count}"


def test_parameters_do_not_change() -> None:
    params = SamplingParams()
    assert params.speculation == SpeculationParams(True, None, None)
    with pytest.raises(dataclasses.FrozenInstanceError):
        params.seed = 1  # type: ignore[misc]
    with pytest.raises(dataclasses.FrozenInstanceError):
        params.speculation.enabled = False  # type: ignore[misc]
