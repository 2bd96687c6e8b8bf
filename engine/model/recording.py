"""Recording what a pass launches, to launch it again as one: CUDA graphs, or what stands for them."""

from collections.abc import Callable
from typing import Protocol

import torch

Results = tuple[torch.Tensor, ...]


class Recording(Protocol):
    """Something recorded."""

    def replay(self) -> Results:
        """Does it again, on what its tensors hold by now; its results are overwritten by the next replay."""


class Recorder(Protocol):
    """Records."""

    def record(self, call: Callable[[], Results]) -> Recording:
        """Records what a call launches. All it reads has to stay where it is; its Python runs this once.

        Raises:
            RuntimeError: It does something that cannot be recorded.
        """


class CudaRecorder:
    """Records CUDA graphs, which share their memory: they never run at the same time.

    Args:
        device: Of what is recorded.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()

    def record(self, call: Callable[[], Results]) -> Recording:
        """See Recorder."""
        graph = torch.cuda.CUDAGraph()
        # Other threads may use the device meanwhile; what they do is not forbidden.
        with (
            torch.cuda.device(self._device),
            torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"),
        ):
            results = call()
        return _CudaRecording(graph, results)


class _CudaRecording:
    def __init__(self, graph: torch.cuda.CUDAGraph, results: Results) -> None:
        self._graph = graph
        self._results = results

    def replay(self) -> Results:
        self._graph.replay()
        return self._results
