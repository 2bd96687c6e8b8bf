"""The heads that come with Outrider: whole, small, and for one model."""

from pathlib import Path

import pytest

from engine.errors import ModelNotFound
from engine.speculation.heads.eagle_reading import read_eagle_head
from engine.speculation.heads.medusa_reading import read_medusa_heads
from engine.speculation.heads.shipped import SHIPPED_SHAPE, shipped_head
from tests.speculation.heads.running import TARGET

MOST_BYTES = 25_000_000
METHODS = ("eagle", "medusa")


def test_they_are_read_as_any_other() -> None:
    eagle = read_eagle_head(shipped_head("eagle", SHIPPED_SHAPE), SHIPPED_SHAPE)
    assert (eagle.config.num_features, eagle.config.draft_vocab_size) == (3, 8192)
    assert len(read_medusa_heads(shipped_head("medusa", SHIPPED_SHAPE), SHIPPED_SHAPE).blocks) == 4


def test_they_are_small() -> None:
    folders = [shipped_head(method, SHIPPED_SHAPE) for method in METHODS]
    files = [file for folder in folders for file in folder.iterdir()]
    assert sum(file.stat().st_size for file in files) < MOST_BYTES


@pytest.mark.parametrize("method", METHODS)
def test_their_cards_say_where_they_come_from(method: str) -> None:
    card = (shipped_head(method, SHIPPED_SHAPE) / "README.md").read_text()
    for said in ("license: apache-2.0", "outrider train-head", "tokens of answers", "tokens per forward"):
        assert said in card
    assert not [word for word in card.split() if word.startswith("/") and Path(word).is_absolute()]


@pytest.mark.parametrize("method", METHODS)
def test_another_model_is_refused(method: str) -> None:
    with pytest.raises(
        ModelNotFound, match=f"the {method} head that comes with Outrider is for smollm2.*--head"
    ):
        shipped_head(method, TARGET)
