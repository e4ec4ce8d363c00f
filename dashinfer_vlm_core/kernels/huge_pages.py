"""Memory in pages of 2 MiB, where the system has them: a tenth of a decode step went into looking up smaller ones.

Linux makes such pages of whole and aligned pieces of memory only: matrices lie side by side in larger pieces, which are
free again when the last of their tensors is. Pages are joined when a model is loaded, beside its first answers: asking
for huge ones at once would be simpler, but a virtual machine may take a second or two for each gigabyte of them.
"""

from __future__ import annotations

import ctypes
import mmap
import sys
import threading
import time
import weakref

import torch
from torch import Tensor

PAGE = 2 << 20
PIECE = 16 << 20
LINE = 64
"""Bytes of a cache line: where each tensor begins."""

QUIET = 1.0
"""Seconds without a new tensor, after which a model is taken to be loaded."""

MADV_HUGEPAGE, MADV_COLLAPSE = 14, 25
"""Linux's <linux/mman.h>. The second one does now, from Linux 6.1 on, what the first one allows to be done some day."""


class _Pieces:
    """Hands memory out from the front of the newest piece to its end."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._newest: weakref.ref[mmap.mmap] | None = None
        self._start = 0
        self._small = weakref.WeakSet[mmap.mmap]()  # whose pages were not joined yet
        self._joins = False
        self._taken = 0.0

    def take(self, size: int) -> tuple[mmap.mmap, int]:
        """A piece, and where in it so many bytes begin that nobody else has."""
        with self._lock:
            piece = self._newest() if self._newest else None
            if piece is None or self._start + size > len(piece):
                if piece:
                    self._join_soon()
                piece, self._start = _new_piece(max(size, PIECE))
                self._newest = weakref.ref(piece)
                self._small.add(piece)
            start, self._start = self._start, self._start + -(-size // LINE) * LINE
            self._taken = time.monotonic()
            return piece, start

    def _join_soon(self) -> None:
        if not self._joins and sys.platform == "linux":
            self._joins = True
            threading.Thread(target=self._join_when_quiet, name="huge-pages", daemon=True).start()

    def _join_when_quiet(self) -> None:
        while (left := self._taken + QUIET - time.monotonic()) > 0:
            time.sleep(left)
        with self._lock:
            self._joins = False
            pieces = list(self._small)
            self._small.clear()
        while pieces:
            join(pieces.pop())


def _new_piece(size: int) -> tuple[mmap.mmap, int]:
    """A piece for so many bytes, and where in it the first page begins."""
    piece = mmap.mmap(-1, -(-size // PAGE) * PAGE + PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return piece, -_address(piece) % PAGE


def _address(piece: mmap.mmap) -> int:
    return torch.frombuffer(piece, dtype=torch.uint8).data_ptr()


def join(piece: mmap.mmap) -> None:
    """Make huge pages of those that are taken; of what the system refuses, nothing: it is as good, only slower."""
    madvise = ctypes.CDLL(None).madvise  # Python's own keeps the interpreter's lock
    address = _address(piece)
    for start in range(-address % PAGE, len(piece) - PAGE + 1, PAGE):
        for advice in (MADV_HUGEPAGE, MADV_COLLAPSE):
            madvise(ctypes.c_void_p(address + start), ctypes.c_size_t(PAGE), advice)


_PIECES = _Pieces()


def empty(count: int, dtype: torch.dtype) -> Tensor:
    """So many numbers, of any value."""
    if not count:
        return torch.empty(0, dtype=dtype)
    piece, start = _PIECES.take(count * dtype.itemsize)
    return torch.frombuffer(piece, dtype=dtype, count=count, offset=start)
