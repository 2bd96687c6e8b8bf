"""A format that this model cannot write: the request that asks for it is told so, and no other notices."""

from collections.abc import Iterator
from dataclasses import replace

import httpx
import pytest
from llguidance import LLMatcher

from engine.grammar import GrammarCompiler, GrammarVocabulary
from engine.sampling_params import Constraint
from tests.engines import build_llm, load_tiny
from tests.server.engines import serving
from tests.server.sse import payloads
from tests.server.test_validation import error_of
from tests.tiny import BOS, EOS, IM_END

CHOICE = {"choice": ["one two quite"]}


def without_q() -> GrammarVocabulary:
    """The bytes, but one cannot be written, as vocabularies of words have no token for most characters."""
    tokens = [bytes([byte]) if byte != ord("q") else b"Q!" for byte in range(256)]
    special = [b"<bos>", b"<eos>", b"<|im_end|>"]
    return GrammarVocabulary(
        [*tokens, *special], frozenset({BOS, EOS, IM_END}), frozenset({EOS}), lambda text: list(text.encode())
    )


@pytest.fixture(scope="module", params=["none", "ngram", "draft_model 2,1,1"])
def http(request: pytest.FixtureRequest) -> Iterator[httpx.Client]:
    llm = build_llm(request.param, target=load_tiny(max_model_len=512))
    llm.core.limits = replace(llm.core.limits, grammars=GrammarCompiler(without_q))
    with serving(llm) as server, httpx.Client(base_url=server.url, timeout=60) as client:
        yield client


@pytest.mark.parametrize(
    ("field", "wanted", "where"),
    [
        ("structured_outputs.choice", {"structured_outputs": CHOICE}, "behind 'one two '"),
        ("structured_outputs.regex", {"structured_outputs": {"regex": "q+"}}, "at its very beginning"),
        (
            "response_format",
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "s", "schema": {"const": "aqb"}},
                }
            },
            "behind '\"a'",
        ),
    ],
)
def test_it_says_where_the_format_demands_what(
    http: httpx.Client, field: str, wanted: dict[str, object], where: str
) -> None:
    body = {"prompt": "one two", "temperature": 0, "max_tokens": 60, **wanted}
    error = error_of(http.post("/v1/completions", json=body))
    assert error["param"] == field
    assert error["message"].startswith(f"{field}: {where} the format allows only 'q")
    assert http.post("/v1/completions", json={"prompt": "one two", "max_tokens": 3}).status_code == 200


def test_in_a_stream_it_is_an_event(http: httpx.Client) -> None:
    body = {"prompt": "x", "temperature": 0, "max_tokens": 60, "structured_outputs": CHOICE, "stream": True}
    answer = http.post("/v1/completions", json=body)
    assert answer.status_code == 200
    error = payloads(answer.text)[-1]["error"]
    assert error["type"] == "invalid_request_error"
    assert "behind 'one two '" in error["message"]
    assert "internal" not in error["message"]


def test_a_format_that_grows_too_complex_says_so(http: httpx.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    truth = GrammarCompiler._new

    def in_its_error_state(self: GrammarCompiler, constraint: Constraint) -> LLMatcher:
        matcher = truth(self, constraint)
        assert not matcher.consume_token(ord("z"))
        return matcher

    monkeypatch.setattr(GrammarCompiler, "_new", in_its_error_state)
    body = {"prompt": "x", "max_tokens": 9, "structured_outputs": {"regex": "ab"}}
    error = error_of(http.post("/v1/completions", json=body))
    assert error["param"] == "structured_outputs.regex"
    assert "at its very beginning the format has become too complex to follow (" in error["message"]
