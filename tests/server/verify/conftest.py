"""The command sets up logging for the whole process; a test of it gives it back as it was."""

import logging
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def _own_logging() -> Iterator[None]:
    root = logging.getLogger()
    loggers = [root, *(logging.getLogger(name) for name in ("engine", "server", "uvicorn", "uvicorn.access"))]
    before = [
        (each, each.level, each.handlers[:], each.filters[:], each.propagate, each.disabled)
        for each in loggers
    ]
    yield
    for logger, level, handlers, filters, propagate, disabled in before:
        logger.setLevel(level)
        logger.handlers[:], logger.filters[:] = handlers, filters
        logger.propagate, logger.disabled = propagate, disabled
