"""Memory in pages of 2 MiB, where the system has them: a tenth of a decode step went into looking up smaller ones.

Linux gives such pages to whoever asks (`madvise`), and only whole ones: matrices lie side by side in larger pieces of
memory, which are free again when the last of their tensors is.
"""

from __future__ import annotations

import contextlib
import mmap
import threading
import weakref

import torch
from torch import Tensor

PAGE = 2 << 20
PIECE = 16 << 20
LINE = 64
"""Bytes of a cache line: where each tensor begins."""


class _Pieces:
    """Hands memory out from the front of the newest piece to its end."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._newest: weakref.ref[mmap.mmap] | None = None
        self._start = 0

    def take(self, size: int) -> tuple[mmap.mmap, int]:
        """A piece, and where in it so many bytes begin that nobody else has."""
        with self._lock:
            piece = self._newest() if self._newest else None
            if piece is None or self._start + size > len(piece):
                piece, self._start = _new_piece(max(size, PIECE))
                self._newest = weakref.ref(piece)
            start, self._start = self._start, self._start + -(-size // LINE) * LINE
            return piece, start


def _new_piece(size: int) -> tuple[mmap.mmap, int]:
    """A piece for so many bytes, and where in it the first page begins."""
    piece = mmap.mmap(-1, -(-size // PAGE) * PAGE + PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without them; its own pages do as well, only slower
            piece.madvise(mmap.MADV_HUGEPAGE)
    return piece, -torch.frombuffer(piece, dtype=torch.uint8).data_ptr() % PAGE


_PIECES = _Pieces()


def empty(count: int, dtype: torch.dtype) -> Tensor:
    """So many numbers, of any value."""
    if not count:
        return torch.empty(0, dtype=dtype)
    piece, start = _PIECES.take(count * dtype.itemsize)
    return torch.frombuffer(piece, dtype=dtype, count=count, offset=start)
