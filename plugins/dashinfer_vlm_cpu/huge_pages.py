"""Allocate weights in huge pages of 2 MiB, where available: TLB misses of smaller ones took a tenth of a decode step.

Linux uses huge pages only for whole, aligned 2 MiB ranges. Matrices are therefore placed next to each other in larger
chunks, which are freed with the last of their tensors. Pages are collapsed after a model is loaded, while it computes
nothing, and slowly next to requests. Requesting huge pages at allocation would be simpler, but a virtual machine may
take one or two seconds for each gigabyte.

Files of converted weights are mapped, and most file systems have no huge pages. Their ranges are replaced by copies in
huge pages at the same times.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from dashinfer_vlm_core.concurrency.compute import CPU_EXECUTOR

HUGE_PAGE_SIZE = 2 << 20
CHUNK_SIZE = 16 << 20
CACHE_LINE = 64
"""Size of a cache line, to which each tensor is aligned."""

QUIET_SECONDS = 1.0
"""A model is considered loaded after this many seconds without a new tensor."""

BUSY_SHARE = 0.05
"""How much of the compute thread's time is spent on huge pages while it also serves requests. A range takes half of a
millisecond, but 5 where a virtual machine returns free memory to its host."""

MAX_PAUSE_SECONDS = 1.0
"""The longest time between two ranges: the process may have been stopped during one."""

IDLE_SECONDS = 0.001
"""A range that waits longer than this for the compute thread waits for a request."""

MAX_COPY_BYTES = 1 << 30
"""How much is mapped for copies at a time: the address space of the process may be limited (`ulimit -v`)."""

MADV_HUGEPAGE, MADV_COLLAPSE = 14, 25
"""From Linux's <linux/mman.h>. MADV_HUGEPAGE allows the kernel to collapse pages at some later time; MADV_COLLAPSE,
from Linux 6.1 on, collapses them immediately."""

MREMAP_MAYMOVE, MREMAP_FIXED = 1, 2
"""From Linux's <linux/mman.h>."""

CollapseRange = Callable[[weakref.ref[mmap.mmap], int], bool]
"""Called with a mapping and the offset of 2 MiB; returns whether the next ones can be collapsed."""


@dataclass(slots=True)
class _Chunk:
    """Memory that is kept alive only by its tensors and is allocated from front to back.

    Attributes:
        memory: the mapping.
        start: offset from which on its pages are collapsed.
        end: offset of the unused rest.
        is_file: whether it maps a file.
    """

    memory: weakref.ref[mmap.mmap]
    start: int
    end: int
    is_file: bool = False


class _ChunkAllocator:
    """The chunks of this process. Thread-safe."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Reset to the initial state, for a forked child: the existing chunks belong to its parent."""
        self._lock = threading.Lock()
        self._newest: _Chunk | None = None
        self._uncollapsed: list[_Chunk] = []  # chunks whose pages are not collapsed yet
        self._is_collapsing = False
        self._last_allocation = 0.0

    def allocate(self, size: int) -> tuple[mmap.mmap, int]:
        """Allocate `size` bytes; returns a mapping and the offset in it."""
        with self._lock:
            chunk = self._newest
            memory = chunk.memory() if chunk else None
            if chunk is None or memory is None or chunk.end + size > len(memory):
                if chunk:
                    self._start_collapsing()
                memory, start = _new_memory(max(size, CHUNK_SIZE))
                self._newest = chunk = _Chunk(weakref.ref(memory), 0, start)
                self._uncollapsed.append(chunk)
            start = chunk.end
            chunk.end += -(-size // CACHE_LINE) * CACHE_LINE
            self._last_allocation = time.monotonic()
            return memory, start

    def adopt(self, memory: mmap.mmap, start: int) -> None:
        """Accept a private mapping of a file, whose ranges from `start` on are replaced by copies."""
        with self._lock:
            self._uncollapsed.append(_Chunk(weakref.ref(memory), start, len(memory), is_file=True))
            self._last_allocation = time.monotonic()
            self._start_collapsing()

    def _start_collapsing(self) -> None:
        if self._is_collapsing or sys.platform != "linux":
            return
        with contextlib.suppress(RuntimeError):  # no thread can be started: small pages work too
            threading.Thread(target=self._collapse_all, name="dashinfer-vlm-huge-pages", daemon=True).start()
            self._is_collapsing = True

    def _collapse_all(self) -> None:
        while chunk := self._next_to_collapse():
            if chunk.is_file:
                replace(chunk.memory, chunk.end, start=chunk.start)
            else:
                collapse(chunk.memory, chunk.end)

    def _next_to_collapse(self) -> _Chunk | None:
        while (left := self._last_allocation + QUIET_SECONDS - time.monotonic()) > 0:
            time.sleep(left)
        with self._lock:
            self._is_collapsing = bool(self._uncollapsed)
            return self._uncollapsed.pop() if self._uncollapsed else None


def _new_memory(size: int) -> tuple[mmap.mmap, int]:
    """Map memory for `size` bytes; returns the mapping and the offset of its first huge page boundary."""
    memory = mmap.mmap(
        -1, -(-size // HUGE_PAGE_SIZE) * HUGE_PAGE_SIZE + HUGE_PAGE_SIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    )
    return memory, -_address(memory) % HUGE_PAGE_SIZE


def _address(memory: mmap.mmap) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


def _collapse_range(memory: weakref.ref[mmap.mmap], start: int) -> bool:
    """Collapse the 2 MiB at the offset `start`; return False if the memory has been freed."""
    mapping = memory()
    if mapping is None:
        return False
    for advice in (MADV_HUGEPAGE, MADV_COLLAPSE):
        _LIBC.madvise(_address(mapping) + start, HUGE_PAGE_SIZE, advice)  # `mmap.madvise` holds the GIL
    return True


def collapse(
    memory: weakref.ref[mmap.mmap], end: int, collapse_range: CollapseRange = _collapse_range, *, start: int = 0
) -> None:
    """Collapse the complete 2 MiB ranges from `start` to `end` into huge pages, unless the memory has been freed.

    Each range is a task of the compute thread: at the same time as a decode step, on all cores, it would take a core
    from that step, and steps of 10 ms took a second. See `pause_after` for the time between two ranges.

    If the system declines, small pages remain in use, which are only slower.
    """
    mapping = memory()
    if mapping is None:
        return
    first = start + -(_address(mapping) + start) % HUGE_PAGE_SIZE
    del mapping  # the model may be unloaded before the end
    for offset in range(first, end - HUGE_PAGE_SIZE + 1, HUGE_PAGE_SIZE):
        submitted = time.monotonic()
        started, ended, is_kept = CPU_EXECUTOR.run(partial(_timed, partial(collapse_range, memory, offset)))
        if not is_kept:
            return
        time.sleep(pause_after(waited=started - submitted, took=ended - started))


def _timed(work: Callable[[], bool]) -> tuple[float, float, bool]:
    """Return when work started and ended, and its result."""
    started = time.monotonic()
    result = work()
    return started, time.monotonic(), result


def pause_after(*, waited: float, took: float) -> float:
    """Return the seconds until the next range: none while the compute thread is idle, and otherwise so many that
    requests are slowed down by `BUSY_SHARE` only.

    Args:
        waited: how long a range waited for the compute thread.
        took: what it took.
    """
    return min(took / BUSY_SHARE - took, MAX_PAUSE_SECONDS) if waited > IDLE_SECONDS else 0.0


def replace(memory: weakref.ref[mmap.mmap], end: int, *, start: int = 0) -> None:
    """Replace the complete 2 MiB ranges of a file's mapping from `start` to `end` by copies in huge pages, like
    `collapse`.

    The copies are moved from a mapping in the order of its addresses: the kernel joins them to one mapping again. Each
    process may have 65,530 mappings by default.
    """
    for first in range(start, end, MAX_COPY_BYTES):
        copies = _Copies.create(min(end - first, MAX_COPY_BYTES))
        if copies:
            last = first + MAX_COPY_BYTES - 1  # at which a range can begin
            try:
                collapse(memory, min(last + HUGE_PAGE_SIZE, end), copies.replace_range, start=first)
            finally:
                copies.free()


@dataclass(slots=True)
class _Copies:
    """Memory for copies, which `mmap(2)` mapped: Python's object would unmap what has been moved away.

    Attributes:
        address: that of the next copy, at the boundary of a huge page.
        end: the end of the mapping.
    """

    address: int
    end: int

    @classmethod
    def create(cls, size: int) -> _Copies | None:
        """Map at least `size` bytes; None if that is impossible."""
        size = (size // HUGE_PAGE_SIZE + 1) * HUGE_PAGE_SIZE
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        start = _LIBC.mmap(None, size, mmap.PROT_READ | mmap.PROT_WRITE, flags, -1, 0)
        if start in (None, ctypes.c_void_p(-1).value):
            return None
        copies = cls(start, start + size)
        copies._unmap_to(-(-start // HUGE_PAGE_SIZE) * HUGE_PAGE_SIZE)
        _LIBC.madvise(copies.address, copies.end - copies.address, MADV_HUGEPAGE)
        return copies

    def replace_range(self, memory: weakref.ref[mmap.mmap], start: int) -> bool:
        """Replace the 2 MiB of a file at the offset `start` by a copy; return False if the memory has been freed, or
        if that is impossible.

        The copy is moved to the same address in one system call: a thread that reads it at the same time sees one or
        the other, with the same content.
        """
        mapping = memory()
        if mapping is None:
            return False
        target = _address(mapping) + start
        ctypes.memmove(self.address, target, HUGE_PAGE_SIZE)
        flags = MREMAP_MAYMOVE | MREMAP_FIXED
        if _LIBC.mremap(self.address, HUGE_PAGE_SIZE, HUGE_PAGE_SIZE, flags, target) != target:
            return False
        self.address += HUGE_PAGE_SIZE
        return True

    def free(self) -> None:
        """Unmap what was not moved away."""
        self._unmap_to(self.end)

    def _unmap_to(self, address: int) -> None:
        if address > self.address:
            _LIBC.munmap(self.address, address - self.address)
        self.address = address


def _has_huge_pages() -> bool:
    try:
        return "[never]" not in Path("/sys/kernel/mm/transparent_hugepage/enabled").read_text()
    except OSError:
        return False


def _load_libc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None)
    pointer, size, number = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    signatures = {
        "mmap": ([pointer, size, number, number, number, ctypes.c_long], pointer),
        "munmap": ([pointer, size], number),
        "mremap": ([pointer, size, size, number, pointer], pointer),
        "madvise": ([pointer, size, number], number),
    }
    for name, (arguments, result) in signatures.items():
        if hasattr(libc, name):  # `mremap` exists on Linux only
            function = getattr(libc, name)
            function.argtypes = arguments
            function.restype = result
    return libc


_LIBC = _load_libc()
_ALLOCATOR = _ChunkAllocator()
os.register_at_fork(after_in_child=_ALLOCATOR.reset)


def empty(count: int, dtype: torch.dtype) -> Tensor:
    """Allocate an uninitialized 1-D tensor of `count` elements."""
    if not count:
        return torch.empty(0, dtype=dtype)
    memory, start = _ALLOCATOR.allocate(count * dtype.itemsize)
    return torch.frombuffer(memory, dtype=dtype, count=count, offset=start)


def adopt(memory: mmap.mmap, start: int) -> None:
    """Copy a private mapping of a file, from `start` on, to huge pages once the model is loaded, if this system has
    them.

    With small pages a decode step takes about a tenth longer, but the memory is that of the page cache, which other
    processes share.
    """
    if sys.platform == "linux" and _has_huge_pages():
        _ALLOCATOR.adopt(memory, start)
