"""`outrider verify`: from a plan to its report."""

import json
import os
import sys
from collections.abc import Mapping
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path

from engine.config import EngineConfig
from server import __version__
from server.bench.client import api_root
from server.config import ConfigError
from server.log_setup import configure_logging
from server.verify.over_http import HttpSubject, connect, first_model
from server.verify.plan import Plan
from server.verify.report import as_text
from server.verify.results import Outcome
from server.verify.running import verify_all

_FAULT = 1


def verify(plan: Plan, configs: Mapping[str, EngineConfig]) -> int:
    """Runs a verification and reports it.

    Args:
        plan: What to do.
        configs: Settings of the engines to be built, by method; unused where the plan names a server.

    Returns:
        The exit status: 1 if there is a fault.

    Raises:
        ConfigError: The file cannot be written.
        StartupError: There is nothing to verify.
    """
    _check_writable(plan.json)
    outcome = _over_http(plan, plan.url) if plan.url else _in_process(plan, configs)
    sys.stdout.write(as_text(outcome))
    sys.stdout.flush()
    if plan.json is not None:
        found = {
            "outrider": __version__,
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "num_faults": outcome.num_faults,
            "plan": asdict(plan),
            **asdict(outcome),
        }
        plan.json.write_text(json.dumps(found, indent=1, default=str) + "\n", "utf-8")
    return _FAULT if outcome.num_faults else 0


def _over_http(plan: Plan, url: str) -> Outcome:
    with connect(api_root(url), plan.timeout) as http:
        model = plan.api_model or first_model(http)
        subject = HttpSubject(http, model, plan.endpoint, plan.concurrency)
        return verify_all([subject], plan, f"{model} at {url}")


def _in_process(plan: Plan, configs: Mapping[str, EngineConfig]) -> Outcome:
    from server.verify.in_process import engine_subjects  # it loads torch, which a server elsewhere spares

    configure_logging("warning")
    first = next(iter(configs.values()))
    if not plan.quiet:
        sys.stderr.write(f"loading {first.model.model}\n")
    return verify_all(engine_subjects(configs), plan, f"{first.model.model} with {', '.join(configs)}")


def _check_writable(path: Path | None) -> None:
    """Said before the work, not after."""
    if path is not None and not (os.access(path.parent, os.W_OK) and not path.is_dir()):
        raise ConfigError(f"cannot write {path}: its folder does not exist or cannot be written to")
