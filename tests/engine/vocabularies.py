"""Small vocabularies of the kinds that models come with, built in memory."""

from collections.abc import Sequence

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

LLAMA_DECODER = decoders.Sequence(
    [
        decoders.Replace("▁", " "),
        decoders.ByteFallback(),
        decoders.Fuse(),
        decoders.Strip(content=" ", left=1, right=0),
    ]
)
GEMMA_DECODER = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
METASPACE_DECODER = decoders.Metaspace()

_PIECES = ["▁", "▁Hello", "▁wor", "ld", "▁▁▁", "a", "b", ",", "!", "é", "▁你", "▁three", "H", "e", "l", "o"]


def sentencepiece_tokenizer(decoder: decoders.Decoder = LLAMA_DECODER) -> PreTrainedTokenizerFast:
    """<unk>, <s>, </s>, the 256 byte tokens, a few pieces, then one ordinary and one special added token."""
    vocab = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *_PIECES]
    backend = Tokenizer(
        models.BPE(
            vocab={token: index for index, token in enumerate(vocab)},
            merges=[],
            unk_token="<unk>",
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoder
    backend.add_tokens([AddedToken("<tool>", special=False, normalized=False)])
    backend.add_special_tokens([AddedToken("<end>", special=True, normalized=False)])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )


def word_tokenizer(decoder: decoders.Decoder | None, words: Sequence[str]) -> PreTrainedTokenizerFast:
    """Whole words, whose text depends on their neighbours."""
    backend = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, words[0]))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    if decoder is not None:
        backend.decoder = decoder
    return PreTrainedTokenizerFast(tokenizer_object=backend, unk_token=words[0])


def ids(tokenizer: PreTrainedTokenizerFast, *tokens: str) -> list[int]:
    """The ids of vocabulary entries, each of which must exist."""
    found = [tokenizer.backend_tokenizer.token_to_id(token) for token in tokens]
    assert None not in found, tokens
    return found


def byte_ids(text: str) -> list[int]:
    """A text in sentencepiece's byte tokens."""
    return [3 + byte for byte in text.encode()]
