"""`outrider verify` from its flags to its exit status: in process, and against a server over HTTP."""

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from engine.async_engine import AsyncEngine
from engine.sampling import sampler
from engine.sampling_params import Acceptance
from server.cli import main
from server.config import OPTIONS, ConfigError
from server.options import flag_of
from server.verify.methods import method_configs
from server.verify.plan import HELP
from tests.fakes import FakeEngine
from tests.server.conftest import Served, StartServer
from tests.server.verify.engines import SMALL, tiny_engine
from tests.server.verify.test_faults import accept_all
from tests.tiny import save_tiny

Serve = Callable[..., Served]


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in os.environ:
        if variable.startswith("OUTRIDER_") or variable == "OPENAI_API_KEY":
            monkeypatch.delenv(variable)


@pytest.fixture
def url(start_server: StartServer) -> Iterator[str]:
    """A server around a tiny target and its draft."""
    built = tiny_engine()
    engine = AsyncEngine(built.core, built.model, built.tokenizer)
    engine.start()
    yield start_server(engine).url
    engine.close()


def test_models_are_verified_with_every_method_that_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target, draft = save_tiny(tmp_path / "target"), save_tiny(tmp_path / "draft")
    file = tmp_path / "found.json"
    models = ["--model", str(target), "--draft-model", str(draft), "--methods", "ngram, draft_model"]
    room = ["--max-model-len", "200", "--num-kv-blocks", "64", "--offline", "--cache-dir", str(tmp_path)]
    assert main(["verify", *SMALL, *models, *room, "--ngram-min", "1", "--json", str(file)]) == 0
    captured = capsys.readouterr()
    assert f"verified: {target} with ngram, draft_model" in captured.out
    assert "no fault: " in captured.out
    assert "answers/s" not in captured.err
    found = json.loads(file.read_text())
    assert found["num_faults"] == 0
    assert {row["method"] for row in found["texts"]} == {"plain", "ngram", "draft_model"}
    assert {row["verdict"] for row in found["texts"]} == {"equal"}
    drafted = [row for row in found["texts"] if row["method"] == "draft_model"]
    # The target as its own draft: whatever is drafted stands, and may be cut off by a stop only.
    assert all(row["accepted"] == row["drafted"] for row in drafted if "stop" not in row["case"])


def test_a_server_is_verified_over_http(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    flags = [flag for flag in SMALL if flag != "--quiet"]
    assert main(["verify", "--url", url, *flags]) == 0
    captured = capsys.readouterr()
    assert f"verified: fake at {url}" in captured.out
    assert "20 logprobs per token of plain answers" in captured.out
    assert "server  match      greedy " in captured.out
    assert "server  rejection  top_k 4" in captured.out
    assert "server, match, draws" in captured.err


def test_a_fault_behind_http_is_found(
    url: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sampler, "follow_choices", accept_all)
    assert main(["verify", "--url", url, *SMALL, "--rules", "match"]) == 1
    out = capsys.readouterr().out
    assert "  FAULT" in out
    assert "where texts part:" in out
    assert out.rstrip().splitlines()[-1].startswith("FAULT: ")


def test_a_server_that_fails_is_a_fault(serve: Serve, capsys: pytest.CaptureFixture[str]) -> None:
    served = serve(FakeEngine(max_model_len=2048, error_after=0))
    assert main(["verify", "--url", served.url, *SMALL]) == 1
    assert "no prompt is answered: HTTP 503" in capsys.readouterr().err


def test_a_server_that_refuses_everything_says_why(serve: Serve, capsys: pytest.CaptureFixture[str]) -> None:
    served = serve(FakeEngine(max_model_len=20))
    assert main(["verify", "--url", served.url, *SMALL]) == 1
    assert "no prompt is answered: HTTP 400" in capsys.readouterr().err


def test_no_server_is_said_in_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", "--url", "http://127.0.0.1:1", *SMALL]) == 1
    err = capsys.readouterr().err
    assert "http://127.0.0.1:1/v1/models names no model" in err
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--url", "127.0.0.1"], "--url: 127.0.0.1 must start with http:// or https://"),
        (["--url", "http://a", "--methods", "ngram"], "--methods is for engines in this process"),
        (["--url", "http://a", "--model", "x"], "--model is a setting of the engines that are built"),
        (
            ["--methods", "eagle9"],
            "--methods: there is no 'eagle9'; there are none, ngram, suffix, draft_model, eagle, medusa",
        ),
        (["--methods", ""], "there is no ''"),
        (["--methods", "none"], "without speculation there is nothing to verify"),
        (["--speculation", "none"], "without speculation there is nothing to verify"),
        (["--methods", "ngram", "--speculation", "ngram"], "both name the method"),
        (["--methods", "ngram", "--draft-model", "x"], "draft_model is for draft_model, which --methods"),
        (["--methods", "draft_model"], "speculation draft_model needs draft_model"),
        (["--rules", "greedy"], "--rules: there is no 'greedy'; there are match, rejection"),
        (["--prompts", "/nowhere/a.json"], "cannot read /nowhere/a.json"),
        (["--json", "/nowhere/a.json"], "cannot write /nowhere/a.json"),
        (["--seds", "3"], "unknown flag --seds: did you mean --seeds?"),
    ],
)
def test_flags_that_cannot_hold_are_one_line(
    flags: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["verify", *flags]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert message in captured.err
    assert captured.err.count("\n") == 1


@pytest.mark.parametrize("value", ["0", "1", "2", "x"])
def test_a_chance_is_between_none_and_certain(value: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["verify", "--false-alarm", value])
    assert stopped.value.code == 2
    assert "--false-alarm" in capsys.readouterr().err


def test_what_a_file_says_of_another_method_is_left_out(tmp_path: Path) -> None:
    file = tmp_path / "a.yaml"
    file.write_text("speculation: draft_model\ndraft_model: d\nmax_num_seqs: 7\n")
    configs = method_configs({"ngram_max": "5"}, {}, str(file), ["ngram", "draft_model"])
    assert [config.speculation.method for config in configs.values()] == ["ngram", "draft_model"]
    assert {config.scheduler.max_num_seqs for config in configs.values()} == {7}
    [configured] = method_configs({}, {}, str(file), []).values()
    assert configured.speculation.method == "draft_model"
    # Unless a planner is asked for, there are drafts to verify whether or not they pay.
    assert configured.speculation.planner == "fixed"
    assert all(config.speculation.planner == "fixed" for config in configs.values())
    [asked] = method_configs({"planner": "auto"}, {}, str(file), []).values()
    assert asked.speculation.planner == "auto"
    with pytest.raises(ConfigError, match="ngram_max is for ngram"):
        method_configs({"ngram_max": "5"}, {}, str(file), ["draft_model"])


def test_help_has_the_settings_of_the_engine_and_every_rule(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "400")
    with pytest.raises(SystemExit):
        main(["verify", "--help"])
    text = capsys.readouterr().out
    assert HELP in text
    assert f"(default: {','.join(rule for rule in Acceptance if rule != 'typical')})" in text
    for option in OPTIONS.options.values():
        assert (f"  {flag_of(option.name)}" in text) == (option.path[0] == "engine")
