"""Models from the Hugging Face hub: its local cache first, then the network."""

import logging
from collections.abc import Sequence
from pathlib import Path

import httpx
import huggingface_hub
from huggingface_hub import constants, hf_hub_download, snapshot_download
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.utils import validate_repo_id

from engine.errors import ModelNotFound, StartupError
from engine.model.folder import MODEL_WEIGHTS, missing_weights

logger = logging.getLogger(__name__)

_DESCRIPTION = ["*.json", "*.jinja", "*.model", "*.txt", "*.py"]
_ELSEWHERE = ["*/*.json", "*/*.txt", "*/*.model", "*/*.safetensors", "*/*.bin", "consolidated*"]
_PROBE_SECONDS = 5.0


def is_hub_id(name: str) -> bool:
    """Whether a name can be a repository's."""
    try:
        validate_repo_id(name)
    except HFValidationError:
        return False
    return True


class Hub:
    """The model hub and its cache on this machine.

    Args:
        cache_dir: The hub's cache; None takes the one that all tools of the hub share.
        offline: Never touch the network. HF_HUB_OFFLINE has the same effect.
        endpoint: Address of the hub; None takes HF_ENDPOINT or the public one.
        weights: Files that a repository's weights may be in, the best kind first.
    """

    def __init__(
        self,
        cache_dir: Path | None = None,
        *,
        offline: bool = False,
        endpoint: str | None = None,
        weights: Sequence[str] = MODEL_WEIGHTS,
    ) -> None:
        self.cache_dir = cache_dir or Path(constants.HF_HUB_CACHE)
        self.endpoint = (endpoint or constants.ENDPOINT).rstrip("/")
        self.offline = offline or constants.HF_HUB_OFFLINE
        self._weights = weights
        self._kinds = tuple(dict.fromkeys(f"*{Path(name).suffix}" for name in weights))

    def cached(self, repository: str, revision: str | None = None) -> Path | None:
        """The folder of a repository that is complete in the cache."""
        for kind in self._kinds:
            folder = self._snapshot(repository, revision, kind, local=True)
            if folder is not None and not missing_weights(folder, self._weights):
                return folder
        return None

    def download(self, repository: str, revision: str | None = None) -> Path:
        """Fetches config, tokenizer and weights of a repository.

        Raises:
            ModelNotFound: The hub cannot be reached or has no such model.
        """
        self._check_reachable(repository)
        logger.info("downloading %s from %s", repository, self.endpoint)
        missing = ["its files"]
        for kind in self._kinds:
            if kind != self._kinds[0]:
                logger.info("%s has no safetensors weights; taking %s files instead", repository, kind[1:])
            folder = self._snapshot(repository, revision, kind, local=False)
            if folder is not None and not (missing := missing_weights(folder, self._weights)):
                return folder
        raise ModelNotFound(
            f"{repository} on {self.endpoint} lacks {', '.join(missing)}. For a GGUF repository name the "
            "file: owner/name/file.gguf"
        )

    def file(self, repository: str, filename: str, revision: str | None = None) -> Path:
        """One file of a repository, from the cache or the network.

        Raises:
            ModelNotFound: The hub cannot be reached or has no such file.
        """
        found = huggingface_hub.try_to_load_from_cache(
            repository, filename, cache_dir=self.cache_dir, revision=revision
        )
        if isinstance(found, str):
            return Path(found)
        self._check_reachable(f"{repository}/{filename}")
        logger.info("downloading %s/%s from %s", repository, filename, self.endpoint)
        try:
            return Path(
                hf_hub_download(
                    repository,
                    filename,
                    revision=revision,
                    cache_dir=self.cache_dir,
                    endpoint=self.endpoint,
                )
            )
        except (HfHubHTTPError, LocalEntryNotFoundError) as error:
            raise ModelNotFound(self._reason(f"{repository}/{filename}", revision, error)) from error
        except OSError as error:
            raise self._unusable(error) from error

    def _snapshot(self, repository: str, revision: str | None, weights: str, *, local: bool) -> Path | None:
        patterns: Sequence[str] = [*_DESCRIPTION, weights, f"{weights}.index.json"]
        try:
            return Path(
                snapshot_download(
                    repository,
                    revision=revision,
                    cache_dir=self.cache_dir,
                    endpoint=self.endpoint,
                    allow_patterns=patterns,
                    ignore_patterns=_ELSEWHERE,
                    local_files_only=local,
                )
            )
        except LocalEntryNotFoundError as error:
            if local:
                return None
            raise ModelNotFound(self._reason(repository, revision, error)) from error
        except HfHubHTTPError as error:
            raise ModelNotFound(self._reason(repository, revision, error)) from error
        except OSError as error:
            raise self._unusable(error) from error

    def _check_reachable(self, what: str) -> None:
        """Asks whether anything answers at the hub's address, so that its absence costs seconds at most."""
        if self.offline:
            raise ModelNotFound(
                f"{what} is not complete in the hub's cache {self.cache_dir}, and offline mode forbids a "
                "download"
            )
        try:
            httpx.head(self.endpoint, timeout=_PROBE_SECONDS)
        except httpx.TransportError as error:
            raise ModelNotFound(
                f"the model hub {self.endpoint} cannot be reached ({type(error).__name__}: {error})"
            ) from error

    def _unusable(self, error: OSError) -> StartupError:
        return StartupError(
            f"the hub's cache {self.cache_dir} cannot be used: {error}; make room there, or set cache_dir to "
            "another folder"
        )

    def _reason(self, what: str, revision: str | None, error: Exception) -> str:
        at = f" at revision {revision!r}" if revision else ""
        match error:
            case GatedRepoError():
                return f"{what} is gated: accept its terms on {self.endpoint} and log in (HF_TOKEN)"
            case RepositoryNotFoundError():
                return (
                    f"{self.endpoint} has no model {what}, or a private one: check the name or set HF_TOKEN"
                )
            case RevisionNotFoundError():
                return f"{what} on {self.endpoint} has no revision {revision!r}"
        return f"{what}{at} could not be downloaded from {self.endpoint}: {error}"
