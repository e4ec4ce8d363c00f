"""Random requests and random files: each succeeds or is rejected, in bounded time and memory.

`scripts/test` runs 2,600 cases, always the same ones. 86,000 others, different in each run, are run by

    scripts/test tests/fuzz --hypothesis-profile=nightly

and `--hypothesis-show-statistics` reports how many of them each property ran, with which outcomes. tests/conftest.py
defines both profiles: their `max_examples` is a share of 60 or 2,000 cases. The properties of requests and of random
damage use ten shares together, those of documents 13, and test_fuzz_structures.py, with a deadline per case, 20.
"""

from __future__ import annotations

import contextlib
import gc
import resource
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

WARM_UP = 40
SECONDS = 60.0
"""CPU time limit of one case, a thousand times the slowest one: it detects hanging cases."""
GROWTH = 50 * 1024 * 1024


class ResourceMonitor:
    """Measures the time of each case, and the growth of the process's memory after `WARM_UP` cases."""

    def __init__(self) -> None:
        self.cases = self.base = 0

    @contextlib.contextmanager
    def case(self) -> Iterator[None]:
        started = time.process_time()
        yield
        assert time.process_time() - started < SECONDS
        self.cases += 1
        if self.cases == WARM_UP:
            self.base = resident_bytes()

    def growth(self) -> int:
        """Return the growth since the warm-up in bytes."""
        return resident_bytes() - self.base if self.base else 0


@pytest.fixture
def monitor() -> Iterator[ResourceMonitor]:
    monitor = ResourceMonitor()
    yield monitor
    assert monitor.growth() < GROWTH


def resident_bytes() -> int:
    """Return this process's resident memory in bytes; where the system does not report them, the peak."""
    gc.collect()
    status = Path("/proc/self/statm")
    if status.exists():
        return int(status.read_text().split()[1]) * resource.getpagesize()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
