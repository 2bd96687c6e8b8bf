"""A tiny model as a folder, as a GGUF file and on a hub."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.model.gguf_files import write_gguf
from tests.model.hub_server import HubStandIn, hub_server
from tests.tiny import save_tiny


@pytest.fixture(scope="module")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def tiny_gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_gguf(tmp_path_factory.mktemp("gguf") / "tiny.gguf")


@pytest.fixture
def hub(tiny_folder: Path) -> Iterator[HubStandIn]:
    with hub_server() as server:
        server.repositories["owner/tiny"] = tiny_folder
        yield server
