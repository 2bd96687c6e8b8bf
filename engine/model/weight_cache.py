"""Converted weights on disk: a folder appears there whole or not at all."""

import fcntl
import hashlib
import logging
import os
import secrets
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

logger = logging.getLogger(__name__)

FORMAT = 1
"""Raised when a conversion changes what it writes, so that older results are made anew."""

_PARTIAL = ".partial"


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
        processes that make the same folder at once the first one's stands. What a process that was killed
        has left there is removed.

        Args:
            key: Name of the folder.
            fill: Writes the files into the folder it is given.

        Raises:
            OSError: The folder cannot be written, or is full.
        """
        if (ready := self.get(key)) is not None:
            return ready
        self.folder.mkdir(parents=True, exist_ok=True)
        self._sweep()
        final = self.folder / key
        with self._scratch(key) as scratch:
            try:
                fill(scratch)
                scratch.rename(final)
            except OSError:
                if not final.is_dir():
                    raise
                logger.info("another process finished %s first; using its result", final)
        return final

    @contextmanager
    def _scratch(self, key: str) -> Iterator[Path]:
        """A folder for what is not complete yet, for whom the umask says, as all who share the cache read it.

        It is locked before it gets the name that `_sweep` looks for. Where the file system knows no locks it
        keeps its first name, and nobody removes it but its maker.
        """
        path = self.folder / f".{key}-{secrets.token_hex(4)}"
        path.mkdir()
        lock = _lock(path)
        try:
            if lock is not None:
                path = path.rename(path.with_name(path.name + _PARTIAL))
            yield path
        finally:
            shutil.rmtree(path, ignore_errors=True)
            if lock is not None:
                os.close(lock)

    def _sweep(self) -> None:
        """Removes what nobody is going to complete: the system takes the locks of dead processes back."""
        for path in self.folder.glob(f".*{_PARTIAL}"):
            try:
                lock = _lock(path)
            except OSError:  # Its maker was faster.
                continue
            if lock is not None:
                logger.info("removing %s, left by a process that was killed", path)
                shutil.rmtree(path, ignore_errors=True)
                os.close(lock)

    def drop(self, key: str) -> None:
        """Removes the folder of that key; a process that is reading it keeps the files it has open."""
        shutil.rmtree(self.folder / key)


def _lock(path: Path) -> int | None:
    """A descriptor that holds a folder's lock until it is closed, or None where it cannot be had."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        return None
    return descriptor


def content_key(stem: str, digest: str) -> str:
    """A key for a file whose digest is known."""
    return f"{stem}-{digest[:12]}-v{FORMAT}"


def file_key(path: Path) -> str:
    """A key for a local file: its place, size and time of change, since hashing gigabytes takes long."""
    real = path.resolve()
    status = real.stat()
    identity = f"{real}\n{status.st_size}\n{status.st_mtime_ns}"
    return content_key(path.stem, hashlib.sha256(identity.encode()).hexdigest())
