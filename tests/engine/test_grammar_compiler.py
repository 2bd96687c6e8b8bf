"""Compiling formats from several threads: what waits for what, and what is compiled once."""

import json
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import pytest
from llguidance import LLMatcher

from engine.errors import InvalidRequest
from engine.grammar import GrammarCompiler, GrammarVocabulary
from engine.sampling_params import Constraint, ConstraintKind

PATIENCE = 20.0


def vocabulary() -> GrammarVocabulary:
    tokens = [bytes([byte]) for byte in range(256)]
    return GrammarVocabulary(
        [*tokens, b"<eos>"], frozenset({256}), frozenset({256}), lambda text: list(text.encode())
    )


def schema(num_properties: int) -> Constraint:
    properties = {f"property_{number}": {"type": "integer"} for number in range(num_properties)}
    source = json.dumps({"type": "object", "properties": properties, "required": list(properties)})
    return Constraint(ConstraintKind.JSON, source, "response_format")


SMALL, OTHER, LARGE = schema(1), schema(2), schema(500)


class Held(GrammarCompiler):
    """One that holds the compilation of a format back until it is let go, and counts them all."""

    def __init__(self, held: Constraint) -> None:
        super().__init__(self._read)
        self.held = held
        self.begun, self.let_go = threading.Event(), threading.Event()
        self.counts: Counter[str] = Counter()
        self.num_readings = 0

    def _read(self) -> GrammarVocabulary:
        self.num_readings += 1
        return vocabulary()

    def _new(self, constraint: Constraint) -> LLMatcher:
        self.counts[constraint.source] += 1
        if constraint == self.held:
            self.begun.set()
            assert self.let_go.wait(PATIENCE)
        return super()._new(constraint)


def test_a_large_format_holds_up_no_small_ones() -> None:
    compiler = Held(LARGE)
    with ThreadPoolExecutor(4) as pool:
        large = [pool.submit(compiler.compile, LARGE) for _ in range(2)]
        assert compiler.begun.wait(PATIENCE)
        small = [pool.submit(compiler.compile, constraint) for constraint in (SMALL, OTHER, SMALL)]
        for future in small:
            assert future.result(PATIENCE).forced_tokens()[:2] == (ord("{"), ord('"'))
        assert not any(future.done() for future in large)
        compiler.let_go.set()
        for future in large:
            assert bytes(future.result(PATIENCE).forced_tokens()).startswith(b'{"property_0": ')
    assert compiler.counts == {SMALL.source: 1, OTHER.source: 1, LARGE.source: 1}
    assert compiler.num_readings == 1


def test_equal_formats_that_come_together_are_compiled_once() -> None:
    compiler = Held(SMALL)
    with ThreadPoolExecutor(4) as pool:
        futures = [pool.submit(compiler.compile, SMALL) for _ in range(4)]
        assert compiler.begun.wait(PATIENCE)
        compiler.let_go.set()
        matchers = [future.result(PATIENCE) for future in futures]
    assert compiler.counts == {SMALL.source: 1}
    # Each follows an answer of its own.
    assert matchers[0].advance(tuple(b'{"property_0": 1}'))
    assert matchers[1].forced_tokens() == tuple(b'{"property_0": ')


@pytest.mark.parametrize("at", ["in front", "behind"])
def test_the_least_recently_used_format_is_forgotten(at: str) -> None:
    compiler = Held(Constraint(ConstraintKind.REGEX, "never", "regex"))
    formats = [Constraint(ConstraintKind.REGEX, f"a{{{number}}}", "regex") for number in range(1, 66)]
    for constraint in formats[:64]:
        compiler.compile(constraint)
    if at == "behind":
        compiler.compile(formats[0])
    compiler.compile(formats[64])
    compiler.compile(formats[0])
    compiler.compile(formats[1])
    assert compiler.counts[formats[0].source] == (2 if at == "in front" else 1)
    assert compiler.counts[formats[1].source] == 2


def test_a_format_that_is_refused_leaves_the_lane_free() -> None:
    compiler = GrammarCompiler(vocabulary)
    for _ in range(2):
        with pytest.raises(InvalidRequest, match="regex"):
            compiler.compile(Constraint(ConstraintKind.REGEX, "(", "regex"))
    assert compiler.compile(SMALL).forced_tokens()
