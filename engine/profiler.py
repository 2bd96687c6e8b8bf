"""Traces of steps, operator by operator, for chrome://tracing or ui.perfetto.dev."""

import tempfile
import threading
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
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


@dataclass(slots=True, eq=False)
class _Wish:
    num_steps: int
    answer: Future[StepTrace]


class Tracer:
    """Traces an engine's steps when somebody asks. Costs nothing until then.

    Torch records threads, not processes, so that all but `ask` and `give_up` is for the thread that steps.

    Args:
        timer: Its parts become the regions of the trace.
    """

    def __init__(self, timer: StepTimer) -> None:
        self._timer = timer
        # Taken to begin a wish and to take it away: who takes it away answers it, and nobody else.
        self._lock = threading.Lock()
        self._wish: _Wish | None = None
        self._recording: profile | None = None
        self._recorded: _Wish | None = None

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

    def give_up(self, error: EngineError) -> None:
        """Tells who waits, from any thread, that there will be no trace; a recording is dropped later."""
        wish = self._wish
        if wish is not None and self._take(wish):
            with suppress(InvalidStateError):  # Who asked may have left meanwhile.
                wish.answer.set_exception(error)

    def before_step(self) -> None:
        """Begins what was asked for."""
        if self._wish is not self._recorded:
            self.drop()
            self._begin()

    def after_step(self) -> None:
        """Counts a step; hands the trace over after the last one."""
        wish = self._recorded
        if wish is None:
            return
        wish.num_steps -= 1
        if wish.num_steps == 0:
            trace = StepTrace(self._stop())
            if self._take(wish):
                wish.answer.set_result(trace)

    def drop(self) -> None:
        """Ends a recording that nobody waits for, if there is one."""
        if self._recording is not None:
            self._stop()

    def _take(self, wish: _Wish) -> bool:
        """Takes a wish away; whether it was still there."""
        with self._lock:
            is_there = self._wish is wish
            if is_there:
                self._wish = None
            return is_there

    def _begin(self) -> None:
        """Records for the wish that there is, if who made it still waits."""
        with self._lock:
            if self._wish is None:
                return
            if not self._wish.answer.set_running_or_notify_cancel():
                self._wish = None
                return
            self._recorded = self._wish
        activities = [ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(ProfilerActivity.CUDA)
        self._recording = profile(activities=activities)
        self._recording.start()
        self._timer.mark_regions(record_function)

    def _stop(self) -> profile:
        assert self._recording is not None
        recording, self._recording, self._recorded = self._recording, None, None
        self._timer.mark_regions(None)
        recording.stop()
        return recording
