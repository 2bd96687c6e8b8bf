"""JSON read in pieces is what a parser in one go makes of it, and no piece is long."""

import json
import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic_core import from_json

from server.errors import ApiError
from server.protocol import json_pieces
from server.protocol.chat import ChatCompletionRequest
from server.protocol.completion import CompletionRequest
from server.protocol.json_pieces import MAX_CONTAINERS, MAX_DEPTH, BrokenJson, read_json
from server.protocol.parsing import MAX_FIELDS, parse, parse_in_pieces
from tests.server.test_validation import BAD_VALUES, GOOD

KINDS: dict[str, Any] = {"completions": CompletionRequest, "chat": ChatCompletionRequest}
_SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()
VALUES = st.recursive(
    _SCALARS, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=60
)


@pytest.fixture(params=[4, 30, 1 << 16])
def piece(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """Pieces so short that they end anywhere, and those of every day."""
    length: int = request.param
    monkeypatch.setattr(json_pieces, "PIECE_CHARACTERS", length)
    return length


def verdict(body: bytes) -> Any:
    try:
        return read_json(body)
    except BrokenJson:
        return BrokenJson


@pytest.mark.parametrize("layout", [{}, {"indent": 3}, {"separators": (",", ":"), "ensure_ascii": False}])
def test_values_come_out_as_they_went_in(piece: int, layout: dict[str, Any]) -> None:
    @settings(max_examples=60, deadline=None)
    @given(value=VALUES)
    def check(value: object) -> None:
        text = f" {json.dumps(value, **layout)}\n"
        assert repr(read_json(text.encode())) == repr(json.loads(text))

    check()


def test_what_the_other_parser_refuses_is_refused_and_nothing_else(piece: int) -> None:
    """Bodies with one character changed, added or left out."""
    chance = random.Random(piece)
    whole = json.dumps({"a": [1, -2.5e3, 'x\\u00e9"', {}, [], [True, None]], "b}": {"c]": '"[', "d": 12}})
    outcomes = set()
    for _ in range(1500):
        place = chance.randrange(len(whole))
        added = chance.choice(['"', ",", "{", "]", ":", "\\", "0", "-", "e", " ", "", "n"])
        body = (whole[:place] + added + whole[place + chance.randint(0, 1) :]).encode()
        try:
            expected = from_json(body)
        except ValueError:
            expected = BrokenJson
        assert repr(verdict(body)) == repr(expected), body
        outcomes.add(expected is BrokenJson)
    assert outcomes == {True, False}


@pytest.mark.parametrize(
    "body",
    [
        *[b"", b" ", b"[", b"{", b"[1,]", b'{"a":1,}', b"[,1]", b"[1 2]", b'{"a" 1}', b"{1:2}", b"1 2", b'"'],
        *[b"[1}", b'{"a":1]', b'["a\nb"]', b"\xff", b'"\xed\xa0\x80"', b"01", b"+1", b"1.", b"nul", b"'a'"],
        *[rb'"\ud800"', rb'["\ud800","\udc00"]', rb'"\ud800x\udc00"', rb'"\udc00"', rb'"\ud800\ud800"'],
        *[rb'{"\udfff":1}', rb'"\uD83D\n"', b"9" * 5000],
    ],
)
def test_broken(piece: int, body: bytes) -> None:
    with pytest.raises(BrokenJson):
        read_json(body)
    with pytest.raises(ValueError, match=r"."):
        from_json(body)


def test_whole_pairs_are_characters(piece: int) -> None:
    body = rb'["\ud83d\ude00", "\\ud800", "\\\ud83d\ude00", {"\uD83D\uDE00": "\u00e9"}]'
    assert read_json(body) == from_json(body)


def test_a_fault_is_found_where_it_is() -> None:
    body = b'{"prompt": [' + b"1, " * 100_000 + b"x]}"
    with pytest.raises(BrokenJson, match=f"at character {len(body) - 3}$"):
        read_json(body)


def test_depth_and_number_of_containers_have_limits() -> None:
    assert read_json(b"[" * MAX_DEPTH + b"]" * MAX_DEPTH)
    with pytest.raises(BrokenJson, match="nested too deeply"):
        read_json(b"[" * 5000)
    assert isinstance(read_json(b"[" + b"{}," * (MAX_CONTAINERS - 2) + b"[]]"), list)
    with pytest.raises(BrokenJson, match="more than 100000 lists and objects"):
        read_json(b"[" + b"{}," * (MAX_CONTAINERS - 1) + b"[]]")


def test_no_piece_is_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is left to C in one go, and so is done under the interpreter's lock, is bounded."""
    lengths: list[int] = []

    def watched(text: str) -> Any:
        lengths.append(len(text))
        return truth(text)

    truth = json.loads
    monkeypatch.setattr(json_pieces.json, "loads", watched)  # type: ignore[attr-defined]
    bodies = [
        b'{"prompt": [' + b"12345," * 200_000 + b"1]}",
        b'{"stop": [' + b'"a}b",' * 200_000 + b'"]"]}',
        b'{"logit_bias": {' + b'"7": 1,' * 150_000 + b'"8": 2}}',
        b'{"prompt": [[' + b"1," * 50_000 + b"1],[" + b"2," * 500_000 + b"2]]}",
        b'{"messages": [' + b'{"role": "user", "content": "{[,"},' * 30_000 + b"{}]}",
    ]
    for body in bodies:
        del lengths[:]
        assert read_json(body) == truth(body)
        assert max(lengths) <= json_pieces.PIECE_CHARACTERS + 2
        if b"role" not in body:
            assert len(lengths) < 3 * len(body) / json_pieces.PIECE_CHARACTERS + 5, "pieces are used"


@pytest.mark.parametrize("endpoint", KINDS)
def test_requests_and_errors_are_the_same(endpoint: str) -> None:
    def outcome(read: Any, body: bytes) -> Any:
        try:
            return read(KINDS[endpoint], body)
        except ApiError as error:
            return str(error), error.param, error.code

    values: list[dict[str, Any]] = [{field: value} for field, bad in BAD_VALUES.items() for value in bad]
    kept: list[dict[str, Any]] = [
        {"temperature": 1, "seed": 7},
        {"stop": ["a"], "n": 2},
        {"logit_bias": {"5": 3}},
        {"x": [1]},
    ]
    wrong: list[dict[str, Any]] = [
        {"prompt": value, "messages": value} for value in ([], [1.5], [True], [[1], ["a"]], 5, None)
    ]
    for extra in [*values, *kept, *wrong]:
        body = json.dumps({**GOOD[endpoint], **extra}).encode()
        assert outcome(parse_in_pieces, body) == outcome(parse, body), extra
    for body in (b"[1]", b"5", b"null"):
        assert outcome(parse_in_pieces, body) == outcome(parse, body)


def test_a_large_body_has_a_limit_of_fields() -> None:
    body = {"prompt": "x", **{f"x{number}": 1 for number in range(MAX_FIELDS)}}
    with pytest.raises(ApiError, match="1025 fields; 1024 are the limit"):
        parse_in_pieces(CompletionRequest, json.dumps(body).encode())
