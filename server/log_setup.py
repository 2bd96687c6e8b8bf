"""One log format for everything that runs in the process, uvicorn included."""

import asyncio
import logging
import logging.config
from typing import Any

QUIET_PATHS = ("/health", "/ready", "/metrics")


class ProbeFilter(logging.Filter):
    """Keeps probes and scrapes that went well out of the access log."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether a record of uvicorn's access log is worth a line.

        Its arguments are (client address, method, path with query, HTTP version, status).
        """
        match record.args:
            case (_, _, str(path), _, int(status)):
                return status >= 400 or not path.partition("?")[0].endswith(QUIET_PATHS)
        return True


class CancellationFilter(logging.Filter):
    """Keeps requests that were cut off at the server's end from showing as errors of the application."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether a record is anything but the traceback of a cancellation."""
        return record.exc_info is None or not isinstance(record.exc_info[1], asyncio.CancelledError)


def configure_logging(level: str) -> None:
    """Sends all logs to stderr in one format.

    Args:
        level: debug, info, warning or error. What libraries say below a warning is shown at debug only;
            so are successful probes in the access log.
    """
    threshold = level.upper()
    libraries = threshold if level in ("debug", "error") else "WARNING"
    access_filters = [] if level == "debug" else ["probes"]
    settings: dict[str, Any] = {
        "version": 1,
        "disable_existing_loggers": False,
        "formatters": {"line": {"format": "%(asctime)s %(levelname)-7s %(name)s: %(message)s"}},
        "filters": {"probes": {"()": ProbeFilter}, "cancellations": {"()": CancellationFilter}},
        "handlers": {"stderr": {"class": "logging.StreamHandler", "formatter": "line"}},
        "root": {"level": libraries, "handlers": ["stderr"]},
        "loggers": {
            "engine": {"level": threshold},
            "server": {"level": threshold},
            "uvicorn": {"level": libraries, "handlers": [], "propagate": True},
            "uvicorn.error": {"filters": ["cancellations"]},
            "uvicorn.access": {
                "level": threshold,
                "handlers": [],
                "propagate": True,
                "filters": access_filters,
            },
        },
    }
    logging.config.dictConfig(settings)
