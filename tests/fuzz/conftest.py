"""Random requests and random files: each is answered or refused, in bounded time and memory, and nothing else happens.

`scripts/test` runs 1,000 cases, always the same ones. 20,000 others, different each time, are run by

    scripts/test tests/fuzz --hypothesis-profile=nightly

and `--hypothesis-show-statistics` tells how many of them each property saw. Both profiles stand in tests/conftest.py:
their `max_examples` is a tenth of all cases, and each property here takes one or more of the ten shares.
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
"""Of the processor, for one case: a thousand times what the slowest one takes. It ends what would hang."""
GROWTH = 50 * 1024 * 1024


class Watch:
    """Clocks each case, and follows the memory of the process from the `WARM_UP`th on."""

    def __init__(self) -> None:
        self.cases = self.base = 0

    @contextlib.contextmanager
    def case(self) -> Iterator[None]:
        started = time.process_time()
        yield
        assert time.process_time() - started < SECONDS
        self.cases += 1
        if self.cases == WARM_UP:
            self.base = _memory()

    def growth(self) -> int:
        """Bytes."""
        return _memory() - self.base if self.base else 0


@pytest.fixture
def watch() -> Iterator[Watch]:
    watch = Watch()
    yield watch
    assert watch.growth() < GROWTH


def _memory() -> int:
    """Bytes that are resident now; where the system does not tell, the most that ever were."""
    gc.collect()
    status = Path("/proc/self/statm")
    if status.exists():
        return int(status.read_text().split()[1]) * resource.getpagesize()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
