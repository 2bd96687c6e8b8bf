"""`outrider bench`: from a plan to its report."""

import asyncio
import json
import os
import platform
import sys
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from server import __version__
from server.bench.local import local_server
from server.bench.measuring import measure, trace
from server.bench.plan import Plan
from server.bench.plot import draw
from server.bench.report import as_text
from server.config import ConfigError

_FAILED = 1


def bench(plan: Plan, settings: Mapping[str, object], config: str | None) -> int:
    """Runs a benchmark and reports it.

    Args:
        plan: What to measure.
        settings: Settings of the server to be started, by flat name; unused where the plan names one.
        config: File with more of them.

    Returns:
        The exit status: 1 if a request failed.

    Raises:
        ConfigError: A file cannot be written.
        StartupError: There is no server to measure.
    """
    for path in (plan.json, plan.plot, plan.profile):
        _check_writable(path)
    settings = {} if plan.url else {"prefix_caching": False, **settings}
    if plan.profile is not None and not plan.url:
        settings["profiling"] = True
    own = nullcontext(plan.url) if plan.url else local_server(settings, config, _say)
    with own as url:
        outcome = asyncio.run(measure(plan, url))
        sys.stdout.write(as_text(outcome))
        sys.stdout.flush()
        if plan.profile is not None:
            plan.profile.write_bytes(asyncio.run(trace(plan, url)))
    if plan.json is not None:
        figures = {**_circumstances(plan, settings), **asdict(outcome)}
        plan.json.write_text(json.dumps(figures, indent=1, default=str) + "\n", "utf-8")
    if plan.plot is not None:
        plan.plot.write_bytes(draw(outcome))
    return _FAILED if outcome.num_failed else 0


def _check_writable(path: Path | None) -> None:
    """Said before the measuring, not after."""
    if path is not None and not (os.access(path.parent, os.W_OK) and not path.is_dir()):
        raise ConfigError(f"cannot write {path}: its folder does not exist or cannot be written to")


def _circumstances(plan: Plan, settings: Mapping[str, object]) -> dict[str, Any]:
    """What a reader of the figures has to know."""
    return {
        "outrider": __version__,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": {
            "platform": platform.platform(),
            "cpus": os.cpu_count(),
            "python": sys.version.split()[0],
        },
        "plan": asdict(plan),
        "settings": dict(settings),
    }


def _say(line: str) -> None:
    sys.stderr.write(f"{line}\n")
    sys.stderr.flush()
