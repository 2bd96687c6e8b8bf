"""Rows to train on: which tokens are answers, and which prompts are held out together."""

import json
from pathlib import Path

import pytest

from engine.errors import StartupError
from engine.tokenizer import Tokenizer
from engine.training.prompts import Conversation, read_prompts
from engine.training.rows import Span, is_held_out, make_row, read_generations, read_texts, roots
from tests.tiny import IM_END, VOCAB_SIZE, byte_tokenizer


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer(byte_tokenizer())


def write(path: Path, *rows: object) -> Path:
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows), "utf-8")
    return path


def test_what_the_assistant_says_is_an_answer(tokenizer: Tokenizer, tmp_path: Path) -> None:
    messages = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "oh"},
        {"role": "user", "content": "so"},
        {"role": "assistant", "content": "well"},
    ]
    [row] = read_texts(write(tmp_path / "texts.jsonl", {"messages": messages}), tokenizer)
    said = [list(row.token_ids[span.begin : span.end]) for span in row.answers]
    assert said == [[*b"oh", IM_END], [*b"well", IM_END]]
    assert bytes(token for token in row.prompt if token < 256) == b"user:hiassistant:"
    assert row.num_answer_tokens == 8


def test_of_a_plain_text_all_but_the_first_token_is_trained_on(tokenizer: Tokenizer, tmp_path: Path) -> None:
    rows = list(read_texts(write(tmp_path / "texts.jsonl", {"text": "abc"}, {"text": "a"}), tokenizer))
    assert [(row.token_ids, row.answers) for row in rows] == [((97, 98, 99), (Span(1, 3),))]


@pytest.mark.parametrize("row", [{}, {"messages": []}, {"messages": [{"role": "user"}]}, {"text": 1}, []])
def test_what_is_no_text_is_named(row: object, tokenizer: Tokenizer, tmp_path: Path) -> None:
    path = write(tmp_path / "texts.jsonl", {"text": "good"}, row)
    with pytest.raises(StartupError, match="line 2"):
        list(read_texts(path, tokenizer))


def test_a_line_that_is_still_being_written_is_left_for_later(tmp_path: Path) -> None:
    path = write(tmp_path / "generations.jsonl", {"prompt_token_ids": [1, 2], "output_token_ids": [3]})
    with path.open("a", encoding="utf-8") as file:
        file.write('{"prompt_token_ids": [1], "outp')
    [row] = read_generations(path, VOCAB_SIZE)
    assert (row.prompt, row.token_ids, row.answers) == ((1, 2), (1, 2, 3), (Span(2, 3),))


def test_the_same_tokens_have_the_same_key() -> None:
    assert make_row([1, 2, 3], [Span(1, 3)]).key == make_row([1, 2, 3], [Span(2, 3)]).key
    assert make_row([1, 2, 3], [Span(1, 3)]).key != make_row([1, 2, 4], [Span(1, 3)]).key


def test_all_turns_of_a_conversation_are_held_out_together() -> None:
    turns = [(1, 2), (1, 2, 5, 6), (1, 2, 5, 6, 9), (1, 3), (2,), (1, 2, 4)]
    assert roots(turns) == {
        (1, 2): (1, 2),
        (1, 2, 5, 6): (1, 2),
        (1, 2, 5, 6, 9): (1, 2),
        (1, 2, 4): (1, 2),
        (1, 3): (1, 3),
        (2,): (2,),
    }


def test_about_the_wanted_share_is_held_out() -> None:
    held_out = sum(is_held_out((number, number + 1), 0.1) for number in range(2000))
    assert 140 < held_out < 260


def test_prompts_of_all_kinds_are_read(tmp_path: Path) -> None:
    user, assistant = {"role": "user", "content": "u"}, {"role": "assistant", "content": "a"}
    system = {"role": "system", "content": "s"}
    path = write(
        tmp_path / "p.jsonl",
        {"prompt": "x"},
        {"question": "y", "answer": "z"},
        {"turns": ["one", "two"]},
        {"messages": [system, user, assistant, {"role": "user", "content": "v"}]},
    )
    assert read_prompts([path]) == [
        Conversation("p:1", ({"role": "user", "content": "x"},), ()),
        Conversation("p:2", ({"role": "user", "content": "y"},), ()),
        Conversation("p:3", ({"role": "user", "content": "one"},), ("two",)),
        Conversation("p:4", (system, user), ("v",)),
    ]
