"""CUDA graphs: work that is recorded once, and then launched as a whole.

Launching hundreds of small kernels one by one takes longer than running them. A graph launches all of them at once, but
always with the same shapes and the same addresses. Recorded work therefore reads fixed inputs, into which new values
are copied, and must not copy from the host itself.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeAlias

import torch
from torch import Tensor

_RECORDING = threading.Lock()
"""torch records one graph at a time in a process, in which several engines may run."""

Recorder: TypeAlias = Callable[[Callable[[], Tensor]], Callable[[], Tensor]]
"""Records work on fixed inputs, which must exist as long as the recording. Returns a function that repeats the work and
returns its result, which is valid until any work of the same recorder is repeated."""


class CudaGraphRecorder:
    """A `Recorder` of CUDA graphs, on the current stream. The graphs share memory."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, work: Callable[[], Tensor]) -> Callable[[], Tensor]:
        work()  # libraries allocate their workspaces in the first call, which must not be part of a graph
        graph = torch.cuda.CUDAGraph()
        stream = torch.cuda.current_stream()
        # In the mode `global`, calls of a thread that loads a model or runs another part of it would be errors.
        with _RECORDING, torch.cuda.graph(graph, pool=self._pool, stream=stream, capture_error_mode="thread_local"):
            result = work()

        def replay() -> Tensor:
            graph.replay()
            return result

        return replay
