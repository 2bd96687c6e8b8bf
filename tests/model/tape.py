"""Stands in for CUDA graphs on a CPU: operators and kernels go on a tape, and are replayed without Python.

As in a graph, all that Python decided while recording stays as it was, every tensor stays where it is, and
memory that nobody writes keeps what the last replay left there.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from engine.model.recording import Recording, Results

_NO_KERNELS = SimpleNamespace(store=None, attend=None, combine=None)
_UNWRITTEN = {"empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided"}


class Tape(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """What was recorded."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.steps: list[Callable[[], object]] = []
        self.results: Results = ()
        self._is_paused = False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        name = func.overloadpacket.__name__
        assert name not in ("_local_scalar_dense", "nonzero"), f"a graph cannot wait for {name}"
        if self._is_paused or name in _UNWRITTEN:
            return out
        call = partial(func, *args, **kwargs)
        if func._schema.is_mutable:
            self.steps.append(call)
        elif not _storages(out) <= _storages((args, kwargs)):
            self.steps.append(partial(_redo, call, out))
        return out

    @contextmanager
    def paused(self) -> Iterator[None]:
        """While a kernel runs: what it does inside is one step."""
        self._is_paused = True
        yield
        self._is_paused = False

    def replay(self) -> Results:
        """See Recording."""
        for step in self.steps:
            step()
        return self.results


def _storages(tree: object) -> set[int]:
    return {leaf.untyped_storage().data_ptr() for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)}


def _redo(call: Callable[[], object], out: object) -> None:
    for old, new in zip(tree_leaves(out), tree_leaves(call()), strict=True):
        if isinstance(old, torch.Tensor):
            old.copy_(new)


class TapeRecorder:
    """A Recorder, and the kernels that it knows of.

    Args:
        kernels: Where the kernels are; a test has the backend launch them from here instead.
    """

    def __init__(self, kernels: Any = _NO_KERNELS) -> None:
        self.tapes: list[Tape] = []
        self.num_replays = 0
        self._active: Tape | None = None
        self._counter: Tape | None = None
        self.store = _TapedKernel(kernels.store, self)
        self.attend = _TapedKernel(kernels.attend, self)
        self.combine = _TapedKernel(kernels.combine, self)

    def record(self, call: Callable[[], Results]) -> Recording:
        """See Recorder."""
        tape = self._active = Tape()
        with tape:
            tape.results = call()
        self._active = None
        self.tapes.append(tape)
        return _Counted(tape, self)

    def launches_in(self, call: Callable[[], object]) -> int:
        """How many operators a call launches; a replay is one."""
        self._counter = Tape()
        with self._counter:
            call()
        counter, self._counter = self._counter, None
        return len(counter.steps)

    def replay(self, tape: Tape) -> Results:
        """Replays what was recorded."""
        self.num_replays += 1
        if self._counter is None:
            return tape.replay()
        self._counter.steps.append(tape.replay)
        with self._counter.paused():
            return tape.replay()

    def launch(self, run: Callable[[], object]) -> None:
        """Runs a kernel, and remembers it while recording."""
        if self._active is None:
            run()
            return
        with self._active.paused():
            run()
        self._active.steps.append(run)


class _Counted:
    def __init__(self, tape: Tape, recorder: TapeRecorder) -> None:
        self._tape = tape
        self._recorder = recorder

    def replay(self) -> Results:
        return self._recorder.replay(self._tape)


class _TapedKernel:
    def __init__(self, kernel: Any, recorder: TapeRecorder) -> None:
        self._kernel = kernel
        self._recorder = recorder

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        def launch(*args: Any, **kwargs: Any) -> None:
            self._recorder.launch(partial(self._kernel[grid], *args, **kwargs))

        return launch
