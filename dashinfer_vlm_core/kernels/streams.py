"""CUDA streams for the parts of a model, and copies to a device that do not wait for it.

The vision encoder and the decoder run on a GPU at the same time, each on its own stream. Kernels on a stream of higher
priority are started first, so that a decode step waits for the blocks of kernels that are running, not for the whole
encoder pass.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor

from ..concurrency.compute import Executor, executor_for

T = TypeVar("T")

HIGH_PRIORITY = -1
LOW_PRIORITY = 0
"""Priorities as CUDA numbers them: the decoder's, whose steps are short, and the vision encoder's."""


class FairLock:
    """A reentrant lock, first come, first served.

    With `threading.RLock`, a thread that releases the lock and acquires it again at once can keep it from all others.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self.waiting: deque[object] = deque()
        self._owner: int | None = None
        self._depth = 0

    def __enter__(self) -> None:
        me = threading.get_ident()
        ticket = object()
        with self._changed:
            if self._owner != me:
                self.waiting.append(ticket)
                self._changed.wait_for(lambda: self._owner is None and self.waiting[0] is ticket)
                self.waiting.popleft()
                self._owner = me
            self._depth += 1

    def __exit__(self, *exc_info: object) -> None:
        with self._changed:
            self._depth -= 1
            if not self._depth:
                self._owner = None
                self._changed.notify_all()


class StreamExecutor(Executor):
    """Runs work on a CUDA stream, in the calling thread.

    The device has finished when `run` returns. Results can therefore be used on any stream, tensors that the work has
    read can be freed, and times that callers measure include the device's. Work of several threads runs one after the
    other, in the order of submission: a CUDA graph that one thread captures must not record the work of another.

    Args:
        device: torch's name of a CUDA device.
        priority: `HIGH_PRIORITY` or `LOW_PRIORITY`.
    """

    def __init__(self, device: str, *, priority: int) -> None:
        self._stream = torch.cuda.Stream(torch.device(device), priority=priority)  # type: ignore[no-untyped-call]
        self._lock = FairLock()

    @property
    def waiting(self) -> int:
        return len(self._lock.waiting)

    def run(self, work: Callable[[], T]) -> T:
        with self._lock:
            # Other threads load weights and convert embeddings on the default stream.
            self._stream.wait_stream(torch.cuda.default_stream(self._stream.device))
            try:
                with torch.cuda.stream(self._stream):
                    return work()
            finally:
                self._stream.synchronize()


def stream_executor(device: str, *, priority: int) -> Executor:
    """Return an executor for a part of a model: with its own stream on CUDA, as `executor_for` on other devices."""
    if torch.device(device).type == "cuda":
        return StreamExecutor(device, priority=priority)
    return executor_for(device)


def to_device(tensor: Tensor, device: torch.device | str) -> Tensor:
    """Copy a tensor from the CPU to a device, on the current stream; one that is there already is returned itself.

    CUDA copies from page-locked memory while the caller continues. From other memory, the caller would wait until the
    device has finished everything before the copy.
    """
    if tensor.device == device:
        return tensor
    return _page_locked(tensor, device).to(device, non_blocking=True)


def copy_to_device(tensor: Tensor, into: Tensor) -> None:
    """Copy a tensor from the CPU into one on a device, as `to_device` does."""
    into.copy_(_page_locked(tensor, into.device), non_blocking=True)


class HostCopy:
    """A copy of a tensor on the CPU, which CUDA makes while the caller continues.

    Args:
        tensor: a tensor on any device. One on a CPU is not copied.
    """

    def __init__(self, tensor: Tensor) -> None:
        self._copied = tensor.to("cpu", non_blocking=tensor.is_cuda)
        self._finished: torch.cuda.Event | None = None
        if tensor.is_cuda:
            self._finished = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._finished.record(torch.cuda.current_stream(tensor.device))

    def wait(self) -> Tensor:
        """Return the copy, once everything before it on its stream has been computed."""
        if self._finished:
            self._finished.synchronize()
        return self._copied


def _page_locked(tensor: Tensor, device: torch.device | str) -> Tensor:
    """Return a tensor that `device` can copy while the caller continues; torch reuses its memory after the copy."""
    is_copied = torch.device(device).type == "cuda" and tensor.device.type == "cpu"
    return tensor.pin_memory() if is_copied else tensor
