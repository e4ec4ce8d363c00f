"""SharedMemory: one worker writes pixels, the engine copies them."""

from __future__ import annotations

import fcntl
import math
import mmap
import os
from collections.abc import Sequence

import numpy as np

from ..media.types import Pixels

KEEP_BYTES = 16 << 20
"""How much memory a worker keeps for its next result; to allocate it again takes as long as resizing a small image."""

_ADD_SEALS = 1033
_SEAL_SEAL = 0x1
_SEAL_SHRINK = 0x2


class SharedMemory:
    """A memory file that can grow but not shrink, so that reading a mapped range never fails.

    Args:
        file: its descriptor, which `close` closes.
    """

    def __init__(self, file: int) -> None:
        self.file = file
        self._mapped: mmap.mmap | None = None

    @classmethod
    def create(cls) -> SharedMemory:
        """Create an empty memory file."""
        file = os.memfd_create("dashinfer-vlm-pixels", os.MFD_ALLOW_SEALING | os.MFD_CLOEXEC)
        fcntl.fcntl(file, _ADD_SEALS, _SEAL_SHRINK | _SEAL_SEAL)
        return cls(file)

    def write(self, pixels: Pixels) -> None:
        """Write an array at the beginning."""
        if os.fstat(self.file).st_size < pixels.nbytes:
            os.ftruncate(self.file, math.ceil(pixels.nbytes / mmap.PAGESIZE) * mmap.PAGESIZE)
        np.copyto(self._view(pixels.shape), pixels)

    def read(self, shape: Sequence[int]) -> Pixels:
        """Copy an array of this shape: its writer could change it at any time.

        Raises:
            ValueError: less was written.
        """
        if os.fstat(self.file).st_size < math.prod(shape):
            raise ValueError("the memory is smaller than the array")
        copy: Pixels = self._view(shape).copy()
        if self._mapped is not None and len(self._mapped) > KEEP_BYTES:
            self._mapped.madvise(mmap.MADV_REMOVE, KEEP_BYTES, len(self._mapped) - KEEP_BYTES)
        return copy

    def close(self) -> None:
        self._mapped = None
        os.close(self.file)

    def _view(self, shape: Sequence[int]) -> Pixels:
        size = math.prod(shape)
        if self._mapped is None or len(self._mapped) < size:
            self._mapped = mmap.mmap(self.file, os.fstat(self.file).st_size)
        view: Pixels = np.frombuffer(self._mapped, np.uint8, size).reshape(shape)
        return view
