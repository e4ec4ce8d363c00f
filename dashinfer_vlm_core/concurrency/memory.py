"""The memory of the process: return what was freed to the system, and measure it."""

from __future__ import annotations

import contextlib
import ctypes
import os
import threading
from collections.abc import Iterator
from pathlib import Path

_TRIM_LOCK = threading.Lock()


def trim_memory() -> None:
    """Return freed memory to the system, which takes milliseconds; does nothing if another thread is doing that.

    After a large block was freed, glibc allocates later blocks of up to that size (at most 32 MiB) in its heap, where
    freed blocks stay with the process. Without glibc, this function does nothing.
    """
    if not _TRIM_LOCK.acquire(blocking=False):
        return
    try:
        with contextlib.suppress(OSError, TypeError, AttributeError):
            ctypes.CDLL(None).malloc_trim(0)
    finally:
        _TRIM_LOCK.release()


def resident_bytes() -> int:
    """Return the resident memory of this process and of the processes that it has started, in bytes; 0 if unknown.

    Memory that several of them share counts once. It takes about 10 milliseconds per GiB.
    """
    parents = dict(_parents())
    family = {os.getpid()}
    while children := {child for child, parent in parents.items() if parent in family} - family:
        family |= children
    return sum(map(_proportional_bytes, family))


def _parents() -> Iterator[tuple[int, int]]:
    for file in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has ended
            fields = file.read_text().rpartition(")")[2].split()  # after the name, which may contain anything
            yield int(file.parent.name), int(fields[1])


def _proportional_bytes(process: int) -> int:
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{process}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) * 1024
    return 0
