import dataclasses
import logging
from typing import Any

import pytest
from tokenizers import Tokenizer
from transformers import GenerationConfig, PreTrainedTokenizerFast

from engine.errors import StartupError
from engine.model.loader import LoadedModel, wrap_model
from engine.model.vocabulary import check_same_vocabulary
from tests.tiny import EOS, IM_END, VOCAB_SIZE, byte_tokenizer, tiny_model


def loaded(
    name: str, tokenizer: PreTrainedTokenizerFast | None, rows: int = VOCAB_SIZE, **config: Any
) -> LoadedModel:
    return wrap_model(tiny_model("llama", vocab_size=rows, **config), tokenizer, name=name)


def tokenizer_with(*added: str, special: bool = True) -> PreTrainedTokenizerFast:
    tokenizer = byte_tokenizer()
    tokenizer.add_tokens(list(added), special_tokens=special)
    return tokenizer


def test_equal_vocabularies() -> None:
    check_same_vocabulary(loaded("a", byte_tokenizer()), loaded("b", byte_tokenizer()))


def test_padded_embeddings_are_equal_and_padding_is_not_sampled() -> None:
    target, draft = loaded("a", byte_tokenizer(), rows=320), loaded("b", byte_tokenizer(), rows=264)
    assert target.vocab_size == draft.vocab_size == VOCAB_SIZE
    check_same_vocabulary(target, draft)


def test_other_sizes_are_refused_with_both() -> None:
    with pytest.raises(StartupError, match=r"draft model small .* 260 tokens, the target big one of 259"):
        check_same_vocabulary(
            loaded("big", byte_tokenizer()), loaded("small", tokenizer_with("<x>"), rows=300)
        )


def test_two_swapped_ids_are_refused_with_the_first() -> None:
    description = byte_tokenizer().backend_tokenizer.to_str()
    swapped = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(
            description.replace('"A":65', '"A":?').replace('"B":66', '"B":65').replace('"A":?', '"A":66')
        ),
        eos_token="<eos>",
    )
    with pytest.raises(StartupError, match="token id 65 is 'A' to the target big but 'B' to the draft"):
        check_same_vocabulary(loaded("big", byte_tokenizer()), loaded("small", swapped))


def test_added_tokens_are_compared_too() -> None:
    target = loaded("big", tokenizer_with("<x>", "<y>"), rows=300)
    draft = loaded("small", tokenizer_with("<x>", "<z>"), rows=300)
    with pytest.raises(StartupError, match="token id 260 is '<y>' to the target big but '<z>'"):
        check_same_vocabulary(target, draft)


def test_without_tokenizers_sizes_are_compared() -> None:
    check_same_vocabulary(loaded("a", None, rows=64), loaded("b", None, rows=64))
    with pytest.raises(StartupError, match="64"):
        check_same_vocabulary(loaded("a", None, rows=64), loaded("b", None, rows=65))


def test_one_missing_tokenizer_is_refused() -> None:
    with pytest.raises(StartupError, match="b has no tokenizer"):
        check_same_vocabulary(loaded("a", byte_tokenizer()), loaded("b", None))


def test_ids_without_an_embedding_are_not_sampled(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        model = loaded("a", tokenizer_with("<x>"))
    assert model.vocab_size == VOCAB_SIZE
    assert "260 ids but the embedding 259 rows" in caplog.text


def end_ids(
    tokenizer: PreTrainedTokenizerFast | None, generation: int | list[int] | None = None, **config: Any
) -> frozenset[int]:
    module = tiny_model("llama", vocab_size=300, **config)
    module.generation_config = GenerationConfig(eos_token_id=generation)
    return wrap_model(module, tokenizer, name="a").eos_token_ids


def test_every_source_of_end_ids_counts() -> None:
    assert end_ids(None, 7, eos_token_id=8) == {7, 8}
    assert end_ids(None, [7, 9], eos_token_id=[8, 9]) == {7, 8, 9}
    assert end_ids(None, None, eos_token_id=None) == frozenset()
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = None
    assert end_ids(tokenizer, 7, eos_token_id=8) == {7, 8, EOS}


def test_the_end_of_turn_of_the_template_counts() -> None:
    assert IM_END in end_ids(byte_tokenizer())


@pytest.mark.parametrize("template", [None, "{{ messages }}", "<|im_start|>"])
def test_an_end_of_turn_that_the_template_does_not_use_is_text(template: str | None) -> None:
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = template
    assert IM_END not in end_ids(tokenizer)


def test_an_end_of_turn_that_is_no_special_token_is_text() -> None:
    tokenizer = tokenizer_with("<end_of_turn>", special=False)
    tokenizer.chat_template = "{{ '<end_of_turn>' }}"
    assert tokenizer.convert_tokens_to_ids("<end_of_turn>") not in end_ids(tokenizer)


def test_the_end_of_a_harmony_message_does_not_end_the_turn() -> None:
    tokenizer = tokenizer_with("<|end|>", "<|return|>")
    tokenizer.chat_template = "{{ '<|end|><|return|>' }}"
    ids = end_ids(tokenizer)
    assert tokenizer.convert_tokens_to_ids("<|return|>") in ids
    assert tokenizer.convert_tokens_to_ids("<|end|>") not in ids
    other = tokenizer_with("<|end|>")
    other.chat_template = "{{ '<|end|>' }}"
    assert other.convert_tokens_to_ids("<|end|>") in end_ids(other)


def test_a_loaded_model_is_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        loaded("a", None).name = "b"  # type: ignore[misc]
