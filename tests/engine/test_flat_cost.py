"""The work that turns a token into text does not grow with the answer, and hardly with the stop strings.

Work is counted, not timed: every Python line that runs for a token, and every character or token that is
handed to a decoder or to the search for stop strings.
"""

import random
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

import engine.detokenizer as detokenizer_module
from engine.core.kv_cache_manager import KVCacheManager
from engine.core.stopping import StopRules, apply_stop_rules
from engine.output_processor import OutputProcessor
from engine.sampling_params import MAX_STOP_STRINGS, SamplingParams
from engine.speculation.base import DraftRequest, ProposalContext
from engine.speculation.ngram import NgramSpeculator
from engine.tokenizer import Tokenizer
from tests.core.builders import make_request
from tests.engine.vocabularies import word_tokenizer
from tests.tiny import byte_tokenizer

NUM_TOKENS, SPAN = 4000, 500
RULES = StopRules(frozenset({257}), frozenset(), False, 0, NUM_TOKENS)
# They all begin like words of the text, so that each is tried again and again.
STOPS = ("the end of it!", "then never", "e END", "t" * 200)


class Work:
    """Counts lines that run, and what decoders are given."""

    def __init__(self) -> None:
        self.units = 0

    @contextmanager
    def counting(self) -> Iterator[None]:
        def trace(frame: FrameType, event: str, argument: object) -> Any:
            self.units += event == "line"
            return trace

        before = sys.gettrace()
        sys.settrace(trace)
        try:
            yield
        finally:
            sys.settrace(before)


class MeteredTokenizer(Tokenizer):
    """Charges every token and byte that goes through it."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast, work: Work) -> None:
        super().__init__(tokenizer)
        self._work = work

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        self._work.units += len(token_ids)
        return super().decode(token_ids, skip_special_tokens=skip_special_tokens)

    def token_bytes(self, token_id: int) -> bytes:
        found = super().token_bytes(token_id)
        self._work.units += len(found)
        return found


def cost_of_text(
    tokenizer: PreTrainedTokenizerFast, stops: tuple[str, ...], k: int, tokens: list[int]
) -> tuple[float, float]:
    """Units of work for the first and the last tokens of an answer, in runs of k."""
    work = Work()
    processor = OutputProcessor(MeteredTokenizer(tokenizer, work))
    processor.add("r", SamplingParams(stop=stops), [0])
    costs: list[float] = []
    said = ""
    for start in range(0, NUM_TOKENS, k):
        run = tokens[start : start + k]
        before = work.units
        with work.counting():
            stop = apply_stop_rules(run, start, RULES)
            processed = processor.process("r", run, stop)
        said += processed.text
        assert processed.num_kept == len(run)
        costs += [(work.units - before) / len(run)] * len(run)
    assert len(said) > NUM_TOKENS / 2
    return sum(costs[100 : SPAN + 100]), sum(costs[-SPAN - 1 : -1])


def letters() -> list[int]:
    rng = random.Random(0)
    text = " ".join(rng.choice(["the", "then", "end", "of", "ten", "it"]) for _ in range(NUM_TOKENS))
    return list(text.encode()[:NUM_TOKENS])


WORDS = ["<unk>", "the", "then", "end", "of", "ten", "it"]
KINDS: dict[str, Callable[[], tuple[PreTrainedTokenizerFast, list[int]]]] = {
    "bytes": lambda: (byte_tokenizer(), letters()),
    "words that depend on their neighbours": lambda: (
        word_tokenizer(None, WORDS),
        random.Random(1).choices(range(1, len(WORDS)), k=NUM_TOKENS),
    ),
}


@pytest.mark.parametrize("k", [1, 17])
@pytest.mark.parametrize("num_stops", [0, MAX_STOP_STRINGS])
@pytest.mark.parametrize("kind", KINDS)
def test_text_costs_the_same_early_and_late(kind: str, num_stops: int, k: int) -> None:
    tokenizer, tokens = KINDS[kind]()
    first, last = cost_of_text(tokenizer, STOPS[:num_stops], k, tokens)
    assert last < 1.15 * first
    assert last > 0.5 * first


@pytest.mark.parametrize("kind", KINDS)
def test_stop_strings_cost_a_small_multiple(kind: str) -> None:
    tokenizer, tokens = KINDS[kind]()
    without = sum(cost_of_text(tokenizer, (), 1, tokens))
    one = sum(cost_of_text(tokenizer, STOPS[:1], 1, tokens))
    four = sum(cost_of_text(tokenizer, STOPS, 1, tokens))
    assert four < 8 * without
    assert four - without < 4.5 * (one - without)


def test_characters_searched_do_not_grow(monkeypatch: pytest.MonkeyPatch) -> None:
    """The search looks at each character once per stop string, a step of the automaton each at most."""
    steps = 0
    step = detokenizer_module._Pattern._step

    def counting(pattern: Any, char: str) -> None:
        nonlocal steps
        steps += 1
        step(pattern, char)

    monkeypatch.setattr(detokenizer_module._Pattern, "_step", counting)
    matcher = detokenizer_module.StopStringMatcher(("t" * 300, "xtt", "tx", "t" * 50 + "x"))
    seen: list[int] = []
    for _ in range(NUM_TOKENS):
        before = steps
        if matcher.push("s" if len(seen) % 40 == 39 else "t").stop is not None:
            raise AssertionError("nothing here is a stop string")
        seen.append(steps - before)
    assert max(seen) <= 4
    assert sum(seen[-SPAN:]) <= sum(seen[:SPAN])


def test_prompt_lookup_and_publishing_cost_the_same_early_and_late() -> None:
    work = Work()
    rng = random.Random(0)
    # So few symbols that from the thousandth token on there are as many places as are compared at most.
    request = make_request("r", [rng.randrange(1, 25)])
    kv = KVCacheManager(NUM_TOKENS // 16 + 1, 16)
    assert kv.admit(request, kv.match_prefix(request), NUM_TOKENS)
    speculator = NgramSpeculator(1, 3, frozenset())
    costs: list[int] = []
    for _ in range(NUM_TOKENS - 1):
        request.num_computed_tokens = request.num_tokens
        request.token_ids.append(rng.randrange(1, 25))
        ask = DraftRequest(
            request_id="r",
            token_ids=request.token_ids,
            num_prompt_tokens=1,
            num_computed_tokens=request.num_computed_tokens,
            num_cached_tokens=0,
            block_table=kv.block_table(request),
            params=request.params,
            budget=4,
        )
        before = work.units
        with work.counting():
            speculator.propose(ProposalContext((ask,)))
            kv.publish(request, 0)
        costs.append(work.units - before)
    # Early on little repeats, so that there is less to propose.
    assert sum(costs[-SPAN:]) < 1.15 * sum(costs[1000 : 1000 + SPAN])
