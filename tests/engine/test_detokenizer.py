import time
from collections.abc import Callable, Sequence
from random import Random

import pytest
from tokenizers import decoders
from transformers import PreTrainedTokenizerFast

from engine.detokenizer import Detokenizer, Matched, StopStringMatcher
from engine.tokenizer import Tokenizer
from tests.engine.vocabularies import (
    GEMMA_DECODER,
    LLAMA_DECODER,
    METASPACE_DECODER,
    byte_ids,
    ids,
    sentencepiece_tokenizer,
    word_tokenizer,
)
from tests.tiny import BOS, EOS, IM_END, byte_tokenizer


def stream(
    tokenizer: PreTrainedTokenizerFast,
    answer: Sequence[int],
    prompt: Sequence[int] = (),
    *,
    skip_special_tokens: bool = True,
) -> list[str]:
    """The pieces of an answer, the last from finish()."""
    detokenizer = Detokenizer(Tokenizer(tokenizer), prompt, skip_special_tokens=skip_special_tokens)
    return [*map(detokenizer.push, answer), detokenizer.finish()]


@pytest.mark.parametrize("char", ["ř", "你", "🙂"])
def test_a_character_comes_whole(char: str) -> None:
    held = [""] * (len(char.encode()) - 1)
    assert stream(byte_tokenizer(), list(f"a{char}b".encode())) == ["a", *held, char, "b", ""]
    wrapped = sentencepiece_tokenizer()
    assert stream(wrapped, [*byte_ids(f"a{char}b")]) == ["a", *held, char, "b", ""]


@pytest.mark.parametrize("kept", [1, 2, 3])
def test_the_limit_cuts_a_character(kept: int) -> None:
    pieces = stream(byte_tokenizer(), list("ok🙂".encode())[: 2 + kept])
    assert pieces == ["o", "k", *[""] * kept, "\ufffd"]


def test_finish_has_nothing_to_say_twice() -> None:
    detokenizer = Detokenizer(Tokenizer(byte_tokenizer()), [], skip_special_tokens=True)
    detokenizer.push(0xE4)
    assert (detokenizer.finish(), detokenizer.finish()) == ("\ufffd", "")


def test_bytes_that_are_no_text_are_not_held_for_ever() -> None:
    assert stream(byte_tokenizer(), [0xFF, 0x80, 0x80, ord("a")]) == ["\ufffd", "\ufffd", "\ufffd", "a", ""]
    assert stream(byte_tokenizer(), [0xE4, ord("a")]) == ["", "\ufffda", ""]


def test_byte_level_stream_is_the_decoded_whole() -> None:
    wrapped = byte_tokenizer()
    random = Random(2)
    for _ in range(200):
        # Few distinct bytes, so that characters come about, whole, cut and broken.
        answer = random.choices([0x61, 0x20, 0xC3, 0xA9, 0xF0, 0x9F, 0x99, 0x82, 0xFF, IM_END], k=30)
        for skip in (True, False):
            whole = wrapped.decode(answer, skip_special_tokens=skip)
            assert "".join(stream(wrapped, answer, b"p", skip_special_tokens=skip)) == whole


@pytest.mark.parametrize(
    "make",
    [
        lambda: sentencepiece_tokenizer(LLAMA_DECODER),
        lambda: sentencepiece_tokenizer(GEMMA_DECODER),
        lambda: sentencepiece_tokenizer(METASPACE_DECODER),
        lambda: word_tokenizer(decoders.WordPiece(cleanup=False), ["[UNK]", "un", "##able", "to", ","]),
        lambda: word_tokenizer(decoders.WordPiece(cleanup=True), ["[UNK]", "un", "##able", "to", ","]),
        lambda: word_tokenizer(decoders.BPEDecoder(suffix="</w>"), ["<unk>", "lo", "wer</w>", "the</w>"]),
        lambda: word_tokenizer(None, ["<unk>", "one", "two"]),
    ],
    ids=["llama", "gemma", "metaspace", "wordpiece", "wordpiece-cleanup", "bpe-suffix", "no-decoder"],
)
def test_stream_is_what_the_whole_shows_behind_its_prompt(
    make: Callable[[], PreTrainedTokenizerFast],
) -> None:
    wrapped = make()
    known = [i for i in range(len(wrapped)) if not wrapped.convert_ids_to_tokens(i).startswith("<0x")]
    random = Random(3)
    for _ in range(100):
        prompt = random.choices(known, k=random.randrange(8))
        answer = random.choices(known, k=random.randrange(1, 15))
        for skip in (True, False):
            before = wrapped.decode(prompt, skip_special_tokens=skip)
            whole = wrapped.decode(prompt + answer, skip_special_tokens=skip)
            pieces = stream(wrapped, answer, prompt, skip_special_tokens=skip)
            assert before + "".join(pieces) == whole, (prompt, answer)


def test_sentencepiece_keeps_the_space_behind_a_prompt_and_drops_it_at_the_start() -> None:
    wrapped = sentencepiece_tokenizer()
    bos, hello, world, end = ids(wrapped, "<s>", "▁Hello", "▁wor", "ld")
    assert stream(wrapped, [world, end, hello], [bos, hello]) == [" wor", "ld", " Hello", ""]
    assert stream(wrapped, [world, end, hello], [bos]) == ["wor", "ld", " Hello", ""]
    assert stream(wrapped, [world], [bos], skip_special_tokens=False) == [" wor", ""]
    assert stream(wrapped, [bos, world], []) == ["", "wor", ""]


def test_special_tokens() -> None:
    answer = [ord("h"), IM_END, ord("i"), EOS]
    assert stream(byte_tokenizer(), answer) == ["h", "", "i", "", ""]
    assert stream(byte_tokenizer(), answer, skip_special_tokens=False) == [
        "h",
        "<|im_end|>",
        "i",
        "<eos>",
        "",
    ]


def test_answer_completes_a_character_that_the_prompt_began() -> None:
    smile = list("🙂".encode())
    wrapped = byte_tokenizer()
    assert stream(wrapped, [*smile[2:], ord("!")], [BOS, ord("a"), *smile[:2]]) == ["", "🙂", "!", ""]
    # If it does not, the replacement character belongs to the prompt.
    assert stream(wrapped, [ord("!")], smile[:2]) == ["!", ""]
    assert stream(wrapped, [], smile[:2]) == [""]


def test_cost_of_a_token_does_not_grow_with_the_answer() -> None:
    for wrapped, token in ((byte_tokenizer(), ord("a")), (word_tokenizer(None, ["<unk>", "one"]), 1)):
        detokenizer = Detokenizer(Tokenizer(wrapped), [], skip_special_tokens=True)
        costs = []
        for _ in range(16):
            started = time.thread_time()
            for _ in range(500):
                detokenizer.push(token)
            costs.append(time.thread_time() - started)
        assert min(costs[8:]) < 3 * min(costs[:8])


# Stop strings


def feed(matcher: StopStringMatcher, pieces: Sequence[str]) -> tuple[str, str | None, int]:
    """The text let out, the stop string, and how many pieces were taken."""
    out = ""
    for number, piece in enumerate(pieces, start=1):
        matched = matcher.push(piece)
        out += matched.text
        if matched.stop is not None:
            return out, matched.stop, number
    return out + matcher.finish(), None, len(pieces)


def test_text_in_front_of_the_stop_string_comes_out_and_nothing_behind_it() -> None:
    assert feed(StopStringMatcher(["END"]), ["one E", "N", "D two", " three"]) == ("one ", "END", 3)
    assert feed(StopStringMatcher(["END"], include_stop=True), ["one E", "ND two"]) == ("one END", "END", 2)


def test_only_what_may_become_a_stop_string_is_held() -> None:
    matcher = StopStringMatcher(["\nUser:", "END"])
    assert matcher.push("one") == Matched("one")
    assert matcher.push(" E") == Matched(" ")
    assert matcher.push("N") == Matched("")
    assert matcher.push("V\n") == Matched("ENV")
    assert matcher.push("Use") == Matched("")
    assert matcher.finish() == "\nUse"
    assert matcher.finish() == ""


@pytest.mark.parametrize(
    ("stops", "pieces", "expected"),
    [
        # One piece completes both: the one that starts first, ...
        (["bc", "abcd"], ["xabcdy"], ("x", "abcd", 1)),
        (["abcd", "bc"], ["xabcdy"], ("x", "abcd", 1)),
        (["cd", "ab"], ["xabcdy"], ("x", "ab", 1)),
        # ... and of two that start together the one that ends first.
        (["ab", "abc"], ["xabcy"], ("x", "ab", 1)),
        (["abc", "ab"], ["xabcy"], ("x", "ab", 1)),
        # An earlier piece completes one: that one.
        (["bc", "abcd"], ["xabc", "dy"], ("xa", "bc", 1)),
        # Overlapping beginnings.
        (["aab"], ["a", "a", "a", "b"], ("a", "aab", 4)),
        (["abab!"], ["ababab", "!"], ("ab", "abab!", 2)),
        (["xyz"], ["xyxyxy", "z"], ("xyxy", "xyz", 2)),
        (["xyz"], [], ("", None, 0)),
    ],
)
def test_which_match_wins(stops: list[str], pieces: list[str], expected: tuple[str, str | None, int]) -> None:
    assert feed(StopStringMatcher(stops), pieces) == expected


def naive(stops: Sequence[str], pieces: Sequence[str], include_stop: bool) -> tuple[str, str | None, int]:
    """Searches the whole text after every piece."""
    text = ""
    for number, piece in enumerate(pieces, start=1):
        text += piece
        found = [(text.find(stop), len(stop), stop) for stop in stops if stop in text]
        if found:
            start, length, stop = min(found)
            return text[: start + length * include_stop], stop, number
    return text, None, len(pieces)


@pytest.mark.parametrize("include_stop", [False, True])
def test_agrees_with_a_search_of_the_whole_text(include_stop: bool) -> None:
    random = Random(4)
    for _ in range(4000):
        stops = ["".join(random.choices("ab", k=random.randrange(1, 6))) for _ in range(random.randrange(5))]
        pieces = ["".join(random.choices("aabc", k=random.randrange(5))) for _ in range(8)]
        found = feed(StopStringMatcher(stops, include_stop=include_stop), pieces)
        assert found == naive(stops, pieces, include_stop), (stops, pieces)


def test_held_text_is_always_shorter_than_the_longest_stop() -> None:
    random = Random(5)
    stops = ["aabaab", "bb", "abca"]
    matcher, taken, out = StopStringMatcher(stops), "", ""
    for _ in range(2000):
        piece = random.choice("aaabc")
        matched = matcher.push(piece, may_stop=False)
        taken, out = taken + piece, out + matched.text
        held = taken[len(out) :]
        assert out + held == taken
        longest = max((n for stop in stops for n in range(len(stop)) if taken.endswith(stop[:n])), default=0)
        assert len(held) == longest


def test_a_stop_string_may_begin_but_not_end_before_it_counts() -> None:
    matcher = StopStringMatcher(["ab"])
    assert matcher.push("abxa", may_stop=False) == Matched("abx")
    assert matcher.push("b") == Matched("", "ab")


def test_no_stops() -> None:
    matcher = StopStringMatcher([])
    assert matcher.push("any text") == Matched("any text")
    assert matcher.finish() == ""


def cost_of(stops: Sequence[str], pieces: Sequence[str]) -> float:
    """Seconds for all pieces, the best of five."""
    best = float("inf")
    for _ in range(5):
        matcher = StopStringMatcher(stops)
        started = time.thread_time()
        for piece in pieces:
            matcher.push(piece)
        best = min(best, time.thread_time() - started)
    return best


def test_cost_grows_neither_with_the_answer_nor_with_a_long_stop() -> None:
    # The worst text for a naive search: all of it is the beginning of the stop string.
    short, long = ["a"] * 2000, ["a"] * 8000
    stop = "a" * 1_000_000 + "b"
    assert cost_of([stop], long) < 3 * 4 * cost_of([stop], short)
    assert cost_of([stop], short) < 10 * cost_of(["aaab"], short)


def test_cost_hardly_grows_with_the_number_of_stops() -> None:
    pieces = ["The", " quick", " brown", " fox", " jumps", " over", " it", "."] * 300
    four = ["\n\nUser:", "</answer>", "###", "<|end|>"]
    assert cost_of(four, pieces) < 3 * cost_of(four[:1], pieces)
