"""Fill-in-the-middle: each format's markers, with the texts between them."""

import pytest
from tokenizers import AddedToken
from transformers import PreTrainedTokenizerFast

from engine.errors import InvalidRequest
from engine.tokenizer import Tokenizer
from tests.tiny import byte_tokenizer

FORMATS = {
    "qwen": ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),
    "starcoder": ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),
    "codellama": ("\u2581<PRE>", "\u2581<SUF>", "\u2581<MID>"),
    "deepseek": ("<\uff5cfim\u2581begin\uff5c>", "<\uff5cfim\u2581hole\uff5c>", "<\uff5cfim\u2581end\uff5c>"),
}


def with_tokens(*texts: str) -> PreTrainedTokenizerFast:
    tokenizer = byte_tokenizer()
    tokenizer.add_tokens([AddedToken(text, special=True) for text in texts])
    return tokenizer


@pytest.mark.parametrize("name", FORMATS)
def test_a_gap_is_written_as_the_model_was_trained(name: str) -> None:
    tokenizer = with_tokens(*FORMATS[name], "<|endoftext|>", "<file_sep>")
    before, behind, gap, end, separator = range(259, 264)
    infill = Tokenizer(tokenizer).encode_infill("def f(", "):\n")
    assert list(infill.token_ids) == [before, *b"def f(", behind, *b"):\n", gap]
    assert infill.end_token_ids == (end, separator)


def test_a_text_may_be_empty_on_either_side() -> None:
    tokenizer = Tokenizer(with_tokens(*FORMATS["qwen"]))
    assert list(tokenizer.encode_infill("", "x").token_ids) == [259, 260, ord("x"), 261]
    assert tokenizer.encode_infill("x", "y").end_token_ids == ()


def test_a_model_without_markers_refuses() -> None:
    for tokens in ((), FORMATS["qwen"][:2]):
        with pytest.raises(InvalidRequest, match="suffix is not supported") as caught:
            Tokenizer(with_tokens(*tokens)).encode_infill("a", "b")
        assert caught.value.param == "suffix"


def test_a_text_behind_others_is_split_as_the_model_would_write_it() -> None:
    tokenizer = Tokenizer(byte_tokenizer())
    before = tokenizer.encode("assistant:")
    assert tokenizer.encode_continuation("caf\u00e9", before) == list("caf\u00e9".encode())
    assert tokenizer.encode_continuation("", before) == []
    # The tokens before may end inside a character.
    assert tokenizer.encode_continuation("x", [*b"a", 0xC3]) == [ord("x")]
    with pytest.raises(InvalidRequest) as caught:
        tokenizer.encode_continuation("\ud800", before)
    assert caught.value.param == "prediction"
