"""The log: one format, and no line for a probe that went well."""

import logging
import subprocess
import sys

import pytest

from server.log_setup import ProbeFilter

SCRIPT = """
import logging, sys
from server.log_setup import configure_logging
logging.getLogger("engine.made.before")
configure_logging(sys.argv[1])
for name in ("engine.made.before", "server.x", "uvicorn.error", "uvicorn.access", "httpx"):
    for level in (logging.DEBUG, logging.INFO, logging.WARNING, logging.ERROR):
        logging.getLogger(name).log(level, "%s says %s", name, logging.getLevelName(level))
"""


def lines(level: str) -> list[str]:
    command = [sys.executable, "-c", SCRIPT, level]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout == ""
    # Behind the date and the time.
    return [line.split(" ", 2)[2] for line in done.stderr.splitlines()]


def test_info_shows_ours_and_the_access_log_and_only_warnings_of_libraries() -> None:
    shown = lines("info")
    assert "INFO    engine.made.before: engine.made.before says INFO" in shown
    assert "INFO    uvicorn.access: uvicorn.access says INFO" in shown
    assert "WARNING httpx: httpx says WARNING" in shown
    assert len(shown) == 3 * 3 + 2 * 2


def test_debug_shows_all_and_error_only_errors() -> None:
    assert len(lines("debug")) == 5 * 4
    shown = lines("error")
    assert len(shown) == 5
    assert all(line.startswith("ERROR ") for line in shown)


@pytest.mark.parametrize(
    ("path", "status", "is_shown"),
    [
        ("/health", 200, False),
        ("/llm/ready", 200, False),
        ("/metrics?x=1", 200, False),
        ("/ready", 503, True),
        ("/v1/completions", 200, True),
        ("/v1/models?x=/health", 200, True),
    ],
)
def test_probes_that_went_well_are_left_out_of_the_access_log(path: str, status: int, is_shown: bool) -> None:
    args = ("127.0.0.1:5", "GET", path, "1.1", status)
    record = logging.LogRecord("uvicorn.access", logging.INFO, "", 0, '%s - "%s %s HTTP/%s" %d', args, None)
    assert ProbeFilter().filter(record) is is_shown
