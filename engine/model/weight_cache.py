"""Converted weights on disk: a folder appears there whole or not at all."""

import hashlib
import logging
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

logger = logging.getLogger(__name__)

FORMAT = 1
"""Raised when a conversion changes what it writes, so that older results are made anew."""


class WeightCache:
    """Folders with converted weights, each under a key that says what it was made from.

    Args:
        folder: Where they are kept; made when the first one is written.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def get(self, key: str) -> Path | None:
        """The folder of that key, if it has been made."""
        path = self.folder / key
        return path if path.is_dir() else None

    def put(self, key: str, fill: Callable[[Path], None]) -> Path:
        """Makes the folder of that key, or returns the one there is.

        `fill` writes into a folder beside the final one, which is renamed when it is complete. Of two
        processes that make the same folder at once the first one's stands.

        Args:
            key: Name of the folder.
            fill: Writes the files into the folder it is given.

        Raises:
            OSError: The folder cannot be written, or is full.
        """
        if (ready := self.get(key)) is not None:
            return ready
        self.folder.mkdir(parents=True, exist_ok=True)
        scratch = Path(tempfile.mkdtemp(prefix=f".{key}-", dir=self.folder))
        final = self.folder / key
        try:
            fill(scratch)
            scratch.rename(final)
        except OSError:
            if not final.is_dir():
                raise
            logger.info("another process finished %s first; using its result", final)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
        return final

    def drop(self, key: str) -> None:
        """Removes the folder of that key; a process that is reading it keeps the files it has open."""
        shutil.rmtree(self.folder / key)


def content_key(stem: str, digest: str) -> str:
    """A key for a file whose digest is known."""
    return f"{stem}-{digest[:12]}-v{FORMAT}"


def file_key(path: Path) -> str:
    """A key for a local file: its place, size and time of change, since hashing gigabytes takes long."""
    real = path.resolve()
    status = real.stat()
    identity = f"{real}\n{status.st_size}\n{status.st_mtime_ns}"
    return content_key(path.stem, hashlib.sha256(identity.encode()).hexdigest())
