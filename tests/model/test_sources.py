import errno
import logging
import os
import resource
import shutil
import stat
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from engine.errors import ModelNotFound, StartupError
from engine.model.weight_cache import WeightCache, file_key
from tests.model.hub_server import COMMIT, HubStandIn
from tests.model.source_fakes import sources

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


def test_a_cache_folder_that_cannot_be_made_is_named(tiny_gguf: Path, tmp_path: Path) -> None:
    (tmp_path / "converted").write_text("a file where the folder would be")
    with pytest.raises(StartupError, match=r"cannot be written to .*converted: File exists; .*cache_dir"):
        sources(tmp_path, offline=True).find(str(tiny_gguf))


def test_a_cache_folder_that_cannot_be_read_is_named(
    tiny_gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def denied(path: Path) -> bool:
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    found = sources(tmp_path, offline=True)
    monkeypatch.setattr("engine.model.weight_cache.Path.is_dir", denied)
    with pytest.raises(StartupError, match=r"looked for in .*converted: Permission denied; set cache_dir"):
        found._from_gguf(tiny_gguf)


def test_a_disk_that_is_full_is_said(tiny_gguf: Path, tmp_path: Path) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    # No file may be larger, and writing on is an error, as it is where there is no room.
    resource.setrlimit(resource.RLIMIT_FSIZE, (tiny_gguf.stat().st_size // 4, before[1]))
    try:
        with pytest.raises(StartupError, match=r"cannot be written to .*converted: .*make room for them"):
            sources(tmp_path, offline=True).find(str(tiny_gguf))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert list((tmp_path / "converted").iterdir()) == []


def test_the_umask_says_who_may_read_what_was_converted(tmp_path: Path) -> None:
    """As in an image, where one user writes and another reads."""
    for umask, mode in ((0o022, 0o755), (0o027, 0o750), (0o077, 0o700)):
        before = os.umask(umask)
        try:
            made = WeightCache(tmp_path).put(f"{umask:o}", lambda _: None)
        finally:
            os.umask(before)
        assert stat.S_IMODE(made.stat().st_mode) == mode


def test_what_a_killed_process_left_is_removed(tmp_path: Path) -> None:
    killed = (
        "import os, sys, pathlib; from engine.model.weight_cache import WeightCache; "
        "WeightCache(pathlib.Path(sys.argv[1])).put('killed', lambda folder: os._exit(9))"
    )
    assert subprocess.run([sys.executable, "-c", killed, tmp_path], check=False).returncode == 9
    (left,) = tmp_path.iterdir()

    def fill(folder: Path) -> None:
        # A folder that is still being filled stays.
        WeightCache(tmp_path).put("meanwhile", lambda _: None)
        (folder / "a").touch()

    WeightCache(tmp_path).put("slow", fill)
    assert not left.exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["meanwhile", "slow"]
    assert (tmp_path / "slow" / "a").is_file()


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


def test_a_cache_of_the_hub_that_cannot_be_written_is_named(hub: HubStandIn, tmp_path: Path) -> None:
    (tmp_path / "hub").write_text("a file where the folder would be")
    found = sources(tmp_path, endpoint=hub.endpoint)
    for name in ("owner/tiny", "owner/tiny/model.gguf"):
        with pytest.raises(StartupError, match=r"the hub's cache .*hub cannot be used: .*set cache_dir to"):
            found.find(name)


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
