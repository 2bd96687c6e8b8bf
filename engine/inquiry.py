"""PlannerInquiry: a question to the engine's thread, which alone may look at the planner's books."""

import threading
from collections.abc import Callable
from concurrent.futures import Future

from engine.errors import EngineError
from engine.planning import PlannerReport


class PlannerInquiry:
    """Waits for the planner's table. Any thread may answer; the first one does.

    Attributes:
        answer: Where it arrives.
    """

    def __init__(self) -> None:
        self.answer: Future[PlannerReport] = Future()
        self._is_answered = threading.Lock()

    def settle(self, ask: Callable[[], PlannerReport]) -> None:
        """Answers with what `ask` returns or raises, if somebody still waits."""
        if not self._begin():
            return
        try:
            self.answer.set_result(ask())
        except EngineError as error:
            self.answer.set_exception(error)

    def refuse(self, error: EngineError) -> None:
        """Tells who waits that there will be no answer."""
        if self._begin():
            self.answer.set_exception(error)

    def _begin(self) -> bool:
        """Whether the caller is to answer: nobody else has, and somebody waits."""
        return self._is_answered.acquire(blocking=False) and self.answer.set_running_or_notify_cancel()
