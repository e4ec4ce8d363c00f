"""Return freed memory to the system."""

from __future__ import annotations

import contextlib
import ctypes
import threading

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
