import re

from engine.catalog import CATALOG, nearest_name
from engine.config import DEFAULT_MODEL


def test_the_default_model_is_in_the_catalog() -> None:
    assert DEFAULT_MODEL in CATALOG


def test_every_model_has_a_pinned_wheel_and_a_digest() -> None:
    for name, model in CATALOG.items():
        assert model.name == name
        assert re.fullmatch(r"[\w-]+==[\d.]+", model.wheel.requirement)
        assert re.fullmatch(r"[0-9a-f]{64}", model.wheel.sha256)
        assert re.fullmatch(r"[\w.-]+/[\w.-]+", model.hub_id)
        # A catalog name must not look like a hub id or a path.
        assert re.fullmatch(r"[a-z0-9.-]+", name)


def test_a_misspelt_name_finds_the_nearest() -> None:
    assert nearest_name("SmolLM2-135M-instrct") == "smollm2-135m-instruct"
    assert nearest_name("gpt2") is None
