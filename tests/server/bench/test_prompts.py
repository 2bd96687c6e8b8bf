"""Prompt files in all their formats, and requests made of them."""

import json
from pathlib import Path

import pytest

from server.bench.asking import Wishes, make_question
from server.bench.prompts import Prompt, own_prompts, read_prompts, take
from server.config import ConfigError

MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Why?"}]


def asked(text: str) -> tuple[dict[str, str], ...]:
    return ({"role": "user", "content": text},)


def test_a_json_list_with_messages(tmp_path: Path) -> None:
    path = tmp_path / "prompts.json"
    path.write_text(json.dumps([{"id": "a", "kind": "chat", "messages": MESSAGES}]))
    assert read_prompts(path) == [Prompt("a", "chat", tuple(MESSAGES), None)]


def test_json_lines_with_turns_questions_and_prompts(tmp_path: Path) -> None:
    rows = [
        {"question_id": 81, "category": "writing", "turns": ["Write.", "Again."]},
        {"question": "How many?"},
        {"task_id": "HumanEval/0", "prompt": "def add(a, b):\n"},
    ]
    path = tmp_path / "humaneval.jsonl"
    path.write_text("\n\n".join(json.dumps(row) for row in rows) + "\n")
    assert read_prompts(path) == [
        Prompt("81", "writing", asked("Write."), "Write."),
        Prompt("line 3", "humaneval", asked("How many?"), "How many?"),
        Prompt("HumanEval/0", "humaneval", None, "def add(a, b):\n"),
    ]


def test_separators_within_a_string_do_not_end_its_line(tmp_path: Path) -> None:
    path = tmp_path / "lines.jsonl"
    path.write_text(json.dumps({"prompt": "a\u2028b\x85c"}, ensure_ascii=False) + "\n", "utf-8")
    assert [prompt.text for prompt in read_prompts(path)] == ["a\u2028b\x85c"]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.json", "[{]", "a.json is not JSON"),
        ("a.json", "{}", "a.json must hold a list"),
        ("a.json", "[]", "a.json has no prompts"),
        ("a.json", '[{"messages": "hello"}]', "a.json, entry 1: not a prompt; a .json file is"),
        ("a.json", '[{"prompt": "x"}, 7]', "a.json, entry 2: not a prompt"),
        ("a.jsonl", '{"prompt": "x"}\n{"turns": []}', "a.jsonl, line 2: not a prompt"),
        ("a.jsonl", '{"prompt": "x"}\n{', "a.jsonl, line 2 is not JSON"),
        ("a.jsonl", '{"id": 1, "prompt": "x"}\n{"id": 1, "prompt": "y"}', "2 prompts are named '1'"),
    ],
)
def test_what_is_no_prompt_is_named(name: str, content: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_text(content)
    with pytest.raises(ConfigError, match=r"^--prompts: ") as refused:
        read_prompts(path)
    assert message in str(refused.value)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read .*none\.json"):
        read_prompts(tmp_path / "none.json")


def test_prompts_come_round_again_where_more_are_asked_for() -> None:
    prompts = own_prompts()
    names = [prompt.name for prompt in prompts]
    assert len(set(names)) == len(names) == 4
    assert [prompt.name for prompt in take(prompts, 6)] == [*names, *names[:2]]
    assert take(prompts, None) == prompts
    assert take(prompts, 4) == prompts


def test_fewer_prompts_lie_evenly_among_all() -> None:
    prompts = [Prompt(str(number), "chat", None, "x") for number in range(10)]
    assert [prompt.name for prompt in take(prompts, 4)] == ["0", "2", "5", "7"]
    assert [prompt.name for prompt in take(prompts, 1)] == ["0"]


TEXT = Prompt("text", "code", None, "def add(")
QUESTION = Prompt("question", "chat", asked("Why?"), "Why?")
CONVERSATION = Prompt("conversation", "chat", tuple(MESSAGES), None)


@pytest.mark.parametrize(
    ("prompt", "endpoint", "path", "content"),
    [
        (TEXT, "auto", "/completions", {"prompt": "def add("}),
        (QUESTION, "auto", "/chat/completions", {"messages": list(asked("Why?"))}),
        (CONVERSATION, "auto", "/chat/completions", {"messages": MESSAGES}),
        (TEXT, "chat", "/chat/completions", {"messages": list(asked("def add("))}),
        (QUESTION, "completions", "/completions", {"prompt": "Why?"}),
    ],
)
def test_each_prompt_goes_to_its_endpoint(
    prompt: Prompt, endpoint: str, path: str, content: dict[str, object]
) -> None:
    wishes = Wishes(max_tokens=9, temperature=0.5, seed=40, endpoint=endpoint)  # type: ignore[arg-type]
    question = make_question(prompt, 2, wishes)
    assert question.path == path
    assert question.body == {**content, "max_tokens": 9, "temperature": 0.5, "seed": 42}


def test_a_conversation_is_no_text() -> None:
    with pytest.raises(ConfigError, match="prompt conversation is a conversation, not a text"):
        make_question(CONVERSATION, 0, Wishes(max_tokens=9, endpoint="completions"))


def test_more_keys_can_be_asked_for() -> None:
    wishes = Wishes(max_tokens=9, ignore_eos=True, extra={"top_p": 0.9, "seed": 7})
    body = make_question(TEXT, 3, wishes).body
    assert (body["ignore_eos"], body["top_p"], body["seed"]) == (True, 0.9, 7)
