"""`outrider bench` from its flags to its report, against servers without a model and one with a tiny one."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from engine.errors import RequestFailed
from engine.outputs import StepPart, StepStats
from server.app import AppSettings
from server.bench import local, plan
from server.cli import main
from server.config import OPTIONS
from server.options import flag_of
from tests.fakes import FakeEngine
from tests.server.conftest import Served
from tests.tiny import save_tiny

Serve = Callable[..., Served]


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in os.environ:
        if variable.startswith("OUTRIDER_") or variable == "OPENAI_API_KEY":
            monkeypatch.delenv(variable)


def engine(**fields: Any) -> FakeEngine:
    return FakeEngine(answer=b"to be or not to be, that is the question", max_model_len=2048, **fields)


def figures(path: Path) -> dict[str, Any]:
    read: dict[str, Any] = json.loads(path.read_text())
    return read


def test_where_a_servers_time_goes_is_read_from_its_metrics(
    serve: Serve, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    served = serve(engine())
    steps = StepStats(num_target_forwards=1, part_seconds={StepPart.FORWARD: 0.75, StepPart.SAMPLE: 0.25})
    served.engine.listeners[0](steps)

    def answer(prompt: Any, params: Any) -> bytes:
        served.engine.listeners[0](steps)
        return b"to be or not to be"

    served.engine.answer = answer
    file = tmp_path / "figures.json"
    assert main(["bench", "--url", served.url, "--quiet", "--json", str(file)]) == 0
    out = capsys.readouterr().out
    assert re.search(r"part of a step +ms +share\n  commands +0.00 +0.0%\n", out)
    assert re.search(r"\n  forward +750.00 +75.0%\n  sample +250.00 +25.0%\n", out)
    [measured] = figures(file)["measured"]
    assert measured["steps"]["steps"] == 4
    assert measured["steps"]["seconds"] == dict.fromkeys(StepPart, 0.0) | {"forward": 3.0, "sample": 1.0}
    assert main(["bench", "--url", served.url, "--quiet", "--paired", "--warmup", "0"]) == 0
    out = capsys.readouterr().out
    assert re.search(r"part of a step +speculation ms +share +plain ms +share\n", out)
    assert re.search(r"\n  forward +750.00 +75.0% +750.00 +75.0%\n", out)


def test_a_trace_is_asked_for_while_something_runs(
    serve: Serve, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    served = serve(engine(), settings=AppSettings(profiling=True))
    flags = ["--quiet", "--warmup", "0", "--concurrency", "2", "--num-prompts", "3"]
    trace = ["--profile", str(tmp_path / "trace.json"), "--profile-steps", "5"]
    assert main(["bench", "--url", served.url, *flags, *trace]) == 0
    assert json.loads((tmp_path / "trace.json").read_text()) == {"traceEvents": [], "steps": 5}
    assert len(served.engine.requests) >= 3 + 2
    assert "2 at once: 3 of 3 answers" in capsys.readouterr().out


def test_a_server_that_makes_no_traces_is_told_after_the_report(
    serve: Serve, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    served = serve(engine())
    flags = ["--quiet", "--profile", str(tmp_path / "trace.json")]
    assert main(["bench", "--url", served.url, *flags]) == 1
    captured = capsys.readouterr()
    assert "1 at once: 4 of 4 answers" in captured.out
    assert captured.err == (
        f"outrider: {served.url}/profile answers 404: for a trace start the server with --profiling\n"
    )
    assert not (tmp_path / "trace.json").exists()


def test_a_running_server_is_measured_at_every_load(
    serve: Serve, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    served = serve(engine())
    file, picture = tmp_path / "figures.json", tmp_path / "picture.png"
    flags = ["--concurrency", "1,3", "--num-prompts", "6", "--max-tokens", "20", "--seed", "7"]
    files = ["--json", str(file), "--plot", str(picture)]
    assert main(["bench", "--url", served.url, *flags, *files]) == 0
    captured = capsys.readouterr()
    assert "1 at once: 6 of 6 answers" in captured.out
    assert "3 at once: 6 of 6 answers" in captured.out
    assert "120 tokens written (counted by usage)" in captured.out
    assert "6/6" in captured.err
    assert picture.read_bytes().startswith(b"\x89PNG")
    written = figures(file)
    assert written["plan"]["wishes"]["seed"] == 7
    first, second = written["measured"]
    assert (first["summary"]["load"], second["summary"]["level"]) == ("1 at once", 3)
    assert first["summary"]["num_output_tokens"] == 120
    assert first["summary"]["acceptance"] == {"drafted": 168, "accepted": 78, "steps": 42, "tokens": 120}
    record = first["run"]["records"][0]
    assert (record["prompt"], record["text"]) == ("prime", "to be or not to be, ")
    assert (record["num_output_tokens"], len(record["arrivals"])) == (20, 7)
    # One request to warm up, then each prompt with the next seed.
    seeds = [request.params.seed for request in served.engine.requests]
    assert seeds[:7] == [7, *range(7, 13)]
    assert {*seeds[7:]} == {*range(7, 13)}


def test_arrivals_at_a_rate(serve: Serve, capsys: pytest.CaptureFixture[str]) -> None:
    served = serve(engine())
    flags = ["--rate", "200,400", "--warmup", "0", "--quiet"]
    assert main(["bench", "--url", f"{served.url}/v1/", *flags]) == 0
    captured = capsys.readouterr()
    assert "200 per second: 4 of 4 answers" in captured.out
    assert "400 per second: 4 of 4 answers" in captured.out
    assert "late at most" in captured.out
    assert captured.err == ""
    assert len(served.engine.requests) == 8


def test_speculation_is_compared_with_plain_decoding(
    serve: Serve, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    served = serve(engine())
    file = tmp_path / "figures.json"
    flags = ["--paired", "--concurrency", "2", "--max-tokens", "40", "--json", str(file), "--quiet"]
    assert main(["bench", "--url", served.url, *flags, "--plot", str(tmp_path / "a.png")]) == 0
    out = capsys.readouterr().out
    assert "2 at once, in pairs: speculation against plain, 4 of 4 pairs answered" in out
    assert "texts that differ: 0 of 4" in out
    assert "NOTE" not in out
    [compared] = figures(file)["compared"]
    assert compared["summary"]["total"]["equal_texts"] == 4
    assert compared["summary"]["candidate"]["acceptance"]["steps"] == 4 * 14
    assert compared["summary"]["baseline"]["acceptance"] == {
        "drafted": 0,
        "accepted": 0,
        "steps": 160,
        "tokens": 160,
    }
    # Two to warm up, then the first two prompts with speculation, the same without, and the other way round.
    enabled = [request.params.speculation.enabled for request in served.engine.requests]
    assert enabled == [True, False, True, True, False, False, False, False, True, True]
    seeds = [request.params.seed for request in served.engine.requests[2:6]]
    assert {*seeds[:2]} == {*seeds[2:]} == {0, 1}


def test_more_keys_do_not_undo_what_makes_the_baseline(serve: Serve) -> None:
    served = serve(engine())
    extra = '{"speculation": {"num_draft_tokens": 3}, "stream": false}'
    flags = ["--paired", "--num-prompts", "1", "--warmup", "0", "--quiet"]
    assert main(["bench", "--url", served.url, *flags, "--extra", extra]) == 0
    ours, plain = (request.params.speculation for request in served.engine.requests)
    assert (ours.enabled, ours.num_draft_tokens) == (True, 3)
    assert (plain.enabled, plain.num_draft_tokens) == (False, None)


def test_two_servers_are_compared_and_a_difference_explained(
    serve: Serve, capsys: pytest.CaptureFixture[str]
) -> None:
    ours, theirs = serve(engine()), serve(FakeEngine(answer=b"to be or NOT", max_model_len=2048))
    assert main(["bench", "--url", ours.url, "--against", theirs.url, "--quiet", "--num-prompts", "1"]) == 0
    out = capsys.readouterr().out
    hosts = [url.removeprefix("http://") for url in (ours.url, theirs.url)]
    assert f"{hosts[0]} against {hosts[1]}, 1 of 1 pairs answered" in out
    assert "texts that differ: 1 of 1" in out
    # The fake engine's second choice is the next byte, one nat below.
    assert (
        "prime at character 9: 'not to be, that is the q', not 'NOT'; there 'N' leads 'O' by 1.000000" in out
    )
    assert len(ours.engine.requests) == 2
    assert len(theirs.engine.requests) == 3


def test_failures_are_counted_shown_and_told_by_the_status(
    serve: Serve, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    served = serve(engine(error_after=2, error=RequestFailed("the request failed")))
    file = tmp_path / "figures.json"
    assert main(["bench", "--url", served.url, "--quiet", "--json", str(file)]) == 1
    out = capsys.readouterr().out
    assert "0 of 4 answers" in out
    assert "FAILED: 4 of 4 requests\n    4 x error in the stream: the request failed" in out
    assert len(figures(file)["measured"][0]["run"]["records"]) == 4


def test_a_key_from_the_environment_is_sent(
    serve: Serve, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    served = serve(engine())
    monkeypatch.setenv("OPENAI_API_KEY", "sk-secret")
    file = tmp_path / "figures.json"
    assert main(["bench", "--url", served.url, "--quiet", "--json", str(file)]) == 0
    assert "sk-secret" not in file.read_text()


def test_a_server_that_is_not_there_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--url", "http://127.0.0.1:1"]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("outrider: http://127.0.0.1:1/v1/models does not answer: ConnectError")
    assert captured.err.count("\n") == 1


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--model", "gpt2"], "--model is a setting of the server that the benchmark starts"),
        (["--config", "a.yaml"], "--config is a setting of the server that the benchmark starts"),
        (["--rate", "1", "--concurrency", "2"], "--concurrency and --rate both set the load"),
        (["--paired", "--against", "http://b"], "--paired and --against both name what to compare with"),
        (
            ["--paired", "--extra", '{"speculation": {"enabled": false}}'],
            '--extra: {"speculation": {"enabled": false}} makes all requests plain',
        ),
        (["--paired", "--rate", "1"], "a paired run takes --concurrency, not --rate"),
        (["--plot", "a.svg"], "--plot: a.svg must end in .png"),
        (["--json", "/nowhere/a.json"], "cannot write /nowhere/a.json"),
        (["--prompts", "/nowhere/a.json"], "cannot read /nowhere/a.json"),
        (["--against", "b:80"], "--against: b:80 must start with http:// or https://"),
        (["--concurency", "3"], "unknown flag --concurency: did you mean --concurrency?"),
        (["--host", "x"], "unknown flag --host: see outrider bench --help"),
    ],
)
def test_flags_that_cannot_hold_are_one_line(
    flags: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "--url", "http://127.0.0.1:1", *flags]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert message in captured.err
    assert captured.err.count("\n") == 1


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--concurrency", "1,0"], "argument --concurrency: must be a whole number from 1 on, got '0'"),
        (["--concurrency", "1.5"], "must be a whole number from 1 on, got '1.5'"),
        (["--rate", "0"], "must be a number above 0, got '0'"),
        (["--rate", "inf"], "must be a number above 0, got 'inf'"),
        (["--temperature", "-1"], "must be a number from 0 on, got '-1'"),
        (["--temperature", "nan"], "must be a number from 0 on, got 'nan'"),
        (["--extra", "{"], "--extra: is not JSON"),
        (["--extra", "[]"], "must be an object such as"),
    ],
)
def test_values_that_cannot_be_are_one_line(
    flags: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["bench", *flags])
    assert stopped.value.code == 2
    err = capsys.readouterr().err
    assert message in err
    assert err.count("\n") == 1


def test_help_has_the_settings_of_the_engine_and_not_those_of_the_server(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "400")
    with pytest.raises(SystemExit):
        main(["bench", "--help"])
    text = capsys.readouterr().out
    assert plan.HELP in text
    for option in OPTIONS.options.values():
        assert (f"  {flag_of(option.name)}" in text) == (option.path[0] == "engine")


def test_a_server_of_its_own_is_started_measured_and_ended(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    file = tmp_path / "figures.json"
    settings = ["--model", str(save_tiny(tmp_path / "tiny")), "--offline", "--num-kv-blocks", "64"]
    flags = ["--max-tokens", "8", "--ignore-eos", "--quiet", "--json", str(file), "--num-prompts", "3"]
    flags += ["--profile", str(tmp_path / "trace.json"), "--profile-steps", "4"]
    assert main(["bench", *settings, "--cache-dir", str(tmp_path), "--paired", *flags]) == 0
    captured = capsys.readouterr()
    assert "3 of 3 pairs answered" in captured.out
    assert "texts that differ: 0 of 3" in captured.out
    assert "starting outrider serve --no-prefix-caching --model=" in captured.err
    assert re.search(r"part of a step +speculation ms +share +plain ms +share\n", captured.out)
    written = figures(file)
    assert written["settings"]["prefix_caching"] is False
    [compared] = written["compared"]
    assert compared["summary"]["candidate"]["num_output_tokens"] == 24
    assert compared["summary"]["candidate"]["num_cached_tokens"] == 0
    assert [steps["seconds"]["forward"] > 0 for steps in compared["steps"]] == [True, True]
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    regions = [event["name"] for event in events if event.get("cat") == "user_annotation"]
    assert {*StepPart} <= {*regions}
    assert regions.count("forward") == 4


def test_plain_decoding_is_not_compared_with_itself(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local, "SERVE", (sys.executable, "-c", "import sys; sys.exit('it is started')"))
    assert main(["bench", "--paired", "--speculation", "none"]) == 2
    refused = capsys.readouterr().err
    assert refused.startswith("outrider: --paired compares speculation with plain decoding, and with specul")
    assert "--speculation ngram" in refused
    assert refused.count("\n") == 1
    monkeypatch.setenv("OUTRIDER_SPECULATION", "none")
    assert main(["bench", "--paired"]) == 2
    assert capsys.readouterr().err == refused
    # Each of these makes drafts without a method, or compares nothing.
    for flags in (
        ["--paired", "--extra", '{"prediction": "to be or not to be"}'],
        ["--paired", "--extra", '{"response_format": {"type": "json_object"}}'],
        ["--paired", "--speculation", "ngram"],
        [],
    ):
        assert main(["bench", *flags]) == 1
        assert capsys.readouterr().err.endswith("outrider: it is started\n")


def test_a_server_of_its_own_that_does_not_start_says_why(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    script = "import sys; print('a line of the log'); sys.exit(f'outrider: not with {sys.argv[1:3]}')"
    monkeypatch.setattr(local, "SERVE", (sys.executable, "-c", script))
    assert main(["bench", "--block-size", "8"]) == 1
    assert capsys.readouterr().err.splitlines() == [
        "starting outrider serve --no-prefix-caching --block-size=8",
        "outrider: the server ended while it started:",
        "outrider: a line of the log",
        "outrider: outrider: not with ['--no-prefix-caching', '--block-size=8']",
    ]


def test_a_benchmark_that_is_ended_takes_its_server_along(tmp_path: Path) -> None:
    server = tmp_path / "server.py"
    server.write_text(
        f"import os, time\nopen({str(tmp_path / 'pid')!r}, 'w').write(f'{{os.getpid()}} ')\ntime.sleep(60)"
    )
    script = (
        "import sys; from server.bench import local; from server.cli import main\n"
        f"local.SERVE = (sys.executable, {str(server)!r}); sys.exit(main(['bench']))"
    )
    process = subprocess.Popen([sys.executable, "-c", script], stderr=subprocess.DEVNULL)
    pid = wait_for_pid(tmp_path / "pid")
    process.terminate()
    assert process.wait(30) == 128 + signal.SIGTERM
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def wait_for_pid(path: Path) -> int:
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        if path.exists() and (text := path.read_text()).endswith(" "):
            return int(text)
        time.sleep(0.02)
    pytest.fail("the server has not been started")


def test_a_server_that_does_not_end_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    script = (
        "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('deaf', flush=True); input()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", script],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,
    ) as process:
        assert process.stdout
        assert process.stdout.readline() == b"deaf\n"
        monkeypatch.setattr(local, "END_SECONDS", 0.1)
        local.end(process)
        assert process.returncode == -signal.SIGKILL
