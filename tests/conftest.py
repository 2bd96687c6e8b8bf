"""Settings for the whole suite."""

import gc
import os
import shutil
import tempfile
from pathlib import Path

import pytest

# Before torch is imported, and for the servers that tests start: tiny models gain nothing from threads,
# and tests that run side by side lose a lot to them.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Before Triton is imported: its kernels are interpreted here, on any machine. Compiled ones are the business
# of tests/gpu/check.py.
os.environ["TRITON_INTERPRET"] = "1"

CACHE_VARIABLE = "OUTRIDER_CACHE_DIR"


def pytest_configure(config: pytest.Config) -> None:
    """Gives the servers that tests start a cache for this run, in which no tiny model outlives it.

    The operators are the machine's own, since they take a minute to build. Workers of a parallel run find the
    variable set; a test that wants the real cache starts its server with an empty one.
    """
    if CACHE_VARIABLE in os.environ:
        return
    operators = Path.home() / ".cache" / "outrider" / "operators"
    operators.mkdir(parents=True, exist_ok=True)
    cache = Path(tempfile.mkdtemp(prefix="outrider-tests-"))
    (cache / "operators").symlink_to(operators)
    os.environ[CACHE_VARIABLE] = str(cache)

    def clean() -> None:
        del os.environ[CACHE_VARIABLE]
        shutil.rmtree(cache)

    config.add_cleanup(clean)


def pytest_collection_finish() -> None:
    """Keeps what is imported by now out of all later collections of garbage.

    A load of a model collects several times, which takes a fifth of a second each with torch, transformers
    and thousands of tests in memory, and next to nothing without them.
    """
    gc.collect()
    gc.freeze()
