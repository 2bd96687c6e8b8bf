"""Which threads work on a step: the C++ operators' own, or those of torch."""

from types import TracebackType

import torch

from engine.model.cpu_ops.build import CpuOperators


class OperatorThreads:
    """While entered, what torch itself computes stays in this thread; the operators have all its threads.

    Where nearly all of a step is the operators' work, torch's own workers save nothing: what is left for them
    is small. But each of torch's parallel regions ends when its last thread has come: that takes a time slice
    of the system when another process has that thread's core; the operators' threads wait for nobody
    (cpu_ops/team.h).

    Args:
        operators: Whose threads; None leaves all as it is.
    """

    def __init__(self, operators: CpuOperators | None) -> None:
        self._operators = operators
        self._count = 0

    @classmethod
    def for_weights(cls, weights: str, operators: CpuOperators | None) -> "OperatorThreads":
        """Those for a model with linear layers of this type: those of integers are the operators' own."""
        return cls(operators if weights in ("int8", "int6", "int5", "int4") else None)

    def __enter__(self) -> None:
        if self._operators is not None:
            self._count = torch.get_num_threads()
            self._operators.use_threads(self._count)
            torch.set_num_threads(1)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._operators is not None:
            torch.set_num_threads(self._count)
            self._operators.use_threads(0)
