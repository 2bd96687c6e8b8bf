"""The merge of file, environment and flags, and what its errors say."""

from pathlib import Path

import pytest

from engine.config import DraftModelSpeculation, NgramSpeculation, NoSpeculation
from engine.head_config import EagleSpeculation
from server.config import OPTIONS, ConfigError, ServerConfig, load_config
from server.options import flag_of, variable_of


@pytest.fixture
def yaml_file(tmp_path: Path) -> Path:
    return tmp_path / "serve.yaml"


def error_of(
    flags: dict[str, object] | None = None, environ: dict[str, str] | None = None, file: str | None = None
) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(flags or {}, environ or {}, file)
    return str(caught.value)


def test_nothing_given_is_the_defaults() -> None:
    assert load_config({}, {}).config == ServerConfig()
    assert load_config({}, {}).notes == ()


def test_flags_win_over_environment_over_file(yaml_file: Path) -> None:
    yaml_file.write_text("port: 1\nblock_size: 2\nmax_num_seqs: 3\n")
    environ = {"OUTRIDER_BLOCK_SIZE": "20", "OUTRIDER_MAX_NUM_SEQS": "30"}
    config = load_config({"max_num_seqs": "300"}, environ, str(yaml_file)).config
    assert config.http.port == 1
    assert config.engine.cache.block_size == 20
    assert config.engine.scheduler.max_num_seqs == 300


def test_every_option_reaches_its_section_from_every_source(yaml_file: Path) -> None:
    samples = {
        "dtype": "bfloat16",
        "log_level": "debug",
        "root_path": "/llm",
        "speculation": "draft_model",
        "acceptance": "match",
        "extra_draft_models": "8, 9",
        "quantization": "int8",
        "tool_parser": "hermes",
    }
    foreign = {"num_kv_blocks", "tree"} | {
        option.name
        for option in OPTIONS.options.values()
        if option.variants and "draft_model" not in option.variants
    }
    flat: dict[str, object] = {}
    for option in OPTIONS.options.values():
        if option.name not in foreign:
            text = option.default.split()[0] if option.default else "7"
            flat[option.name] = samples.get(option.name, {"on": "false", "off": "true"}.get(text, text))
    yaml_file.write_text("".join(f"{name}: '{value}'\n" for name, value in flat.items()))
    by_flags = load_config(flat, {}).config
    assert load_config({}, {variable_of(name): str(value) for name, value in flat.items()}).config == by_flags
    assert load_config({}, {}, str(yaml_file)).config == by_flags
    assert by_flags.http.root_path == "/llm"
    assert by_flags.engine.model.offline
    assert not by_flags.engine.cache.prefix_caching
    assert by_flags.engine.speculation == DraftModelSpeculation(
        draft_model="7",
        draft_revision="7",
        predictions=False,
        num_draft_tokens=15,
        allow_lossy=True,
        extra_draft_models=("8", "9"),
        draft_rounding=False,
        probe=False,
    )


def test_the_file_can_be_named_in_the_environment(yaml_file: Path, tmp_path: Path) -> None:
    yaml_file.write_text("port: 1\n")
    other = tmp_path / "other.yaml"
    other.write_text("port: 2\n")
    environ = {"OUTRIDER_CONFIG": str(yaml_file)}
    assert load_config({}, environ).config.http.port == 1
    assert load_config({}, environ, str(other)).config.http.port == 2


@pytest.mark.parametrize("content", ["", "# nothing\n", "---\n", "revision:\nkv_cache_gb: null\n"])
def test_an_empty_file_and_open_optional_keys_are_the_defaults(yaml_file: Path, content: str) -> None:
    yaml_file.write_text(content)
    assert load_config({}, {}, str(yaml_file)).config == ServerConfig()


def test_an_empty_variable_is_not_set_and_foreign_ones_are_ignored() -> None:
    environ = {"OUTRIDER_PORT": "", "OUTRIDER_CONFIG": "", "PATH": "/bin", "OUTRIDERS": "x"}
    assert load_config({}, environ).config == ServerConfig()


def test_home_is_expanded_where_no_shell_did_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/ada")
    assert load_config({"model": "~/m"}, {}).config.engine.model.model == "/home/ada/m"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("prt: 1", "unknown key prt: did you mean port?"),
        ("max-model-len: 9", "unknown key max-model-len: did you mean max_model_len?"),
        ("zzzzzz: 9", "unknown key zzzzzz: see outrider serve --help"),
        ("config: other.yaml", "unknown key config: "),
        ("1: 9", "unknown key 1: see outrider serve --help"),
        ("port: eighty", "port must be a valid integer, unable to parse string as an integer, got 'eighty'"),
        ("port: [1]", "port must be a valid integer, got [1]"),
        ("port:", "port has no value: give it one or remove the line"),
        ("port: ''", "port is empty: give it a value or leave it out"),
        ("offline: perhaps", "offline must be true or false, got 'perhaps'"),
        ("port: yes", "port is not a switch, got true (YAML reads on, off, yes and no as that)"),
        ("speculation: off", "speculation is not a switch, got false"),
        (
            "speculation: hydra",
            "speculation must be one of none, ngram, suffix, draft_model, eagle, medusa, got 'hydra'",
        ),
        (
            "speculation: {method: ngram}",
            "speculation must be one of none, ngram, suffix, draft_model, eagle, medusa, got {'method'",
        ),
        ("kv_cache_gb: .inf", "kv_cache_gb must be a finite number, got inf"),
        ("kv_cache_gb: .nan", "kv_cache_gb must be a finite number, got nan"),
        ("root_path: llm", "root_path must start with a slash and not end with one, got 'llm'"),
        ("model: 7", "model must be a text (in quotes, where YAML takes it for something else), got 7"),
        ("http: {port: 1}", "unknown key http: settings have no sections, write its lines without it"),
        ("- port", "must hold lines of `name: value`, got ['port']"),
    ],
)
def test_a_faulty_file_is_refused_by_name(yaml_file: Path, content: str, message: str) -> None:
    yaml_file.write_text(content + "\n")
    error = error_of(file=str(yaml_file))
    assert error.startswith(f"{yaml_file}: " if content.startswith("-") else f"{yaml_file}:1: ")
    assert message in error
    assert "\n" not in error


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"a: 1\nport: 1\na: 2", ":3:1: not valid YAML: a is given more than once, first in line 1"),
        (
            b"# One.\nport: [1,\n  2",
            ":4:1: not valid YAML: expected ',' or ']', but got '<stream end>' (while parsing a flow "
            "sequence that begins at 2:7)",
        ),
        (b"host: x\nmodel: a: b", ":2:9: not valid YAML: mapping values are not allowed here"),
        (
            b"\tport: 1",
            ":1:1: not valid YAML: found character '\\t' that cannot start any token (while scanning for the "
            "next token)",
        ),
        (b"port: 1\nmodel: *x", ":2:8: not valid YAML: found undefined alias 'x'"),
        (
            b"port: 1\nrevision: 2026-13-45",
            ":2:11: not valid YAML: month must be in 1..12; put it in quotes if it is text",
        ),
        (b"a: !!timestamp x", ":1:4: not valid YAML: this is no timestamp; put it in quotes if it is text"),
        (b"offline: !!bool x", ":1:10: not valid YAML: this is no bool; put it in quotes if it is text"),
        (b"port: !!int ''", ":1:7: not valid YAML: this is no int; put it in quotes if it is text"),
        (b"tree: " + b"[" * 3000, ": not valid YAML: it is nested too deeply"),
        (b"port: 1\nhost: \x07", ":2: not valid YAML: it holds the control character U+0007"),
        (b"port: 1\n\nhost: \xff", ":3: not UTF-8: byte 0xff is no part of a character"),
    ],
)
def test_what_is_no_yaml_is_refused_in_a_line_that_says_where(
    yaml_file: Path, content: bytes, message: str
) -> None:
    yaml_file.write_bytes(content + b"\n")
    assert error_of(file=str(yaml_file)) == f"{yaml_file}{message}"


def test_all_problems_of_all_sources_are_lines_with_their_places(yaml_file: Path) -> None:
    yaml_file.write_text(
        "# Settings.\nprt: 1\n\nblock_size:\nhost: on\nextra_draft_models:\n  - a\n  - 7\nmodle: x\n"
    )
    error = error_of({"model": ""}, {"OUTRIDER_PRT": "1"}, str(yaml_file))
    assert error.splitlines() == [
        f"{yaml_file}:2: unknown key prt: did you mean port?",
        f"{yaml_file}:4: block_size has no value: give it one or remove the line",
        f"{yaml_file}:5: host is not a switch, got true (YAML reads on, off, yes and no as that)",
        f"{yaml_file}:9: unknown key modle: did you mean model?",
        "unknown environment variable OUTRIDER_PRT: did you mean OUTRIDER_PORT?",
        "--model: model is empty: give it a value or leave it out",
    ]
    yaml_file.write_text(
        "port: -1\n\ndtype: fp8\ndraft_model: d\nextra_draft_models:\n  - a\n  - 7\ntree: [0]\n"
    )
    assert error_of(file=str(yaml_file)).splitlines() == [
        f"{yaml_file}:1: port must be greater than or equal to 0, got -1",
        f"{yaml_file}:3: dtype must be 'auto', 'float32', 'float16', 'bfloat16', 'int8' or 'int4', got 'fp8'",
        f"{yaml_file}:8: tree must have whole numbers from 1 to 63 as widths, got [0]",
        f"{yaml_file}:5: extra_draft_models[1] must be a text (in quotes, where YAML takes it for something "
        "else), got 7",
    ]
    yaml_file.write_text("speculation: none\nngram_max: 4\ndraft_model: d\n")
    assert error_of(file=str(yaml_file)).splitlines() == [
        f"{yaml_file}:2: ngram_max is for ngram, but speculation is none ({yaml_file}:1)",
        f"{yaml_file}:3: draft_model is for draft_model, but speculation is none ({yaml_file}:1)",
    ]


def test_a_file_that_cannot_be_read_names_who_asked_for_it(tmp_path: Path) -> None:
    missing = str(tmp_path / "missing.yaml")
    assert error_of(file=missing) == f"--config: cannot read {missing}: No such file or directory"
    assert error_of(environ={"OUTRIDER_CONFIG": str(tmp_path)}).startswith("OUTRIDER_CONFIG: cannot read")
    assert error_of(file="").startswith("--config: ")


def test_faulty_variables_and_flags_are_refused_by_name() -> None:
    assert error_of(environ={"OUTRIDER_PRT": "1"}) == (
        "unknown environment variable OUTRIDER_PRT: did you mean OUTRIDER_PORT?"
    )
    assert error_of(environ={"OUTRIDER_port": "1"}).endswith("did you mean OUTRIDER_PORT?")
    assert error_of(environ={"OUTRIDER_PORT": "70000"}) == (
        "OUTRIDER_PORT: port must be less than or equal to 65535, got '70000'"
    )
    assert error_of({"offline": "perhaps"}).startswith("--offline: offline must be true or false")
    assert error_of({"model": ""}) == "--model: model is empty: give it a value or leave it out"


@pytest.mark.parametrize(
    ("variable", "value"),
    [("OUTRIDER_PORT", "tcp://10.0.0.1:8000"), ("OUTRIDER_SERVICE_HOST", "10.0.0.1")],
)
def test_variables_that_kubernetes_adds_are_explained(variable: str, value: str) -> None:
    error = error_of(environ={variable: value})
    assert variable in error
    assert "enableServiceLinks: false" in error


def test_all_faulty_values_are_reported_a_line_each() -> None:
    error = error_of({"port": "x"}, {"OUTRIDER_DTYPE": "fp8"})
    assert [line.split(":")[0] for line in error.splitlines()] == ["--port", "OUTRIDER_DTYPE"]


def test_settings_that_exclude_each_other_name_both_sources() -> None:
    error = error_of({"num_kv_blocks": "8"}, {"OUTRIDER_KV_CACHE_GB": "1"})
    assert "num_kv_blocks from --num-kv-blocks" in error
    assert "kv_cache_gb from OUTRIDER_KV_CACHE_GB" in error


def test_speculation_is_the_name_of_the_method() -> None:
    assert load_config({"speculation": "none"}, {}).config.engine.speculation == NoSpeculation()
    ngram = load_config({"speculation": "ngram", "ngram_max": "4"}, {}).config.engine.speculation
    assert ngram == NgramSpeculation(ngram_max=4)
    # Without a choice, a setting of the default's own is fine.
    assert load_config({"ngram_max": "4"}, {}).config.engine.speculation == ngram


def test_a_draft_model_means_draft_model_speculation(yaml_file: Path) -> None:
    yaml_file.write_text("speculation: ngram\nngram_max: 4\n")
    loaded = load_config({"draft_model": "d"}, {}, str(yaml_file))
    assert loaded.config.engine.speculation == DraftModelSpeculation(draft_model="d")
    assert load_config({"head": "h"}, {}).config.engine.speculation == EagleSpeculation(head="h")
    assert loaded.notes == (
        f"ngram_max from {yaml_file}:2 is left out: speculation is draft_model (--draft-model)",
    )


def test_a_later_choice_drops_what_earlier_sources_set_for_another(yaml_file: Path) -> None:
    yaml_file.write_text("draft_model: d\nnum_draft_tokens: 7\n")
    loaded = load_config({"speculation": "ngram"}, {"OUTRIDER_DRAFT_REVISION": "main"}, str(yaml_file))
    assert loaded.config.engine.speculation == NgramSpeculation(num_draft_tokens=7)
    assert [note.split()[0] for note in loaded.notes] == ["draft_model", "draft_revision"]
    loaded = load_config({"speculation": "none"}, {}, str(yaml_file))
    assert [note.split()[0] for note in loaded.notes] == ["draft_model", "num_draft_tokens"]


@pytest.mark.parametrize(
    ("flags", "environ", "message"),
    [
        (
            {"speculation": "ngram", "draft_model": "d"},
            {},
            "--draft-model: draft_model is for draft_model, but speculation is ngram (--speculation)",
        ),
        (
            {"ngram_max": "4"},
            {"OUTRIDER_SPECULATION": "none"},
            "--ngram-max: ngram_max is for ngram, but speculation is none (OUTRIDER_SPECULATION)",
        ),
        (
            {"draft_revision": "main"},
            {},
            "--draft-revision: draft_revision is for draft_model, but speculation is ngram (the default)",
        ),
        ({"speculation": "draft_model"}, {}, "speculation draft_model needs draft_model: give --draft-model"),
        (
            {"num_draft_tokens": "64"},
            {},
            "--num-draft-tokens: num_draft_tokens must be less than or equal to 63, got '64'",
        ),
    ],
)
def test_a_setting_of_another_speculation_is_refused(
    flags: dict[str, object], environ: dict[str, str], message: str
) -> None:
    assert error_of(flags, environ) == message


def test_flat_names_are_unique_and_described() -> None:
    assert {"model", "port", "speculation", "draft_model", "ngram_min"} <= OPTIONS.options.keys()
    for option in OPTIONS.options.values():
        assert option.description, option.name
        assert flag_of(option.name).removeprefix("--").replace("-", "_") == option.name
    assert OPTIONS.options["num_draft_tokens"].default == (
        "15 with ngram and suffix, 4 with draft_model and eagle and medusa"
    )
