"""The command line: help, errors and exit statuses."""

import os
import subprocess
import sys
from types import ModuleType

import pytest

from engine.catalog import CATALOG
from engine.errors import ModelNotFound
from server import __version__, cli
from server.cli import main
from server.config import OPTIONS, LoadedConfig
from server.options import flag_of


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in os.environ:
        if variable.startswith("OUTRIDER_"):
            monkeypatch.delenv(variable)


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["version"]) == 0
    assert capsys.readouterr().out == f"outrider {__version__}\n"


def test_version_as_a_flag(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["--version"])
    assert stopped.value.code == 0
    assert capsys.readouterr().out == f"outrider {__version__}\n"


def test_models_lists_the_catalog(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["models"]) == 0
    out = capsys.readouterr().out
    for model in CATALOG.values():
        assert model.name in out
        assert model.hub_id in out


def test_help_names_every_setting_with_its_description(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "400")
    with pytest.raises(SystemExit) as stopped:
        main(["serve", "--help"])
    assert stopped.value.code == 0
    text = " ".join(capsys.readouterr().out.split())
    for option in OPTIONS.options.values():
        assert flag_of(option.name) in text
        assert option.description in text
    assert "--port PORT Port to listen on; 0 takes a free one. (default: 8000)" in text
    assert "--offline, --no-offline Never touch the network. (default: off)" in text
    assert "--speculation none|ngram|suffix|draft_model" in text


def test_help_and_version_load_neither_torch_nor_the_web_framework() -> None:
    script = (
        "import sys; from server.cli import main\n"
        "try: main(['serve', '--help'])\n"
        "except SystemExit: pass\n"
        "main(['version'])\n"
        "assert not {'torch', 'transformers', 'fastapi', 'uvicorn'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", script], check=True, stdout=subprocess.DEVNULL)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["serve", "--prot", "80"], "unknown flag --prot: did you mean --port?"),
        (
            ["serve", "--max-model-length=80"],
            "unknown flag --max-model-length: did you mean --max-model-len?",
        ),
        (["serve", "--por", "80"], "unknown flag --por: did you mean --port?"),
        (["serve", "--confg", "a.yaml"], "unknown flag --confg: did you mean --config?"),
        (["serve", "--port", "-1"], "--port: port must be greater than or equal to 0, got '-1'"),
        (["serve", "--port", "x"], "--port: port must be a valid integer"),
        (["serve", "--port", ""], "--port: port is empty"),
        (["serve", "gpt2"], "unexpected argument gpt2: settings are flags, such as --model gpt2"),
        (["version", "--port", "1"], "unknown flag --port"),
        (["serve", "--speculation", "draft_model"], "needs draft_model: give --draft-model"),
    ],
)
def test_a_wrong_setting_is_one_line_and_status_2(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("outrider: ")
    assert message in captured.err
    assert captured.err.count("\n") == 1


@pytest.mark.parametrize("arguments", [[], ["bench-mark"], ["serve", "--port"], ["serve", "--offline=x"]])
def test_a_wrong_call_is_one_line_and_status_2(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(arguments)
    assert stopped.value.code == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_the_environment_counts(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTRIDER_DTYPE", "fp8")
    assert main(["serve"]) == 2
    assert "OUTRIDER_DTYPE: dtype must be" in capsys.readouterr().err


def test_ctrl_c_while_loading_leaves_no_traceback(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "load_config", interrupt)
    assert main(["serve"]) == 130
    assert capsys.readouterr().err == ""


def test_a_startup_error_is_one_line_and_status_1(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def serve(loaded: LoadedConfig) -> None:
        raise ModelNotFound(f"no source has {loaded.config.engine.model.model}")

    stand_in = ModuleType("server.serve")
    monkeypatch.setattr(stand_in, "serve", serve, raising=False)
    monkeypatch.setitem(sys.modules, "server.serve", stand_in)
    assert main(["serve", "--model", "no/such-model"]) == 1
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("", "outrider: no source has no/such-model\n")


def test_a_ctrl_c_while_modules_are_imported_shows_no_traceback() -> None:
    script = (
        "import sys\n"
        "class Interrupting:\n"
        "    def find_spec(self, name, *_):\n"
        "        if name == 'server.cli': raise KeyboardInterrupt\n"
        "sys.meta_path.insert(0, Interrupting())\n"
        "from server.__main__ import main\n"
        "sys.exit(main())"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (130, "")


def test_the_package_runs_as_the_command() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "server", "version"], capture_output=True, text=True, check=True
    )
    assert done.stdout.startswith("outrider ")
