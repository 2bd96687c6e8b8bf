"""PlannerInquiry: a question to the engine's thread, which alone may look at the planner's books."""

from collections.abc import Callable
from concurrent.futures import Future

from engine.errors import EngineError
from engine.planning import PlannerReport


class PlannerInquiry:
    """Waits for the planner's table.

    Attributes:
        answer: Where it arrives.
    """

    def __init__(self) -> None:
        self.answer: Future[PlannerReport] = Future()

    def settle(self, ask: Callable[[], PlannerReport]) -> None:
        """Answers with what `ask` returns or raises, if somebody still waits."""
        if not self.answer.set_running_or_notify_cancel():
            return
        try:
            self.answer.set_result(ask())
        except EngineError as error:
            self.answer.set_exception(error)

    def fail(self, error: EngineError) -> None:
        """Tells who waits that there will be no answer."""
        if self.answer.set_running_or_notify_cancel():
            self.answer.set_exception(error)
