"""Heads come from a folder, the hub's cache or the hub; they need no tokenizer."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from engine.errors import ModelNotFound
from engine.speculation.heads.eagle_reading import read_eagle_head
from engine.speculation.heads.finding import find_head, head_hub
from engine.speculation.heads.medusa_reading import read_medusa_heads
from tests.model.hub_server import HubStandIn, hub_server
from tests.speculation.heads.checkpoints import eagle3, write
from tests.speculation.heads.running import TARGET
from tests.speculation.heads.test_medusa_formats import CASES as MEDUSA_CASES


@pytest.fixture(scope="module")
def hub() -> Iterator[HubStandIn]:
    with hub_server() as hub:
        yield hub


def test_a_folder_is_taken_as_it_is(tmp_path: Path) -> None:
    folder = eagle3().save(tmp_path / "head")
    assert find_head(str(folder), head_hub(tmp_path / "hub", offline=True)) == folder


def test_heads_are_downloaded_once(hub: HubStandIn, tmp_path: Path) -> None:
    case = MEDUSA_CASES["as .pt, with a config of two"]
    hub.repositories["owner/medusa"] = write(tmp_path / "medusa", case.config or {}, case.tensors, case.file)
    hub.repositories["owner/eagle"] = eagle3().save(tmp_path / "eagle")
    online = head_hub(tmp_path / "hub", offline=False, endpoint=hub.endpoint)
    read_eagle_head(find_head("owner/eagle", online), TARGET)
    folder = find_head("owner/medusa", online)
    assert len(read_medusa_heads(folder, TARGET).blocks) == 5
    assert find_head("owner/medusa", head_hub(tmp_path / "hub", offline=True)) == folder


def test_what_is_no_head_is_refused(hub: HubStandIn, tmp_path: Path) -> None:
    offline = head_hub(tmp_path / "hub", offline=True)
    with pytest.raises(ModelNotFound, match=r"lacks config\.json: it holds no complete head"):
        find_head(str(tmp_path), offline)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ModelNotFound, match=r"lacks weights \(medusa_lm_head\.safetensors or "):
        find_head(str(tmp_path), offline)
    with pytest.raises(ModelNotFound, match="is a file: give the folder"):
        find_head(str(tmp_path / "config.json"), offline)
    with pytest.raises(ModelNotFound, match="there is no folder '/no/such/head'"):
        find_head("/no/such/head", offline)
    with pytest.raises(ModelNotFound, match=r"no folder 'owner/nothing' .* offline mode forbids"):
        find_head("owner/nothing", offline)
    hub.repositories["owner/bare"] = tmp_path
    online = head_hub(tmp_path / "hub", offline=False, endpoint=hub.endpoint)
    with pytest.raises(ModelNotFound, match=r"owner/bare on .* lacks weights \(medusa_lm_head"):
        find_head("owner/bare", online)
