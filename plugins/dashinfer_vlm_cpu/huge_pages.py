"""Memory in pages of 2 MiB, where the system has them: a tenth of a decode step went into looking up smaller ones.

Linux makes such pages of whole and aligned pieces of memory only: matrices lie side by side in larger pieces, which are
free again when the last of their tensors is. Pages are joined when a model is loaded, beside its first answers: asking
for huge ones at once would be simpler, but a virtual machine may take a second or two for each gigabyte of them.
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
from dataclasses import dataclass

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


@dataclass(slots=True)
class _Piece:
    """Memory that only its tensors keep, handed out from the front.

    Attributes:
        memory: all of it.
        end: where the rest begins that nobody has.
    """

    memory: weakref.ref[mmap.mmap]
    end: int


class _Pieces:
    """The pieces of this process; threads may ask at once."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """As new, for a child of a process that had forked: what lies there is its parent's."""
        self._lock = threading.Lock()
        self._newest: _Piece | None = None
        self._small: list[_Piece] = []  # whose pages were not joined yet
        self._joins = False
        self._taken = 0.0

    def take(self, size: int) -> tuple[mmap.mmap, int]:
        """Memory, and where in it so many bytes begin that nobody else has."""
        with self._lock:
            piece = self._newest
            memory = piece.memory() if piece else None
            if piece is None or memory is None or piece.end + size > len(memory):
                if piece:
                    self._join_soon()
                memory, start = _new_memory(max(size, PIECE))
                self._newest = piece = _Piece(weakref.ref(memory), start)
                self._small.append(piece)
            start, piece.end = piece.end, piece.end + -(-size // LINE) * LINE
            self._taken = time.monotonic()
            return memory, start

    def _join_soon(self) -> None:
        if self._joins or sys.platform != "linux":
            return
        with contextlib.suppress(RuntimeError):  # no more threads: small pages do as well
            threading.Thread(target=self._join_all, name="huge-pages", daemon=True).start()
            self._joins = True

    def _join_all(self) -> None:
        while piece := self._next_to_join():
            join(piece.memory, piece.end)

    def _next_to_join(self) -> _Piece | None:
        while (left := self._taken + QUIET - time.monotonic()) > 0:
            time.sleep(left)
        with self._lock:
            self._joins = bool(self._small)
            return self._small.pop() if self._small else None


def _new_memory(size: int) -> tuple[mmap.mmap, int]:
    """Memory for so many bytes, and where in it the first huge page would begin."""
    memory = mmap.mmap(-1, -(-size // PAGE) * PAGE + PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return memory, -_address(memory) % PAGE


def _address(memory: mmap.mmap) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


def join(memory: weakref.ref[mmap.mmap], end: int) -> None:
    """Make huge pages of the whole ones before `end`, as long as somebody has the memory.

    Where the system refuses, nothing is lost: the small ones do as well, only slower.
    """
    found = memory()
    if found is None:
        return
    madvise = ctypes.CDLL(None).madvise  # Python's own keeps the interpreter's lock
    address = _address(found)
    for start in range(-address % PAGE, end - PAGE + 1, PAGE):
        for advice in (MADV_HUGEPAGE, MADV_COLLAPSE):
            madvise(ctypes.c_void_p(address + start), ctypes.c_size_t(PAGE), advice)


_PIECES = _Pieces()
os.register_at_fork(after_in_child=_PIECES.reset)


def empty(count: int, dtype: torch.dtype) -> Tensor:
    """So many numbers, of any value."""
    if not count:
        return torch.empty(0, dtype=dtype)
    memory, start = _PIECES.take(count * dtype.itemsize)
    return torch.frombuffer(memory, dtype=dtype, count=count, offset=start)
