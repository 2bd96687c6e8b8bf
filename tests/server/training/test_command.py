"""`outrider train-head` as a command: its files, its exit statuses, and what it refuses."""

import io
import json
import os
import signal
import sys
from pathlib import Path

import pytest

from engine.training import running
from engine.training.trainer import Evaluation
from server.cli import main
from server.training.curves import as_csv, as_png
from server.training.progress import Progress, left
from tests.tiny import save_tiny

pytestmark = pytest.mark.usefixtures("logging_as_it_was")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("model"), num_hidden_layers=4)


@pytest.fixture
def data(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.jsonl"
    prompts = [{"turns": ["a" * number, "more"]} for number in range(1, 9)]
    path.write_text("".join(f"{json.dumps(row)}\n" for row in prompts), "utf-8")
    return path


def flags(model: Path, data: Path, out: Path, *more: str) -> list[str]:
    given = {
        "--method": "eagle3",
        "--model": str(model),
        "--dtype": "float32",
        "--device": "cpu",
        "--prompts": str(data),
        "--out": str(out),
        "--temperatures": "0,1",
        "--max-tokens": "12",
        "--draft-vocab-size": "50",
        "--held-out": "0.4",
        "--batch-tokens": "40",
        "--epochs": "1",
    }
    return ["train-head", *(part for pair in given.items() for part in pair), *more]


def test_ctrl_c_leaves_what_the_next_run_ends(
    model: Path,
    data: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    out = tmp_path / "head"
    with monkeypatch.context() as patch:
        patch.setattr(Progress, "on_step", lambda *_: signal.raise_signal(signal.SIGINT))
        assert main(flags(model, data, out)) == 130
    assert "the same command goes on from here" in capsys.readouterr().err
    assert not (out / "model.safetensors").exists()
    answers = (out / "work" / "generations.jsonl").read_bytes()
    ids = [json.loads(line)["id"] for line in answers.splitlines()]
    assert "prompts:1/0/0" in ids
    assert "prompts:8/1/0" in ids
    assert main(flags(model, data, out)) == 0
    assert (out / "work" / "generations.jsonl").read_bytes() == answers
    assert {path.name for path in out.iterdir()} == {
        "README.md",
        "config.json",
        "model.safetensors",
        "training.csv",
        "training.png",
        "work",
    }
    card = (out / "README.md").read_text("utf-8")
    assert f"outrider train-head --method eagle3 --model {model}" in card
    shown = capsys.readouterr().err
    assert "tokens per forward" in shown
    assert "features:" not in shown


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--epochs", "x"], "must be a number from 0 on"),
        (["--held-out", "1"], "must be a number from 0 on, below 1"),
        (["--pass-share", "0"], "must be a number above 0, up to 1"),
        (["--method", "eagle4"], "invalid choice"),
    ],
)
def test_values_that_cannot_be_are_refused(
    more: list[str],
    message: str,
    model: Path,
    data: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(flags(model, data, tmp_path / "head", *more))
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (["--method", "eagle3", "--out", "o"], "nothing to train on"),
        (["--method", "eagle3", "--text", "t"], "--out is missing"),
        (["--out", "o", "--text", "t"], "--method is missing"),
        (["--method", "eagle3", "--out", "o", "--text", "nowhere", "--epochs", "1"], "no file nowhere"),
        (["--method", "eagle3", "--out", "o", "--prompts", "nowhere"], "the training has no end"),
        (["--method", "eagle3", "--out", "o", "--promts", "p"], "did you mean --prompts?"),
    ],
)
def test_what_is_missing_is_named(wrong: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train-head", *wrong]) == 2
    assert message in capsys.readouterr().err


def test_a_wrong_path_is_said_before_torch_is_loaded(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "server.training.in_process", None)
    (tmp_path / "file").write_text("")
    (tmp_path / "locked").mkdir()
    missing, file, locked = str(tmp_path / "missing"), str(tmp_path / "file" / "head"), tmp_path / "locked"
    out = tmp_path / "head"
    # Whoever runs as root may write everywhere.
    monkeypatch.setattr(os, "access", lambda path, _: Path(path) != locked)
    for more, message in (
        (["--prompts", missing], f"there is no file {missing}"),
        (["--generations", str(data), missing], f"there is no file {missing}"),
        (["--text", str(locked)], f"there is no file {locked}"),
        (["--out", file], f"--out: {file} cannot be a folder: {tmp_path / 'file'} is a file"),
        (["--work", file], f"--work: {file} cannot be a folder: {tmp_path / 'file'} is a file"),
        (["--out", str(locked / "a" / "b")], f"--out: cannot write to {locked}: change its rights"),
        (["--work", str(locked)], f"--work: cannot write to {locked}: change its rights"),
    ):
        assert main(flags(tmp_path, data, out, *more)) == 2
        assert message in capsys.readouterr().err
    monkeypatch.setattr(os, "access", lambda path, _: Path(path) != data)
    assert main(flags(tmp_path, data, out)) == 2
    assert f"cannot read {data}" in capsys.readouterr().err
    assert not out.exists()


@pytest.mark.parametrize(
    ("flag", "line", "message"),
    [
        ("--prompts", '{"turns": []}', "line 2: not a prompt"),
        ("--generations", '{"prompt_token_ids": [1]}', "line 2: not a generation of this model"),
        ("--generations", '{"prompt_token_ids": [1], "output_token_ids": [-1]}', "line 2: not a generation"),
        ("--generations", f'{{"prompt_token_ids": [{2**63}], "output_token_ids": [1]}}', "line 2: not a gen"),
        ("--text", '{"text": 1}', "line 2: not a text"),
        ("--text", '{"messages": [{"role": "user"}]}', "line 2: not a text"),
        ("--text", "[", "line 2 is not JSON"),
    ],
)
def test_a_wrong_line_is_said_before_the_model_is_loaded(
    flag: str,
    line: str,
    message: str,
    data: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(running, "load_causal_lm", lambda _: pytest.fail("the model is loaded"))
    path = tmp_path / "given.jsonl"
    path.write_text(f"\n{line}\n", "utf-8")
    assert main(flags(tmp_path / "no model", data, tmp_path / "head", flag, str(path), "--quiet")) == 1
    assert f"{path}, {message}" in capsys.readouterr().err
    path.write_text("\n", "utf-8")
    assert main(flags(tmp_path / "no model", path, tmp_path / "head", "--quiet")) == 1
    assert "there is nothing to train on: the files are empty" in capsys.readouterr().err


@pytest.mark.parametrize("line", ["[]", "{", '{"turns": []}', '{"messages": [{"role": "tool"}]}', "{}"])
def test_what_is_no_prompt_is_named(
    line: str, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text(f'{{"prompt": "good"}}\n{line}\n', "utf-8")
    assert main(flags(model, path, tmp_path / "head", "--quiet")) == 1
    assert f"{path}, line 2" in capsys.readouterr().err


HISTORY = [
    Evaluation(10, 0.5, 1.0, 1e-3, (5.0,), 4.5, (0.3, 0.1), 1.33),
    Evaluation(20, 1.0, 2.0, 5e-4, (4.0, 5.5), 4.1, (0.4, 0.2), 1.48),
]


def test_the_table_has_a_line_for_each_evaluation() -> None:
    head, first, second = as_csv(HISTORY).splitlines()
    assert head == (
        "minutes,step,epoch,learning_rate,held_out_loss,train_loss_1,train_loss_2,"
        "acceptance_1,acceptance_2,tokens_per_forward"
    )
    assert first == "1.00,10,0.500,1.000e-03,4.50000,5.00000,,0.3000,0.1000,1.3300"
    assert second.endswith("4.00000,5.50000,0.4000,0.2000,1.4800")


def test_the_picture_is_one() -> None:
    assert as_png(HISTORY).startswith(b"\x89PNG")


def test_progress_has_an_estimate() -> None:
    now = 0.0
    stream = io.StringIO()
    progress = Progress(stream, lambda: now)
    progress.on_stage("features", 0, 1000)
    now = 40.0
    progress.on_stage("features", 100, 1000)
    assert stream.getvalue().splitlines()[-1] == "features: 100 of 1,000  2.5/s  6 min left"
    now = 41.0
    progress.on_stage("features", 101, 1000)
    assert len(stream.getvalue().splitlines()) == 2


@pytest.mark.parametrize(
    ("seconds", "text"), [(20, "20 s left"), (125, "2 min left"), (7500, "2 h 5 min left")]
)
def test_what_is_left_is_said_in_words(seconds: float, text: str) -> None:
    assert left(seconds) == text
