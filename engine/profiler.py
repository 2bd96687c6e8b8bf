"""Traces of steps, operator by operator, for chrome://tracing or ui.perfetto.dev."""

import tempfile
import threading
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from engine.errors import EngineError, InvalidRequest
from engine.step_timer import StepTimer


class StepTrace:
    """What happened in some steps.

    Args:
        recording: A recording that has ended.
    """

    def __init__(self, recording: profile) -> None:
        self._recording = recording

    def export(self) -> bytes:
        """The trace in Chrome's JSON format; any thread may ask, and it may take seconds."""
        with tempfile.TemporaryDirectory(prefix="outrider-trace-") as folder:
            path = Path(folder) / "trace.json"
            self._recording.export_chrome_trace(str(path))
            return path.read_bytes()


@dataclass(slots=True)
class _Wish:
    num_steps: int
    answer: Future[StepTrace]


class Tracer:
    """Traces an engine's steps when somebody asks. Costs nothing until then.

    Torch records threads, not processes, so that all but `ask` is for the thread that steps.

    Args:
        timer: Its parts become the regions of the trace.
    """

    def __init__(self, timer: StepTimer) -> None:
        self._timer = timer
        self._lock = threading.Lock()
        self._wish: _Wish | None = None
        self._recording: profile | None = None

    def ask(self, num_steps: int) -> Future[StepTrace]:
        """Asks for a trace of the next steps, from any thread.

        Raises:
            InvalidRequest: Another one is being made.
        """
        with self._lock:
            if self._wish is not None:
                raise InvalidRequest("a trace is being made already; ask again when it is done")
            self._wish = _Wish(num_steps, Future())
            return self._wish.answer

    def before_step(self) -> None:
        """Begins what was asked for."""
        if self._wish is None or self._recording is not None:
            return
        if not self._wish.answer.set_running_or_notify_cancel():
            self._wish = None
            return
        activities = [ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(ProfilerActivity.CUDA)
        self._recording = profile(activities=activities)
        self._recording.start()
        self._timer.mark_regions(record_function)

    def after_step(self) -> None:
        """Counts a step; hands the trace over after the last one."""
        if self._wish is None or self._recording is None:
            return
        self._wish.num_steps -= 1
        if self._wish.num_steps == 0:
            wish, trace = self._wish, StepTrace(self._stop())
            self._wish = None
            wish.answer.set_result(trace)

    def fail(self, error: EngineError) -> None:
        """Tells who waits that there will be no more steps."""
        wish, self._wish = self._wish, None
        if self._recording is not None:
            self._stop()
        if wish is not None and not wish.answer.cancelled():
            wish.answer.set_exception(error)

    def _stop(self) -> profile:
        assert self._recording is not None
        recording, self._recording = self._recording, None
        self._timer.mark_regions(None)
        recording.stop()
        return recording
