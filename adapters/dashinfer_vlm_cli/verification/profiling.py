"""How long the device is idle while sequences are decoded, from torch.profiler."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import torch
from torch.autograd import DeviceType  # type: ignore[attr-defined]  # public, not exported explicitly
from torch.profiler import ProfilerActivity, profile


class KernelShare(NamedTuple):
    """The kernels of one name, and their share of the time of all kernels."""

    name: str
    share: float


@dataclass(kw_only=True)
class DeviceProfile:
    """What the device did while it was recorded; complete after the recording.

    Attributes:
        busy: (start, end) of each kernel and copy on the device, in microseconds.
        seconds: the time of all kernels and copies of the same name.
    """

    busy: list[tuple[float, float]] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)

    @property
    def idle_share(self) -> float | None:
        """The share of the time between the first start and the last end in which nothing ran; None without events."""
        return idle_share(self.busy)

    def longest(self, count: int) -> tuple[KernelShare, ...]:
        """Return the kernels that took most of the time, and their shares of the time of all."""
        total = sum(self.seconds.values())
        longest = sorted(self.seconds.items(), key=lambda item: -item[1])[:count]
        return tuple(KernelShare(name, seconds / total) for name, seconds in longest)


def idle_share(busy: Iterable[tuple[float, float]]) -> float | None:
    """Return the share of the time from the first start to the last end that no interval covers; None if there are
    none, or if they have no length."""
    intervals = sorted(busy)
    if not intervals:
        return None
    start = end = intervals[0][0]
    covered = 0.0
    for first, last in intervals:
        covered += max(0.0, last - max(first, end))
        end = max(end, last)
    return 1.0 - covered / (end - start) if end > start else None


@contextmanager
def record(device: str, trace: Path | None = None) -> Iterator[DeviceProfile]:
    """Record the kernels of a CUDA device. On a CPU, host and device are the same, and nothing is recorded.

    Args:
        device: as torch names it.
        trace: a new file for the trace, which chrome://tracing and ui.perfetto.dev display; None writes none.
    """
    result = DeviceProfile()
    if torch.device(device).type != "cuda":
        yield result
        return
    host = [ProfilerActivity.CPU] if trace else []  # recording the host slows it down
    with profile(activities=[*host, ProfilerActivity.CUDA]) as profiler:
        yield result
        torch.cuda.synchronize(device)
    for event in profiler.events() or ():
        if event.device_type == DeviceType.CUDA and not getattr(event, "is_user_annotation", False):
            start, end = event.time_range.start, event.time_range.end
            result.busy.append((start, end))
            result.seconds[event.name] = result.seconds.get(event.name, 0.0) + (end - start) / 1e6
    if trace:
        profiler.export_chrome_trace(str(trace))
