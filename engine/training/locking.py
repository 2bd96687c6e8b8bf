"""Locks on folders of training, so that two runs do not write the same files."""

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from engine.errors import StartupError


@contextmanager
def locked(path: Path, what: str) -> Iterator[None]:
    """Holds a lock, which ends with the process at the latest.

    Args:
        path: Its file.
        what: What it is on, for the message.

    Raises:
        StartupError: Another run holds it.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise StartupError(
                f"another run is busy with {what} in {path.parent}: wait for it, or give another --work"
            ) from error
        yield
