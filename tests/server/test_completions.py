"""POST /v1/completions: the whole answers."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from engine.sampling_params import SEED_MAX, Acceptance, SamplingParams, SpeculationParams
from tests.fakes import FakeEngine
from tests.server.conftest import Served

Serve = Callable[..., Served]


def complete(served: Served, **body: Any) -> dict[str, Any]:
    response = served.http.post("/v1/completions", json={"model": "fake", **body})
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


def by_choice(prompt: Sequence[int], params: SamplingParams) -> bytes:
    return b"%b/%d" % (bytes(prompt), params.choice)


def test_has_the_shape_of_openai(served: Served) -> None:
    answer = complete(served, prompt="Say hello", max_tokens=5)
    assert answer["id"].startswith("cmpl-")
    assert answer["object"] == "text_completion"
    assert answer["model"] == "fake"
    assert answer["system_fingerprint"].startswith("outrider-")
    assert answer["created"] > 1_700_000_000
    assert answer["choices"] == [
        {"index": 0, "text": "Hello", "logprobs": None, "finish_reason": "length", "stop_reason": None}
    ]
    assert answer["usage"] == {
        "prompt_tokens": 9,
        "completion_tokens": 5,
        "total_tokens": 14,
        "prompt_tokens_details": {"cached_tokens": 0},
        "completion_tokens_details": {"accepted_prediction_tokens": 0, "rejected_prediction_tokens": 0},
    }
    assert answer["speculation"] == {
        "steps": 2,
        "drafts": 2,
        "drafted_tokens": 8,
        "accepted_tokens": 3,
        "tokens_per_forward": 2.5,
        "acceptance": "match",
        "lossless": True,
    }


def test_max_tokens_is_16_by_default_and_yields_to_the_context(serve: Serve) -> None:
    served = serve(FakeEngine(answer=b"x" * 100, max_model_len=128))
    assert complete(served, prompt="a")["usage"]["completion_tokens"] == 16
    near_the_end = complete(served, prompt="a" * 120)
    assert served.engine.requests[-1].params.max_tokens == 8
    assert near_the_end["usage"]["completion_tokens"] == 8
    assert near_the_end["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize(("min_tokens", "expected"), [(5, 16), (16, 16), (17, 17), (127, 127)])
def test_the_default_of_max_tokens_yields_to_min_tokens(serve: Serve, min_tokens: int, expected: int) -> None:
    served = serve(FakeEngine(answer=b"x" * 200, max_model_len=128))
    answer = complete(served, prompt="a", min_tokens=min_tokens)
    params = served.engine.requests[-1].params
    assert (params.min_tokens, params.max_tokens) == (min_tokens, expected)
    assert answer["usage"]["completion_tokens"] == expected


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("ab", ["ab/0"]),
        (["ab"], ["ab/0"]),
        (["ab", "c"], ["ab/0", "c/0"]),
        ([97, 98], ["ab/0"]),
        ([[97, 98], [99]], ["ab/0", "c/0"]),
    ],
)
def test_takes_every_kind_of_prompt(serve: Serve, prompt: object, expected: list[str]) -> None:
    served = serve(FakeEngine(answer=by_choice))
    choices = complete(served, prompt=prompt)["choices"]
    assert [choice["text"] for choice in choices] == expected
    assert [choice["index"] for choice in choices] == list(range(len(expected)))


def test_index_is_prompt_times_n_plus_choice_and_prompts_count_once(serve: Serve) -> None:
    served = serve(FakeEngine(answer=by_choice, num_cached_tokens=1))
    answer = complete(served, prompt=["ab", "c"], n=3)
    expected = ["ab/0", "ab/1", "ab/2", "c/0", "c/1", "c/2"]
    assert [(c["index"], c["text"]) for c in answer["choices"]] == list(enumerate(expected))
    assert answer["usage"]["prompt_tokens"] == 3
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 2
    assert answer["usage"]["completion_tokens"] == sum(map(len, expected))


def test_choices_run_at_the_same_time(serve: Serve) -> None:
    running: list[int] = []

    def answer(prompt: Sequence[int], params: SamplingParams) -> bytes:
        running.append(len(engine.active))
        return b"abcdef"

    engine = FakeEngine(answer=answer, step_seconds=0.02)
    complete(serve(engine), prompt=["x", "y"], n=4)
    assert max(running) == 8


def test_choices_share_a_seed_and_prompts_without_one_do_not(serve: Serve) -> None:
    served = serve()
    complete(served, prompt=["x", "x"], n=3)
    seeds = [request.params.seed for request in served.engine.requests]
    assert [request.params.choice for request in served.engine.requests] == [0, 1, 2, 0, 1, 2]
    assert len(set(seeds[:3])) == len(set(seeds[3:])) == 1
    assert seeds[0] != seeds[3]
    assert all(seed is not None and 0 <= seed <= SEED_MAX for seed in seeds)


def test_two_calls_draw_two_seeds(serve: Serve) -> None:
    served = serve()
    complete(served, prompt="x")
    complete(served, prompt="x")
    first, second = served.engine.requests
    assert first.params.seed != second.params.seed
    assert first.request_id != second.request_id


@pytest.mark.parametrize("seed", [-1, -7, 0, 2**63 - 1, -(2**63)])
def test_any_signed_64_bit_seed_is_passed_on(serve: Serve, seed: int) -> None:
    served = serve()
    complete(served, prompt=["x", "y"], n=2, seed=seed)
    assert {request.params.seed for request in served.engine.requests} == {seed}


def test_every_field_reaches_the_engine(serve: Serve) -> None:
    served = serve()
    complete(
        served,
        prompt="x",
        max_tokens=9,
        min_tokens=2,
        temperature=0.5,
        top_p=0.9,
        top_k=7,
        min_p=0.1,
        presence_penalty=0.25,
        frequency_penalty=-0.5,
        repetition_penalty=1.5,
        logit_bias={"5": -100, "7": 2.5},
        stop=["a", "b"],
        stop_token_ids=[3, 4],
        ignore_eos=True,
        logprobs=2,
        skip_special_tokens=False,
        include_stop_str_in_output=True,
        seed=11,
        speculation={"enabled": False, "num_draft_tokens": 3, "acceptance": "rejection"},
    )
    params = served.engine.requests[0].params
    assert params.speculation.enabled is False
    assert params.speculation.num_draft_tokens == 3
    assert params.speculation.acceptance is Acceptance.REJECTION
    assert params == SamplingParams(
        max_tokens=9,
        min_tokens=2,
        temperature=0.5,
        top_p=0.9,
        top_k=7,
        min_p=0.1,
        presence_penalty=0.25,
        frequency_penalty=-0.5,
        repetition_penalty=1.5,
        logit_bias=((5, -100.0), (7, 2.5)),
        stop=("a", "b"),
        stop_token_ids=(3, 4),
        ignore_eos=True,
        logprobs=2,
        skip_special_tokens=False,
        include_stop_str_in_output=True,
        seed=11,
        speculation=params.speculation,
    )


@pytest.mark.parametrize("top_k", [0, -1])
def test_top_k_is_off_in_both_spellings(serve: Serve, top_k: int) -> None:
    served = serve()
    complete(served, prompt="x", top_k=top_k)
    assert served.engine.requests[0].params.top_k == 0


def test_null_means_the_default(serve: Serve) -> None:
    served = serve()
    fields = [
        "model",
        "max_tokens",
        "temperature",
        "top_p",
        "n",
        "stop",
        "seed",
        "logprobs",
        "echo",
        "stream",
    ]
    fields += ["logit_bias", "stream_options", "presence_penalty", "best_of", "suffix", "user", "speculation"]
    complete(served, prompt="x", **dict.fromkeys(fields))
    params = served.engine.requests[0].params
    match = SpeculationParams(acceptance=Acceptance.MATCH)
    assert params == SamplingParams(max_tokens=16, seed=params.seed, speculation=match)


@pytest.mark.parametrize(
    ("stop", "expected"),
    [(None, ()), ([], ()), ("END", ("END",)), (["END"], ("END",)), (list("abcd"), tuple("abcd"))],
)
def test_stop_is_a_string_or_a_list(serve: Serve, stop: object, expected: tuple[str, ...]) -> None:
    served = serve()
    complete(served, prompt="x", stop=stop)
    assert served.engine.requests[0].params.stop == expected


@pytest.mark.parametrize(
    ("prompt", "texts"),
    [([5, 6, 7], ["\5\6\7"]), ([[5, 6], [7]], ["\5\6", "\7"]), (["a", "bé"], ["a", "bé"])],
)
def test_echo_puts_the_prompt_in_front(serve: Serve, prompt: object, texts: list[str]) -> None:
    choices = complete(serve(), prompt=prompt, echo=True, max_tokens=3)["choices"]
    assert [choice["text"] for choice in choices] == [text + "Hel" for text in texts]


def test_best_of_equal_to_n_asks_for_nothing_more(served: Served) -> None:
    assert len(complete(served, prompt="x", n=2, best_of=2)["choices"]) == 2


def test_stream_options_without_stream_are_ignored(served: Served) -> None:
    for options in ({"include_usage": True}, {"continuous_usage_stats": True}, {}, None):
        assert complete(served, prompt="x", stream=False, stream_options=options)["usage"]
    assert complete(served, prompt="x", stream_options={"include_usage": True})["object"] == "text_completion"


@pytest.mark.parametrize("name", ["fake", "org/fake-model", None])
def test_answers_to_the_served_name_and_the_engines(served: Served, name: str | None) -> None:
    assert complete(served, prompt="x", model=name)["model"] == (name or "fake")


def test_a_text_made_non_empty_by_bos_is_served(serve: Serve) -> None:
    served = serve(FakeEngine(add_bos=True))
    assert complete(served, prompt="")["usage"]["prompt_tokens"] == 1
