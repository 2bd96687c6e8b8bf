from collections.abc import Sequence
from random import Random
from typing import Any

import pytest

from engine.core.stopping import Stop, StopRules, apply_stop_rules
from engine.errors import InvalidRequest
from engine.output_processor import OutputProcessor, Processed
from engine.outputs import FinishReason, TokenLogprob, TopLogprob
from engine.sampling.logprobs import RowLogprobs
from engine.sampling_params import SamplingParams
from engine.tokenizer import Tokenizer
from tests.engine.vocabularies import ids, sentencepiece_tokenizer
from tests.tiny import BOS, EOS, IM_END, byte_tokenizer

PROMPT = (BOS, *b"Say: ")
GOES_ON = None
STOP, LENGTH = FinishReason.STOP, FinishReason.LENGTH


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer(byte_tokenizer())


def begun(tokenizer: Tokenizer | None, **params: Any) -> OutputProcessor:
    processor = OutputProcessor(tokenizer)
    processor.add("r", SamplingParams(**params), PROMPT)
    return processor


def generate(
    tokenizer: Tokenizer, tokens: Sequence[int], run_length: int, **params: Any
) -> tuple[str, int, FinishReason | None, str | int | None]:
    """An answer committed in runs, as the engine does it: its text, its length, and why it ended."""
    wanted = SamplingParams(**params)
    rules = StopRules(
        eos_token_ids=frozenset({EOS, IM_END}),
        stop_token_ids=frozenset(wanted.stop_token_ids),
        ignore_eos=wanted.ignore_eos,
        min_tokens=wanted.min_tokens,
        max_tokens=len(tokens) if wanted.max_tokens is None else wanted.max_tokens,
    )
    processor = OutputProcessor(tokenizer)
    processor.add("r", wanted, PROMPT)
    text, count = "", 0
    while True:
        run = tokens[count : count + run_length]
        done = processor.process("r", run, apply_stop_rules(run, count, rules))
        assert done.num_kept <= len(run)
        text, count = text + done.text, count + done.num_kept
        if done.finish_reason is not None:
            return text, count, done.finish_reason, done.stop_reason
        assert done.num_kept == len(run) > 0


RUN_LENGTHS = [1, 2, 3, 5, 16, 64]


@pytest.mark.parametrize("run_length", RUN_LENGTHS)
def test_stop_string_ends_the_answer_at_its_token_whatever_the_run(
    tokenizer: Tokenizer, run_length: int
) -> None:
    tokens = list(b"a##b, and the text goes on for long after it")
    assert generate(tokenizer, tokens, run_length, stop=("##",)) == ("a", 3, STOP, "##")
    assert generate(tokenizer, tokens, run_length, stop=("##",), include_stop_str_in_output=True) == (
        "a##",
        3,
        STOP,
        "##",
    )


@pytest.mark.parametrize("end", range(1, 17))
def test_stop_string_is_found_at_every_place_of_a_long_run(tokenizer: Tokenizer, end: int) -> None:
    run = list(b"x" * 17)
    run[end - 1 : end + 1] = b"##"
    processed = begun(tokenizer, stop=("##",)).process("r", run, Stop(17))
    assert processed == Processed(end + 1, "x" * (end - 1), STOP, "##")


def test_stop_string_that_began_in_an_earlier_run(tokenizer: Tokenizer) -> None:
    processor = begun(tokenizer, stop=("three\nZZZ",))
    assert processor.process("r", list(b"two three\nZ"), Stop(11)) == Processed(11, "two ")
    assert processor.process("r", list(b"ZZZ"), Stop(3)) == Processed(2, "", STOP, "three\nZZZ")
    assert processor.finish("r") == ""


def test_text_behind_a_stop_string_in_the_same_token_is_dropped() -> None:
    wrapped = sentencepiece_tokenizer()
    (three, comma) = ids(wrapped, "▁three", ",")
    processor = OutputProcessor(Tokenizer(wrapped))
    processor.add("r", SamplingParams(stop=(" th",)), [comma])
    assert processor.process("r", [comma, three, comma], Stop(3)) == Processed(2, ",", STOP, " th")


@pytest.mark.parametrize("run_length", RUN_LENGTHS)
@pytest.mark.parametrize(
    ("tokens", "params", "expected"),
    [
        ([*b"one three", EOS], {}, ("one three", 10, STOP, None)),
        ([*b"one three", ord("!")], {"stop_token_ids": (ord("!"),)}, ("one three", 10, STOP, ord("!"))),
        ([*b"one three"], {}, ("one three", 9, LENGTH, None)),
        ([*b"one three and more"], {"max_tokens": 9}, ("one three", 9, LENGTH, None)),
    ],
    ids=["eos", "stop-id", "length", "length-in-a-run"],
)
def test_text_held_back_for_a_stop_string_comes_out_at_every_end(
    tokenizer: Tokenizer, run_length: int, tokens: list[int], params: dict[str, Any], expected: object
) -> None:
    assert generate(tokenizer, tokens, run_length, stop=("three\nZZZ",), **params) == expected


def test_text_held_back_comes_out_on_abort(tokenizer: Tokenizer) -> None:
    processor = begun(tokenizer, stop=("three\nZZZ",))
    assert processor.process("r", list(b"one three"), Stop(9)) == Processed(9, "one ")
    assert processor.finish("r") == "three"
    assert processor.finish("r") == ""


def test_abort_inside_a_character_and_a_stop_string(tokenizer: Tokenizer) -> None:
    processor = begun(tokenizer, stop=("ab",))
    processor.process("r", [*b"xa", 0xE4], Stop(3))
    assert processor.finish("r") == "a\ufffd"


@pytest.mark.parametrize("run_length", RUN_LENGTHS)
def test_split_characters(tokenizer: Tokenizer, run_length: int) -> None:
    tokens = list("ř你🙂!".encode())
    assert generate(tokenizer, tokens, run_length)[0] == "ř你🙂!"
    for limit, text in ((1, "\ufffd"), (2, "ř"), (6, "ř你\ufffd"), (8, "ř你\ufffd"), (9, "ř你🙂")):
        assert generate(tokenizer, tokens, run_length, max_tokens=limit) == (text, limit, LENGTH, None)


def test_no_piece_of_a_stream_holds_half_a_character(tokenizer: Tokenizer) -> None:
    processor = begun(tokenizer, stop=("🙂🙂",))
    pieces = [processor.process("r", [byte], Stop(1)).text for byte in "a🙂ř".encode()]
    assert pieces == ["a", "", "", "", "", "", "🙂ř"]


@pytest.mark.parametrize("run_length", RUN_LENGTHS)
@pytest.mark.parametrize("end", [EOS, IM_END])
def test_the_token_that_ends_the_turn_is_not_shown(tokenizer: Tokenizer, run_length: int, end: int) -> None:
    tokens = [*b"hi", end, *b" ignored"]
    assert generate(tokenizer, tokens, run_length) == ("hi", 3, STOP, None)
    shown = generate(tokenizer, tokens, run_length, skip_special_tokens=False)
    assert shown == ("hi" + {EOS: "<eos>", IM_END: "<|im_end|>"}[end], 3, STOP, None)


def test_an_end_of_turn_that_is_no_special_token_is_not_shown_either(tokenizer: Tokenizer) -> None:
    dot = Stop(3, STOP)
    assert begun(tokenizer).process("r", list(b"hi."), dot) == Processed(3, "hi", STOP)
    assert begun(tokenizer, skip_special_tokens=False).process("r", list(b"hi."), dot).text == "hi."


def test_stop_id_is_shown_only_when_asked_for(tokenizer: Tokenizer) -> None:
    dot = Stop(3, STOP, ord("."))
    assert begun(tokenizer).process("r", list(b"hi."), dot) == Processed(3, "hi", STOP, ord("."))
    shown = begun(tokenizer, include_stop_str_in_output=True)
    assert shown.process("r", list(b"hi."), dot) == Processed(3, "hi.", STOP, ord("."))


def test_ignored_eos_leaves_no_text(tokenizer: Tokenizer) -> None:
    assert generate(tokenizer, [*b"a", EOS, *b"b"], 3, ignore_eos=True) == ("ab", 3, LENGTH, None)


@pytest.mark.parametrize("run_length", RUN_LENGTHS)
def test_stop_string_wins_over_a_later_end_and_loses_to_an_earlier_one(
    tokenizer: Tokenizer, run_length: int
) -> None:
    assert generate(tokenizer, [*b"a##", EOS], run_length, stop=("##",)) == ("a", 3, STOP, "##")
    assert generate(tokenizer, [*b"a#", EOS, *b"#"], run_length, stop=("##",)) == ("a#", 3, STOP, None)
    assert generate(tokenizer, list(b"a##b"), run_length, stop=("##",), max_tokens=3) == ("a", 3, STOP, "##")
    assert generate(tokenizer, list(b"a##b"), run_length, stop=("##",), max_tokens=2)[:3] == ("a#", 2, LENGTH)


@pytest.mark.parametrize("run_length", RUN_LENGTHS)
def test_stop_strings_are_not_searched_before_min_tokens(tokenizer: Tokenizer, run_length: int) -> None:
    tokens = list(b"##a##b")
    assert generate(tokenizer, tokens, run_length, stop=("##",), min_tokens=2) == ("##a", 5, STOP, "##")
    assert generate(tokenizer, tokens, run_length, stop=("##",), min_tokens=1) == ("", 2, STOP, "##")
    # It may begin among the first min_tokens tokens.
    assert generate(tokenizer, tokens, run_length, stop=("##",), min_tokens=4) == ("##a", 5, STOP, "##")
    assert generate(tokenizer, tokens, run_length, stop=("##",), min_tokens=5) == ("##a##b", 6, LENGTH, None)


def test_any_cut_into_runs_says_the_same(tokenizer: Tokenizer) -> None:
    random = Random(6)
    alphabet = [ord("a"), ord("b"), *"ř🙂".encode(), EOS]
    for _ in range(300):
        tokens = random.choices(alphabet, weights=[4] * (len(alphabet) - 1) + [1], k=24)
        params = {
            "stop": tuple("".join(random.choices("abř", k=random.randrange(1, 4))) for _ in range(2)),
            "min_tokens": random.randrange(4),
            "ignore_eos": random.random() < 0.5,
            "skip_special_tokens": random.random() < 0.5,
            "include_stop_str_in_output": random.random() < 0.5,
        }
        plain = generate(tokenizer, tokens, 1, **params)
        for run_length in (2, 5, 24):
            assert generate(tokenizer, tokens, run_length, **params) == plain, (tokens, params)


def test_nothing_asked_for(tokenizer: Tokenizer) -> None:
    assert begun(tokenizer).process("r", [1], Stop(0, LENGTH)) == Processed(0, "", LENGTH)


def test_requests_do_not_mix(tokenizer: Tokenizer) -> None:
    processor = begun(tokenizer, stop=("ab",))
    processor.add("other", SamplingParams(), PROMPT)
    assert processor.process("r", list(b"xa"), Stop(2)).text == "x"
    assert processor.process("other", list(b"b"), Stop(1)).text == "b"
    processor.remove("other")
    processor.add("other", SamplingParams(), PROMPT)
    assert processor.process("r", list(b"b"), Stop(1)) == Processed(1, "", STOP, "ab")
    processor.remove("r")
    with pytest.raises(KeyError):
        processor.process("r", list(b"b"), Stop(1))


def test_without_a_tokenizer() -> None:
    processor = begun(None)
    assert processor.process("r", [1, 2, EOS], Stop(3, STOP)) == Processed(3, "", STOP)
    assert processor.finish("r") == ""
    assert processor.logprobs(RowLogprobs(5, -1.0, ())) == TokenLogprob(5, "", b"", -1.0)
    with pytest.raises(InvalidRequest, match="has no tokenizer") as error:
        processor.add("s", SamplingParams(stop=("a",)), PROMPT)
    assert error.value.param == "stop"


def test_logprobs_carry_texts_and_bytes(tokenizer: Tokenizer) -> None:
    row = RowLogprobs(ord("a"), -0.5, ((0xE4, -0.25), (EOS, -2.0)))
    assert OutputProcessor(tokenizer).logprobs(row) == TokenLogprob(
        ord("a"),
        "a",
        b"a",
        -0.5,
        (TopLogprob(0xE4, "\ufffd", b"\xe4", -0.25), TopLogprob(EOS, "<eos>", b"<eos>", -2.0)),
    )
