"""The sample configurations: all load, and the default one is the defaults."""

from pathlib import Path

import pytest
import yaml

from engine.config import DraftModelSpeculation, NgramSpeculation
from server.config import OPTIONS, ServerConfig, load_config

CONFIGS = Path(__file__).parent.parent / "configs"
SAMPLES = sorted(CONFIGS.glob("*.yaml"))


def test_there_are_samples() -> None:
    assert {"default.yaml", "ngram.yaml", "draft-model.yaml"} <= {path.name for path in SAMPLES}
    assert {path.suffix for path in CONFIGS.iterdir()} == {".yaml"}


@pytest.mark.parametrize("path", SAMPLES, ids=lambda path: path.name)
def test_a_sample_loads_and_says_how_to_use_it(path: Path) -> None:
    loaded = load_config({}, {}, str(path))
    assert loaded.notes == ()
    text = path.read_text()
    assert text.startswith("# ")
    assert f"outrider serve --config configs/{path.name}" in text


def test_the_default_sample_names_every_setting_with_its_default() -> None:
    path = CONFIGS / "default.yaml"
    assert load_config({}, {}, str(path)).config == ServerConfig()
    uncommented = path.read_text().replace("\n# ", "\n").splitlines()
    keys = {line.partition(":")[0] for line in uncommented}
    default_kind = OPTIONS.choice.default
    expected = {
        option.name
        for option in OPTIONS.options.values()
        if not option.variants or default_kind in option.variants
    }
    assert expected <= keys
    given = yaml.safe_load(path.read_text())
    assert expected - given.keys() == {
        option.name for option in OPTIONS.options.values() if option.is_nullable and not option.variants
    }


def test_the_speculation_samples_choose_what_they_are_named_after() -> None:
    def speculation(name: str) -> object:
        return load_config({}, {}, str(CONFIGS / name)).config.engine.speculation

    assert speculation("ngram.yaml") == NgramSpeculation(num_draft_tokens=8, ngram_max=4, ngram_min=2)
    assert speculation("draft-model.yaml") == DraftModelSpeculation(
        draft_model="Qwen/Qwen2.5-Coder-0.5B-Instruct", num_draft_tokens=4
    )
