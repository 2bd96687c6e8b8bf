"""`outrider train-head`: from a plan to a head."""

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from engine.config import ModelConfig
from server.log_setup import configure_logging
from server.training.plan import Plan

_INTERRUPTED = 130


class _Stop:
    """Whether somebody wants the training to leave off."""

    def __init__(self) -> None:
        self.is_wanted = False

    def __call__(self) -> bool:
        return self.is_wanted


def train(plan: Plan, model: ModelConfig, command: str) -> int:
    """Trains a head.

    Args:
        plan: What to do.
        model: The target.
        command: The command line, for the model card.

    Returns:
        The exit status: 0, or 130 after Ctrl-C.

    Raises:
        StartupError: Something that is needed is missing, damaged or too little.
    """
    from server.training.in_process import run_training  # it loads torch, which flags are read without

    configure_logging("warning" if plan.quiet else "info")
    with _interruptible() as stop:
        is_done = run_training(plan, model, command, stop)
    if not is_done:
        sys.stderr.write("stopped; the same command goes on from here\n")
        return _INTERRUPTED
    sys.stdout.write(f"{plan.out}\n")
    return 0


@contextmanager
def _interruptible() -> Iterator[_Stop]:
    """The first Ctrl-C, or SIGTERM, asks for an end between two steps; the second ends at once."""
    stop = _Stop()

    def on_signal(_: int, __: FrameType | None) -> None:
        if stop.is_wanted:
            raise KeyboardInterrupt
        stop.is_wanted = True
        sys.stderr.write("\nstopping after this step; once more to stop at once\n")

    former = {number: signal.signal(number, on_signal) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stop
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)
