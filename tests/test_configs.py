"""The sample configurations: all load, and the default one is the defaults."""

from pathlib import Path

import pytest
import yaml

from engine.config import DraftModelSpeculation, NgramSpeculation, SuffixSpeculation
from engine.head_config import EagleSpeculation
from engine.tree_config import DynamicTree
from server.config import OPTIONS, ServerConfig, load_config

CONFIGS = Path(__file__).parent.parent / "configs"
SAMPLES = sorted(CONFIGS.glob("*.yaml"))


def test_there_are_samples() -> None:
    assert {"default.yaml", "ngram.yaml", "suffix.yaml", "draft-model.yaml"} <= {
        path.name for path in SAMPLES
    }
    assert {path.suffix for path in CONFIGS.iterdir()} == {".yaml"}


@pytest.mark.parametrize("path", SAMPLES, ids=lambda path: path.name)
def test_a_sample_loads_and_says_how_to_use_it(path: Path) -> None:
    loaded = load_config({}, {}, str(path))
    assert loaded.notes == ()
    text = path.read_text()
    assert text.startswith("# ")
    assert f"outrider serve --config configs/{path.name}" in text


def test_the_default_sample_sets_what_has_a_default_whatever_the_method() -> None:
    path = CONFIGS / "default.yaml"
    assert load_config({}, {}, str(path)).config == ServerConfig()
    assert yaml.safe_load(path.read_text()).keys() == {
        option.name for option in OPTIONS.options.values() if not option.is_nullable and not option.variants
    }


def test_the_default_sample_names_every_setting() -> None:
    lines = (CONFIGS / "default.yaml").read_text().splitlines()
    keys = {line.removeprefix("# ").partition(":")[0] for line in lines}
    assert OPTIONS.options.keys() - keys == set()


def test_what_the_default_sample_comments_out_can_be_switched_on() -> None:
    """Each commented line is a setting that loads, and those of the default method are its defaults."""
    lines = (CONFIGS / "default.yaml").read_text().splitlines()
    commented = [line.removeprefix("# ") for line in lines if line[2:].partition(":")[0] in OPTIONS.options]
    values = yaml.safe_load("\n".join(commented))
    for name, value in values.items():
        option = OPTIONS.options[name]
        if OPTIONS.choice.default in option.variants:
            written = {True: "on", False: "off"}.get(value, str(value)) if option.is_switch else str(value)
            assert option.default.split()[0] == written, name
        variant = option.variants[0] if option.variants else OPTIONS.choice.default
        method = variant if OPTIONS.choice.default not in option.variants else OPTIONS.choice.default
        needed = {
            other.name: "x"
            for other in OPTIONS.options.values()
            if other.implies and method in other.variants
        }
        load_config({"speculation": method, **needed, name: value}, {})


def test_the_default_sample_leaves_the_method_to_a_flag() -> None:
    loaded = load_config({"draft_model": "x"}, {}, str(CONFIGS / "default.yaml"))
    assert loaded.notes == ()
    assert loaded.config.engine.speculation == DraftModelSpeculation(draft_model="x")


def test_the_speculation_samples_choose_what_they_are_named_after() -> None:
    def speculation(name: str) -> object:
        return load_config({}, {}, str(CONFIGS / name)).config.engine.speculation

    assert speculation("ngram.yaml") == NgramSpeculation(ngram_max=4)
    assert speculation("suffix.yaml") == SuffixSpeculation(suffix_share=True)
    assert speculation("draft-model.yaml") == DraftModelSpeculation(
        draft_model="Qwen/Qwen2.5-Coder-0.5B-Instruct", num_draft_tokens=4
    )
    assert speculation("eagle.yaml") == EagleSpeculation(
        head="yuhuili/EAGLE3-LLaMA3.1-Instruct-8B", tree=DynamicTree(max_nodes=16)
    )
